"""What is saved is what was handed over, whatever training does to it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import saving_states

from mtcheckpoint.testing import NodeDirectories, ram_disk, run_processes


@pytest.fixture(scope="module")
def outcomes() -> Iterator[list[dict[str, Any]]]:
    with ram_disk() as root:
        NodeDirectories(root, 2)
        yield run_processes(saving_states.everything, 2, devices=2, args=[str(root)])


def test_every_element_is_what_was_handed_over(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["handed over"]["differ"] == {str(step): [] for step in range(4)}


def test_extras_and_metadata_are_copied_too(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["handed over"]["extras"] == [[3], [3]]
        assert outcome["handed over"]["notes"] == [[True, False]] * 4


@pytest.mark.parametrize(
    "leaf",
    [
        "object",
        "bytes",
        "donated",
        "text array",
        "dates",
        "records",
        "huge",
        "uint4",
        "no elements",
        "numpy without elements",
    ],
)
def test_a_leaf_that_cannot_be_saved_is_refused_by_its_path(
    outcomes: list[dict[str, Any]], leaf: str
) -> None:
    for outcome in outcomes:
        assert f"'opt.0.{leaf}'" in outcome["refused"][leaf]


def test_nothing_of_a_refused_save_is_written_or_waited_for(
    outcomes: list[dict[str, Any]],
) -> None:
    for outcome in outcomes:
        assert "extras['it'][0]" in outcome["refused"]["extras"]
        assert outcome["refused"]["written"] == ""
        assert outcome["refused"]["next"] == "True"


def test_save_returns_while_devices_are_busy(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        queued = outcome["queued"]
        print(f"blocked {queued['blocked']:.3f} s of {queued['queued']:.3f} s queued")
        assert queued["right"]
        assert queued["queued"] > 1.0
        assert queued["blocked"] < queued["queued"] / 3
