"""docs/configuration.md and docs/protocol.md say what the code does."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtcheckpoint._config_rules import RULES
from mtcheckpoint._handshake import files
from mtcheckpoint._handshake.protocol import WAITS, Event, State, diagram
from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.errors import MtCheckpointError

DOCS = Path(__file__).parent.parent / "docs"
CONFIGURATION = (DOCS / "configuration.md").read_text()
PROTOCOL = (DOCS / "protocol.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def table(text: str, first_column: str) -> list[list[str]]:
    """The rows of the table whose first column has this title."""
    after = text.split(f"| {first_column} |", 1)[1].split("\n", 2)[2]
    lines = after.split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in lines]


def run_blocks(text: str) -> Mapping[str, Any]:
    namespace: dict[str, Any] = {}
    for block in blocks(text, "python"):
        exec(compile(block, "docs", "exec"), namespace)
    return namespace


def test_the_table_of_fields_is_the_dataclass() -> None:
    rows = table(CONFIGURATION, "field")
    expected = [(f"`{f.name}`", f"`{f.default!r}`") for f in dataclasses.fields(CheckpointConfig)]
    assert [(name, default) for name, default, _ in rows] == expected
    assert all(meaning for *_, meaning in rows)


def test_the_docstring_explains_every_field() -> None:
    text = inspect.cleandoc(CheckpointConfig.__doc__ or "")
    documented = re.findall(r"^ {4}(\w+): ", text, re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(CheckpointConfig)]


def test_the_table_of_contradictions_is_the_rules() -> None:
    expected = [
        [
            ", ".join(f"`{name}`" for name in rule.fields),
            "yes" if rule.multi_tier else "",
            rule.why.format(run_name_fault="..."),
        ]
        for rule in RULES
    ]
    assert table(CONFIGURATION, "fields") == expected


def test_the_diagram_is_made_from_the_table() -> None:
    assert f"{diagram()}\n" in blocks(PROTOCOL, "mermaid")


def test_states_and_events_are_the_enumerations() -> None:
    rows = table(PROTOCOL, "state")
    assert [row[:2] for row in rows] == [[f"`{s.name}`", s.value] for s in State]
    assert {row[0].strip("`") for row in rows if row[2]} == {state.name for state in WAITS}
    assert table(PROTOCOL, "event") == [[f"`{e.name}`", e.value] for e in Event]


def test_errors_are_ours_and_waits_are_worded_so() -> None:
    rows = table(PROTOCOL, "error")
    names = {re.match(r"`(\w+)", row[0])[1] for row in rows}  # type: ignore[index]
    assert names <= {kind.__name__ for kind in every_kind(MtCheckpointError)}
    waits = [WAITS[state].what for state in (State.STALE_YAML, State.CONSUMPTION, State.MARKER)]
    assert all(any(what.endswith(row[0].split("... ")[-1][:-1]) for row in rows) for what in waits)


def every_kind(kind: type[BaseException]) -> set[type[BaseException]]:
    return {kind}.union(*(every_kind(below) for below in kind.__subclasses__()))


def test_files_have_the_names_of_the_grammar() -> None:
    share = files.ShareName(job="<job>", step=0, node_rank=0)
    names = {row[0].strip("`") for row in table(PROTOCOL, "name")}
    assert names >= {
        files.REPLICATOR_YAML,
        files.PRERESTORE_FILE,
        files.ERRORS_FILE,
        files.FAILED_FILE,
        files.JAX_INIT_INFO_FILE,
        share.restore.replace("-s0-n0-", "-s<step>-n<rank>-"),
    }


@pytest.mark.parametrize("text", [CONFIGURATION, PROTOCOL], ids=["configuration", "protocol"])
def test_examples_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_blocks(text)


def test_the_yaml_shown_is_the_yaml_made() -> None:
    (shown,) = blocks(PROTOCOL, "yaml")
    assert run_blocks(PROTOCOL)["text"] == shown
    assert yaml.safe_load(shown)["assume-data-parallelism"] == 2
