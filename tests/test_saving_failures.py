"""Saves that fail, processes that stop or are killed: heard of, bounded, cleaned up after."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import saving_failures
import saving_jobs

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint.testing import NodeDirectories, ProcessGroup, run_processes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes made of failures on process 1."""
    from mtcheckpoint.testing import ram_disk

    with ram_disk() as root:
        NodeDirectories(root, 2)
        return run_processes(saving_failures.every_kind, 2, devices=1, args=[str(root)])


def _assert_names_host_and_step(heard: dict[str, Any], step: int) -> None:
    assert heard["kind"] == "SaveError"
    assert heard["step"] == step
    assert heard["processes"] == [saving_failures.FAULTY]
    assert f"step {step} was not saved" in heard["text"]
    assert "process 1 (" in heard["text"]
    assert "the disk is broken" in heard["text"]


def test_all_hear_of_a_failure_at_the_same_step(outcomes: list[dict[str, Any]]) -> None:
    heard = [outcome["by a later save"] for outcome in outcomes]
    for one in heard:
        _assert_names_host_and_step(one, 20)
    assert len({one["at"] for one in heard}) == 1


@pytest.mark.parametrize("way", ["by a later save", "by wait", "by check", "by leaving"])
def test_the_remains_are_gone_and_the_older_step_is_the_latest(
    outcomes: list[dict[str, Any]], way: str
) -> None:
    for outcome in outcomes:
        assert outcome[way]["latest"] == 10
        assert outcome[way]["names"] == ["10"]


@pytest.mark.parametrize("way", ["by wait", "by check", "by leaving", "by forcing"])
def test_a_failure_surfaces_in_every_way(outcomes: list[dict[str, Any]], way: str) -> None:
    for outcome in outcomes:
        _assert_names_host_and_step(outcome[way], 20)


def test_the_exception_of_the_body_is_not_masked(outcomes: list[dict[str, Any]]) -> None:
    assert [outcome["the body's own"]["text"] for outcome in outcomes] == ["'from the loop'"] * 2


def test_warnings_are_forgiven_up_to_the_budget(outcomes: list[dict[str, Any]]) -> None:
    heard = [outcome["warned"]["heard"] for outcome in outcomes]
    assert [outcome["warned"]["after one"] for outcome in outcomes] == [30] * 2
    for one in heard:
        assert one["kind"] == "SaveError"
        assert one["latest"] == 30
        assert "30" in one["names"] and str(one["step"]) not in one["names"]
    assert len({(one["at"], one["step"]) for one in heard}) == 1


def test_a_failure_is_heard_of_long_before_the_next_step_is_due(
    outcomes: list[dict[str, Any]],
) -> None:
    heard = [outcome["fixed period"] for outcome in outcomes]
    for one in heard:
        _assert_names_host_and_step(one, 1000)
    assert len({one["at"] for one in heard}) == 1


def test_a_stopped_process_is_waited_for_or_named(volume_root: Path) -> None:
    NodeDirectories(volume_root, 4)
    with ProcessGroup(saving_jobs.stopped_host, 4, devices=1, args=[str(volume_root)]) as group:
        group.wait_for("saved", rank=0, timeout_secs=60)
        seen = _saves_of(group, 0)
        group.stop(1)
        # Whatever was under way is done then: what the others save after this, they save alone.
        _wait_seconds(2.0)
        while_stopped = _saves_of(group, 0)
        group.cont(1)
        wait_for(
            lambda: _saves_of(group, 0) > while_stopped + 2 or None,
            Deadline.after(30.0),
            "saves after the process went on",
        )
        (volume_root / "enough").touch()
        group.wait_for_all("stop me", timeout_secs=60)
        group.stop(1)
        (volume_root / "stopped").touch()
        group.kill(1, signal.SIGSTOP)  # nothing is expected of it any more
        results = group.wait(60)
    assert while_stopped <= seen + 2, "saves were committed without the stopped process"
    assert results[0]["saved"] == results[2]["saved"]
    for result in (results[0], results[2], results[3]):
        assert "process 1 (" in result["error"], result["error"]
        assert result["error"].startswith(("SaveError", "WaitTimeoutError"))


def _saves_of(group: ProcessGroup, rank: int) -> int:
    return sum(event.name == "saved" for event in group.events(rank))


def _wait_seconds(seconds: float) -> None:
    passed = Deadline.after(seconds)
    wait_for(lambda: passed.passed() or None, Deadline.after(60.0), "time to pass")


def test_killed_in_the_middle_of_saves(volume_root: Path) -> None:
    rng = random.Random("moments")
    keep = 1  # the hardest: whoever deletes too early has nothing left
    nodes = NodeDirectories(volume_root, 2)
    committed = -1
    for life in range(4):
        with ProcessGroup(saving_jobs.killed, 2, devices=1, args=[str(volume_root), keep]) as group:
            began = group.wait_for_all("began", timeout_secs=60)
            assert len({event["step"] for event in began}) == 1
            restored = began[0]["step"]
            assert restored >= committed, f"life {life} went back behind a committed step"
            for event in group.wait_for_all("saved one", timeout_secs=60):
                steps = [name for name in event["names"] if name.isdigit()]
                # The step before may be on its way out, and the next one takes its memory.
                names = [n for n in event["names"] if n not in ("deleted", "spare")]
                assert names == [*steps, "mtcheckpoint.staging"], "what kills left is gone"
                assert len(steps) <= keep
            for _ in range(rng.randint(1, 6)):
                group.wait_for("started", rank=0, timeout_secs=60)
            _wait_seconds(rng.uniform(0.0, 0.1))
            order = rng.sample([0, 1], 2)
            group.kill(order[0])
            _wait_seconds(rng.choice([0.0, 0.05]))
            group.kill(order[1])
            committed = max(_latest_of(group, rank) for rank in range(2))
        assert all(list(node.glob("[0-9]*")) for node in nodes)


def _latest_of(group: ProcessGroup, rank: int) -> int:
    return max((e["step"] for e in group.events(rank) if e.name == "latest"), default=-1)


def test_a_preemption_of_one_process_saves_the_same_step_on_all(volume_root: Path) -> None:
    NodeDirectories(volume_root, 2)
    with ProcessGroup(saving_jobs.preempted, 2, devices=1, args=[str(volume_root)]) as group:
        group.wait_for("step", rank=1, timeout_secs=60)
        os.kill(group.pid(1), signal.SIGTERM)
        first, second = group.wait(60)
    assert first == second
    assert first["started"]
    names = [
        sorted(path.name for path in node.iterdir()) for node in NodeDirectories(volume_root, 2)
    ]
    assert names == [[str(first["step"])]] * 2
