"""The public door: what is exported, that it is documented, and that errors are one tree."""

from __future__ import annotations

import builtins
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mtcheckpoint
import mtcheckpoint.testing
from mtcheckpoint import errors

ROOT = Path(__file__).parents[1]
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def public_things() -> dict[str, Any]:
    """Everything exported that can have a docstring, by its full name."""
    modules = {"mtcheckpoint": mtcheckpoint, "mtcheckpoint.testing": mtcheckpoint.testing}
    modules["mtcheckpoint.errors"] = errors
    return {
        f"{place}.{name}": thing
        for place, module in modules.items()
        for name in module.__all__
        if callable(thing := getattr(module, name))
    }


def public_functions() -> dict[str, Callable[..., Any]]:
    """Functions and the methods that our own classes define, by their full name."""
    found = {}
    for name, thing in public_things().items():
        if inspect.isfunction(thing):
            found[name] = thing
        elif inspect.isclass(thing):
            for method, function in vars(thing).items():
                plain = getattr(function, "__func__", function)
                if not method.startswith("_") and inspect.isfunction(plain):
                    found[f"{name}.{method}"] = plain
    return found


def documented_surface(text: str) -> list[str]:
    """The names in the table of docs/architecture.md under "The public door"."""
    section = text.split("## The public door", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_the_door_is_the_one_in_the_docs() -> None:
    assert sorted(documented_surface(ARCHITECTURE.read_text())) == sorted(mtcheckpoint.__all__)


def test_exports_exist_once_each() -> None:
    for module in (mtcheckpoint, mtcheckpoint.testing, errors):
        assert len(set(module.__all__)) == len(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_a_star_import_gives_just_these() -> None:
    namespace: dict[str, Any] = {}
    exec("from mtcheckpoint import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(mtcheckpoint.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        mtcheckpoint.no_such_name  # noqa: B018


def test_other_modules_are_marked_as_ours() -> None:
    """A module without an underscore is one that users may import."""
    entries = Path(mtcheckpoint.__file__).parent.iterdir()
    names = {e.stem for e in entries if e.suffix == ".py" or (e / "__init__.py").exists()}
    public = {name for name in names if not name.startswith("_")}
    assert public == {"cli", "config", "errors", "manager", "testing"}


@pytest.mark.parametrize("name", sorted(public_things()))
def test_public_things_have_a_docstring(name: str) -> None:
    text = public_things()[name].__doc__ or ""
    assert text.strip()
    # A dataclass without one gets its signature from Python.
    assert not text.startswith(f"{name.rpartition('.')[2]}(")


@pytest.mark.parametrize("name", sorted(public_functions()))
def test_arguments_are_documented(name: str) -> None:
    """With three arguments or more, each is in the Args section or named in the text."""
    function = public_functions()[name]
    text = inspect.getdoc(function) or ""
    assert text, name
    parameters = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
    if len(parameters) >= 3 and "Not available" not in text and "arguments are" not in text:
        unsaid = [p for p in parameters if not re.search(rf"\b{p}\b", text)]
        assert unsaid == []


@pytest.mark.parametrize("name", sorted(public_functions()))
def test_errors_of_ours_that_are_raised_are_documented(name: str) -> None:
    function = public_functions()[name]
    raised = set(re.findall(r"raise (\w+)\(", inspect.getsource(function))) & set(errors.__all__)
    text = inspect.getdoc(function) or ""
    assert not raised or "Raises:" in text
    assert all(kind in text for kind in raised)


# Errors.


def kinds() -> list[type[BaseException]]:
    return [getattr(errors, name) for name in errors.__all__]


def test_every_error_class_is_exported() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }
    assert defined == set(errors.__all__)


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """Each error in the docstring's drawing: its parent there, and the builtin beside it."""
    found: dict[str, tuple[str | None, str | None]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([ │├└─]*)(\w+Error)(?: \((\w+)\))?", line)
        if match is None:
            continue
        depth = len(match[1])
        above = [pair for pair in above if pair[0] < depth]
        found[match[2]] = (above[-1][1] if above else None, match[3])
        above.append((depth, match[2]))
    return found


def test_the_drawing_is_the_tree() -> None:
    found = {}
    for kind in kinds():
        ours = [base for base in kind.__bases__ if base.__module__ == errors.__name__]
        others = [base for base in kind.__bases__ if hasattr(builtins, base.__name__)]
        found[kind.__name__] = (
            ours[0].__name__ if ours else None,
            others[0].__name__ if others and ours else None,
        )
    assert drawn_tree() == found


def test_there_is_one_root() -> None:
    assert all(issubclass(kind, errors.MtCheckpointError) for kind in kinds())
    assert issubclass(errors.MtCheckpointError, Exception)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_documented_attributes_are_set(kind: type[BaseException]) -> None:
    names = re.findall(r"^    (\w+): ", inspect.getdoc(kind) or "", re.MULTILINE)
    parameters = inspect.signature(kind.__init__).parameters
    examples = {"step": 3, "seconds": 1.0}
    needed = {
        name: examples.get(name, "x")
        for name, parameter in parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        and parameter.default is inspect.Parameter.empty
    }
    error = kind("what", **needed)
    assert all(hasattr(error, name) for name in names)
    assert "what" in str(error)


# The package.


def test_the_package_is_typed() -> None:
    assert (Path(mtcheckpoint.__file__).parent / "py.typed").exists()


def test_the_class_to_train_with_is_one_of_orbaxs_managers() -> None:
    from orbax.checkpoint import AbstractCheckpointManager

    assert AbstractCheckpointManager in mtcheckpoint.ReplicatedCheckpointManager.__mro__
    assert not inspect.isabstract(mtcheckpoint.ReplicatedCheckpointManager)


def test_importing_starts_no_device_and_says_nothing() -> None:
    code = (
        "import mtcheckpoint, jax._src.xla_bridge as b, threading;"
        "[getattr(mtcheckpoint, name) for name in mtcheckpoint.__all__];"
        "assert not b.backends_are_initialized(); assert threading.active_count() == 1"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(
    importlib.util.find_spec("mtcheckpoint.cli") is None, reason="there is no command line yet"
)
@pytest.mark.parametrize("command", [["mtcheckpoint"], [sys.executable, "-m", "mtcheckpoint"]])
def test_the_command_says_what_it_can_do(command: list[str]) -> None:
    command[0] = command[0].replace(
        "mtcheckpoint", str(Path(sys.executable).parent / "mtcheckpoint")
    )
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for name in ("demo", "replicator"):
        assert name in done.stdout
