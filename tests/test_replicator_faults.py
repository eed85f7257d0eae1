"""Training opposite a replicator that never answers, dies, stops, restarts or falls behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import fault_jobs
import pytest

from mtcheckpoint._backlog import Backlog
from mtcheckpoint._policy import ClusterState, HostReport
from mtcheckpoint.testing import ram_disk, run_processes

# It stops in mid-training.


@pytest.fixture(scope="module")
def stopped() -> Iterator[list[dict[str, Any]]]:
    """What two processes made of the end of process 1's replicator."""
    with ram_disk() as root:
        yield run_processes(
            fault_jobs.stopped_in_training, 2, devices=4, args=[str(root)], timeout_secs=200
        )


@pytest.mark.parametrize("way", ["raise", "seldom"])
def test_all_processes_stop_at_the_same_step(stopped: list[dict[str, Any]], way: str) -> None:
    first, second = (outcome[way] for outcome in stopped)
    for heard in (first, second):
        assert "process 1 (" in heard["error"]
        assert "cannot reach the coordinator" in heard["error"]
        assert heard["lines"] == []
    assert first == second
    assert 5 < first["step"] < 299


def test_training_goes_on_where_it_may_and_says_what_is_not_safe(
    stopped: list[dict[str, Any]],
) -> None:
    first, second = (outcome["warn"] for outcome in stopped)
    assert first["error"] is None and second["error"] is None
    assert first["step"] == second["step"] == 299
    assert first["saved"] == second["saved"]
    assert first["saved"][-1] < 150, "nothing is saved any more"
    for heard in (first, second):
        (line,) = heard["lines"]
        assert line.startswith("WARNING the replicator has stopped")
        assert "cannot reach the coordinator" in line
        assert f"what comes after step {first['saved'][-1]} is lost" in line


# It dies at a point of its work, and comes back with the job.


@pytest.fixture(scope="module")
def come_back() -> Iterator[list[dict[str, Any]]]:
    with ram_disk() as root:
        yield run_processes(
            fault_jobs.come_back,
            2,
            devices=4,
            args=[str(root), list(fault_jobs.STAGES)],
            timeout_secs=220,
        )


@pytest.mark.parametrize("stage", fault_jobs.STAGES)
def test_the_newest_committed_step_survives(come_back: list[dict[str, Any]], stage: str) -> None:
    for outcome in come_back:
        assert outcome[stage].get("step") == 2, outcome[stage]


# It does not take what was saved.


def _state(step: int, now: float, *, taken: int | None, finished: int = 40) -> ClusterState:
    reports = tuple(
        HostReport(
            process=process,
            host=f"host-{process}",
            finished_step=finished,
            taken_step=taken if process else finished,
        )
        for process in range(2)
    )
    return ClusterState(
        step=step,
        now_seconds=now,
        processes=2,
        reports=reports,
        saved=((30, 0.0), (40, 1.0)),
        started_step=40,
    )


def test_a_step_that_waits_is_told_of_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mtcheckpoint.decider")
    backlog = Backlog()
    for second in range(400):
        backlog.look(_state(41 + second, 10.0 + second, taken=30))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3, "at 60, 120 and 240 s"
    assert told[0].startswith("step 101: for 60 s no step was saved, because of host-1 (process 1)")
    assert "has not taken step 40" in told[0]
    assert "a restart would come back to step 30" in told[0]

    backlog.look(_state(500, 500.0, taken=40))
    assert caplog.records[-1].levelname == "INFO"
    assert "saving goes on after 490 s" in caplog.records[-1].getMessage()

    backlog.look(_state(501, 501.0, taken=30))
    backlog.look(_state(550, 550.0, taken=30))
    assert len(caplog.records) == 4, "patience is as long as before"


def test_a_save_in_progress_is_no_backlog(caplog: pytest.LogCaptureFixture) -> None:
    backlog = Backlog()
    for second in range(400):
        backlog.look(_state(41, float(second), taken=30, finished=30))
    assert not caplog.records
