"""The import graph is the architecture: it has no cycles, and each foreign thing has one door."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "mtcheckpoint"
ROOT = Path(__file__).parents[1] / PACKAGE

# Planning, protocol and policy: no disk, clock, thread or device. So is each module whose docstring
# says "Pure".
CORE = {
    *("_config_rules", "_handshake.files", "_handshake.protocol", "_policy", "_restore"),
    *("_replicator.choice", "_replicator.settings", "errors"),
}
# What pure modules may import besides each other. datetime: to spell a time, never to ask for it.
PURE_IMPORTS = {
    *("__future__", "base64", "bisect", "collections", "dataclasses", "datetime", "enum"),
    *("functools", "itertools", "json", "math", "numpy", "re", "types", "typing", "yaml"),
    *("pathlib.PurePath", "pathlib.PurePosixPath", "os.environ", "os.fspath", "os.PathLike"),
}
EXCEPTIONS = {"_shares.identity": {"time", "uuid"}}  # it makes the id of a save
# Calls that would tell a pure module the time, or open a file.
IMPURE_CALLS = {"open", "now", "today", "utcnow", "input", "print"}


def module_name(path: Path) -> str:
    parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def sources() -> Mapping[str, ast.Module]:
    """All modules of the package, parsed, by name."""
    return {module_name(p): ast.parse(p.read_text(encoding="utf-8")) for p in ROOT.rglob("*.py")}


def nodes(tree: ast.AST, *, typing: bool = False) -> Iterator[ast.AST]:
    """All nodes, also inside functions, but not what is only imported for type checkers."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not typing:
            continue
        yield child
        yield from nodes(child, typing=typing)


def imports(module: str, tree: ast.Module) -> set[str]:
    """Absolute names of all that a module imports: ``a.b`` for ``from a import b``, too."""
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import: write it out"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.add(node.module or "")
    return found


def graph(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Which modules of the package each one imports."""
    edges = {}
    for module, tree in trees.items():
        inside = imports(module, tree) & trees.keys()
        # `from mtcheckpoint import errors` names the package too, which is loaded first anyway.
        edges[module] = {m for m in inside if not module.startswith(f"{m}.")} - {module}
        edges[module].discard(PACKAGE)
    return edges


def reachable(edges: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        fresh = edges[ahead.pop()] - found
        found |= fresh
        ahead.extend(fresh)
    return found


def importers(trees: Mapping[str, ast.Module], foreign: str) -> set[str]:
    """The modules that import `foreign` or something below it."""
    return {
        module.removeprefix(f"{PACKAGE}.")
        for module, tree in trees.items()
        if any(name == foreign or name.startswith(f"{foreign}.") for name in imports(module, tree))
    }


def sleepers(trees: Mapping[str, ast.Module]) -> set[str]:
    """The modules that sleep."""
    return {
        module.removeprefix(f"{PACKAGE}.")
        for module, tree in trees.items()
        if {"time.sleep", "asyncio.sleep"} & imports(module, tree)
        or any(
            isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.sleep", "asyncio.sleep")
            for node in nodes(tree)
        )
    }


def pure_modules(trees: Mapping[str, ast.Module]) -> list[str]:
    """The modules that should be pure, without the package's name."""
    claims = {
        module.removeprefix(f"{PACKAGE}.")
        for module, tree in trees.items()
        if re.search(r"\bPure\b", ast.get_docstring(tree) or "")
    }
    return sorted(CORE | claims)


def impurities(module: str, tree: ast.Module, pure: Iterable[str] = ("errors",)) -> set[str]:
    """What a pure module should not have: imports, and calls by their last name."""
    allowed = PURE_IMPORTS | {f"{PACKAGE}.{name}" for name in pure}
    found = {name for name in _used(module, tree) if not _covered(name, allowed)}
    for node in nodes(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            found |= {f"{called}()"} & {f"{call}()" for call in IMPURE_CALLS}
    return found


def _used(module: str, tree: ast.Module) -> set[str]:
    """What is imported; of `os` and `pathlib`, where a part is pure, what is used of them."""
    found = imports(module, tree)
    used = {
        ast.unparse(node)
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("os", "pathlib")
    }
    # `a` stands for nothing where `a.b` is there as well.
    found |= used
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def _covered(name: str, allowed: Iterable[str]) -> bool:
    return any(name == pure or name.startswith(f"{pure}.") for pure in allowed)


# The package.


def test_no_import_cycles() -> None:
    graphlib.TopologicalSorter(graph(sources())).prepare()  # raises CycleError, naming the cycle


def test_orbax_has_one_door() -> None:
    assert {name.split(".")[0] for name in importers(sources(), "orbax")} == {"_orbax"}


def test_private_jax_has_one_door() -> None:
    assert importers(sources(), "jax._src") == {"_jax"}
    assert importers(sources(), "jaxlib") == set()


def test_one_module_sleeps() -> None:
    assert sleepers(sources()) == {"_clock"}


def test_the_manager_and_the_replicator_do_not_know_each_other() -> None:
    edges = graph(sources())
    assert reachable(edges, f"{PACKAGE}.manager")
    for module in edges:
        if module.startswith(f"{PACKAGE}._replicator"):
            assert f"{PACKAGE}.manager" not in reachable(edges, module), module
            assert module not in reachable(edges, f"{PACKAGE}.manager")


def test_the_replicator_meets_the_rest_in_pure_modules_of_the_handshake() -> None:
    edges = graph(sources())
    # TensorStore's format is nobody's: both read it.
    common = ("_clock", "_handshake", "_ocdbt_index", "errors")
    allowed = {f"{PACKAGE}.{name}" for name in common}
    allowed |= {f"{PACKAGE}.{name}" for name in pure_modules(sources()) if "_handshake." in name}
    for module, found in edges.items():
        if module.startswith(f"{PACKAGE}._replicator"):
            outside = {m for m in found if not m.startswith(f"{PACKAGE}._replicator")}
            assert outside <= allowed, module


@pytest.mark.parametrize("name", pure_modules(sources()))
def test_pure_modules_do_nothing(name: str) -> None:
    module = f"{PACKAGE}.{name}"
    found = impurities(module, sources()[module], pure_modules(sources()))
    assert found <= EXCEPTIONS.get(name, set())


def test_only_the_children_of_the_harness_and_the_command_line_are_programs() -> None:
    programs = {
        module.removeprefix(f"{PACKAGE}.")
        for module, tree in sources().items()
        if any(
            isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body
        )
    }
    assert programs <= {"__main__", "testing._child", "testing._zygote"}


# The rules themselves can fail.


def parsed(**texts: str) -> dict[str, ast.Module]:
    return {
        f"{PACKAGE}.{name}" if name != "top" else PACKAGE: ast.parse(text)
        for name, text in texts.items()
    }


def test_a_cycle_is_found_also_inside_functions() -> None:
    trees = parsed(
        top="",
        a="from mtcheckpoint import b",
        b="def late():\n    from mtcheckpoint.a import thing",
    )
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph(trees)).prepare()


def test_an_import_for_type_checkers_is_no_cycle() -> None:
    trees = parsed(
        top="",
        a="from mtcheckpoint import b",
        b="if TYPE_CHECKING:\n    from mtcheckpoint.a import thing",
    )
    graphlib.TopologicalSorter(graph(trees)).prepare()


def test_a_second_door_is_found() -> None:
    trees = parsed(a="import orbax.checkpoint as ocp", b="import orbaxish", c="from orbax import x")
    assert importers(trees, "orbax") == {"a", "c"}


@pytest.mark.parametrize(
    "text", ["import time\ntime.sleep(1)", "from time import sleep", "wait = time.sleep"]
)
def test_a_second_sleeper_is_found(text: str) -> None:
    assert sleepers(parsed(a=text)) == {"a"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os", {"os"}),
        ("from pathlib import Path", {"pathlib.Path"}),
        ("import threading", {"threading"}),
        ("import jax", {"jax"}),
        ("from mtcheckpoint import _jax", {"mtcheckpoint._jax"}),
        ("import os\nx = os.environ", set()),
        ("import os\nos.remove(os.environ['x'])", {"os.remove"}),
        ("x = datetime.datetime.now()", {"now()"}),
        ("open('x')", {"open()"}),
        ("from pathlib import PurePosixPath\nfrom mtcheckpoint import errors", set()),
    ],
)
def test_impurity_is_found(text: str, found: set[str]) -> None:
    assert impurities("mtcheckpoint.a", ast.parse(text)) == found
