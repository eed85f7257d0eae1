"""Which steps are saved: by every kind of policy the same on all hosts, also with a slow one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import saving_jobs
import saving_policies
from inotify import CREATE, MOVED_TO, Watch

from mtcheckpoint._handshake import files
from mtcheckpoint._replicator.embedded import EmbeddedReplicator
from mtcheckpoint.testing import NodeDirectories, ProcessGroup, ram_disk, run_processes

STEPS = 300


@pytest.fixture(scope="module")
def outcomes() -> Iterator[list[dict[str, Any]]]:
    with ram_disk() as root:
        NodeDirectories(root, 2)
        yield run_processes(saving_policies.all_policies, 2, devices=1, args=[str(root)])


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("period", [0, 10, 20, 30, 40]),
        ("period, not on start", [10, 20, 30, 40]),
        ("steps", [3, 5, 17]),
        ("continuous", list(range(41))),
        ("orbax fixed", [0, 10, 20, 30, 40]),
        ("orbax continuous", list(range(41))),
        ("orbax steps", [0, 4, 9]),
        ("in the foreground", list(range(41))),
    ],
)
def test_saved_steps(outcomes: list[dict[str, Any]], policy: str, expected: list[int]) -> None:
    assert [outcome[policy] for outcome in outcomes] == [expected] * 2


@pytest.mark.parametrize("policy", ["by process", "by clock", "continuous, seconds"])
def test_policies_that_look_at_one_host_are_asked_once(
    outcomes: list[dict[str, Any]], policy: str
) -> None:
    first, second = (outcome[policy] for outcome in outcomes)
    assert first == second
    assert 1 < len(first) < 41


def test_forced_saves_and_saves_of_a_step_that_is_there(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        asked = outcome["asked"]
        assert asked["should"] == [True, False]
        assert asked["forced"] == [False, True]
        assert asked["again"] == [False, False]
        assert asked["unchanged"]
        assert "0 or more" in asked["negative"]


def test_after_a_roll_back_the_future_that_was_undone_goes(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["rolled back"] == {
            "saved": [20],
            "latest": [10, 20],
            "steps": [10, 20],
            "restored": 20,
        }


def test_one_slow_host_of_four(volume_root: Path) -> None:
    nodes = NodeDirectories(volume_root, 4)
    with ExitStack() as stack:
        stack.enter_context(EmbeddedReplicator(list(nodes)))
        watches = [stack.enter_context(Watch(node)) for node in nodes]
        group = stack.enter_context(
            ProcessGroup(saving_jobs.slow_host, 4, devices=2, args=[str(volume_root), STEPS])
        )
        results = group.wait(150)
        seen = [change for watch in watches for change in watch.changes()]
    for name, saved in results[0].items():
        assert [result[name] for result in results] == [saved] * 4
        assert len(saved) >= 3, "saving stopped"
        print(f"{name}: {len(saved)} of {STEPS} steps saved")
    _assert_steps_only_moved_in(seen)


def _assert_steps_only_moved_in(changes: list[Any]) -> None:
    masks = {change.mask for change in changes if files.is_step_name(change.name)}
    assert any(mask & MOVED_TO for mask in masks)
    assert not any(mask & CREATE for mask in masks)
