"""What the documents show is run, and what they say of the code is compared with it.

Run as a program, this writes the module map of docs/architecture.md anew.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mtcheckpoint"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# A block of Python; `skip` is the reason in the comment before it, if there is one.
_BLOCK = re.compile(
    r"(?:^<!-- test: skip (?P<skip>.+) -->\n+)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_MAP = re.compile(r"<!-- module map -->\n.*<!-- end of the module map -->\n", re.DOTALL)

# Runs the blocks of each document in order, in a folder of its own, as often as told.
_RUNNER = """
import json, os, sys, traceback
outcomes = {}
for name, blocks, times in json.load(sys.stdin):
    folder = os.path.join(os.environ["DOCS_FOLDER"], name)
    os.makedirs(folder)
    os.chdir(folder)
    starts = []
    try:
        for _ in range(times):
            namespace = {"__name__": "__main__"}
            for block in blocks:
                exec(compile("\\n" * block["line"] + block["code"], name, "exec"), namespace)
                starts.append(namespace.get("start"))
        outcomes[name] = {"starts": starts}
    except BaseException:
        outcomes[name] = {"error": traceback.format_exc()}
with open(os.environ["DOCS_RESULT"], "w") as file:
    json.dump(outcomes, file)
"""


def modules() -> Iterator[Path]:
    """All modules with anything in them; an empty ``__init__`` only marks a package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.read_text(encoding="utf-8").strip():
            yield path


def blocks(document: Path) -> list[dict[str, object]]:
    text = document.read_text(encoding="utf-8")
    return [
        {"line": text.count("\n", 0, match.start("code")), "code": match["code"]}
        for match in _BLOCK.finditer(text)
        if not match["skip"]
    ]


# Examples.


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """How each document's blocks ended, by its name. The README is run twice: it says it can be."""
    folder = tmp_path_factory.mktemp("docs")
    orders = [[d.name, blocks(d), 2 if d.name == "README.md" else 1] for d in DOCUMENTS]
    result = folder / "result.json"
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER],
        input=json.dumps(orders),
        env={
            **os.environ,
            "DOCS_FOLDER": str(folder),
            "DOCS_RESULT": str(result),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.exists(), done.stdout + done.stderr
    found: dict[str, dict[str, object]] = json.loads(result.read_text())
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_examples_run(document: Path, outcomes: dict[str, dict[str, object]]) -> None:
    outcome = outcomes[document.name]
    assert "error" not in outcome, outcome["error"]


def test_the_readme_goes_on_where_it_stopped(outcomes: dict[str, dict[str, object]]) -> None:
    starts = outcomes["README.md"]["starts"]
    assert isinstance(starts, list)
    first, second = starts[: len(starts) // 2], starts[len(starts) // 2 :]
    assert first == [0, 0, 0]
    alone, replicated, persistent = second
    assert alone == 10
    # The replicator ends with the loop, so it may not have named the last step any more.
    assert 1 <= replicated <= 10
    # Persistent checkpoints are made at the steps that 5 divides, so 9 was not saved.
    assert persistent == 6


def test_few_examples_are_left_out() -> None:
    skipped = [
        match["skip"]
        for document in DOCUMENTS
        for match in _BLOCK.finditer(document.read_text(encoding="utf-8"))
        if match["skip"]
    ]
    assert len(skipped) <= 2, skipped


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_yaml_is_yaml(document: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```$", document.read_text(), re.M | re.S):
        assert isinstance(yaml.safe_load(block), dict)


def modules_with_examples() -> list[str]:
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in modules()
        if ">>> " in path.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings_run(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0


# Links, commands and flags.


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_documents_are_readable_as_text(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for line in text.splitlines():
        assert line == line.rstrip()
        assert len(line) <= 130 or line.startswith("|"), line
        # Latin letters and the box of a tree; nothing that a terminal may not show.
        assert all(ord(char) < 0x2600 for char in line), line
    assert text.count("```") % 2 == 0


def test_flags_of_the_readme_are_fields_with_these_defaults() -> None:
    import dataclasses

    from mtcheckpoint import CheckpointConfig

    defaults = {f.name: repr(f.default) for f in dataclasses.fields(CheckpointConfig)}
    section = (ROOT / "README.md").read_text().split("## Flags", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section, re.MULTILINE)
    assert len(rows) > 5
    assert rows == [(name, defaults[name]) for name, _ in rows]


def test_what_the_readme_says_has_no_effect_has_none() -> None:
    """A flag that came to life must leave the list of limits."""
    section = (ROOT / "README.md").read_text().split("## Limits", 1)[1].split("\n## ", 1)[0]
    dead = ["enable_single_replica_ckpt_restoring", "save_checkpoint_on_completion"]
    readers = {
        node.attr
        for path in modules()
        if path.name != "config.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).rpartition(".")[2] in ("config", "_config", "c")
    }
    for name in dead:
        assert f"`{name}`" in section
        assert name not in readers, f"{name} is read now: correct the limits in the README"


def test_the_version_is_in_the_changelog() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()


# The module map.


def map_name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_map() -> str:
    lines = ["| module | what it holds |", "| --- | --- |"]
    for path in modules():
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        summary = " ".join(docstring.split("\n\n", 1)[0].split()).replace("``", "`")
        lines.append(f"| `{map_name(path)}` | {summary} |")
    return "\n".join(lines)


def write_module_map() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    whole = f"<!-- module map -->\n\n{module_map()}\n\n<!-- end of the module map -->\n"
    ARCHITECTURE.write_text(_MAP.sub(lambda _: whole, text), encoding="utf-8")


def test_every_module_is_in_the_map_and_nothing_else() -> None:
    found = _MAP.search(ARCHITECTURE.read_text(encoding="utf-8"))
    assert found is not None
    rows = dict(re.findall(r"^\| `(.+?\.py)` \| (.*) \|$", found[0], re.MULTILINE))
    hint = "run: python tests/test_docs.py"
    assert sorted(rows) == sorted(map(map_name, modules())), hint
    assert all(rows.values()), "a module without a docstring"


def test_modules_named_in_the_documents_exist() -> None:
    for document in (ARCHITECTURE, ROOT / "CONTRIBUTING.md"):
        text = _MAP.sub("", document.read_text(encoding="utf-8"))
        for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
            assert (PACKAGE / name).exists() or (ROOT / name).exists(), name


# Troubleshooting.


def literals() -> list[str]:
    """The texts of the package, as written; a value that is put in is a NUL."""
    found = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def quoted_messages() -> list[str]:
    text = TROUBLESHOOTING.read_text(encoding="utf-8")
    return [
        row
        for row in re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)
        if row not in ("message", "---")
    ]


def test_every_error_has_a_section() -> None:
    from mtcheckpoint import errors

    text = TROUBLESHOOTING.read_text(encoding="utf-8")
    titles = re.findall(r"^##+ (\w+Error)$", text, re.MULTILINE)
    assert sorted(titles) == sorted(errors.__all__)


@pytest.mark.parametrize("message", quoted_messages())
def test_quoted_messages_are_in_the_source(message: str) -> None:
    """Each part between the dots is, in this order, in one text of the source."""
    parts = [re.escape(part) for part in message.split("...") if part.strip(" :,;()")]
    assert parts, message
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in literals())


if __name__ == "__main__":
    write_module_map()
