"""Training opposite a replicator that never answers, dies, stops, restarts or falls behind."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fault_jobs
import pytest
from handshake_peer import ThreadedReplicator
from played_replicator import PlayedReplicator
from replicator_cluster import EmbeddedCluster, eventually

import mtcheckpoint as mtc
from mtcheckpoint._backlog import Backlog
from mtcheckpoint._clock import Deadline
from mtcheckpoint._handshake import files
from mtcheckpoint._policy import ClusterState, HostReport
from mtcheckpoint.testing import (
    abstract_state,
    assert_state,
    case_mesh,
    case_state,
    ram_disk,
    run_processes,
)

pytestmark = pytest.mark.extended

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


# A job of this process alone, opposite a replicator on real files.


def _config(volume: Path, timeout_secs: int = 60, **flags: Any) -> mtc.CheckpointConfig:
    return mtc.CheckpointConfig(
        enable_multi_tier_checkpointing=True,
        multi_tier_checkpointing_backup_interval_minutes=30,
        local_checkpoint_directory=str(volume),
        enable_continuous_checkpointing=True,
        run_name="job-a",
        timeout_secs=timeout_secs,
        **flags,
    )


def _open(config: mtc.CheckpointConfig) -> mtc.ReplicatedCheckpointManager:
    return mtc.ReplicatedCheckpointManager(config, mesh=case_mesh())


def _restored_step(manager: mtc.ReplicatedCheckpointManager) -> int | None:
    restored = manager.restore_latest(abstract_state(case_state(case_mesh(), 0)))
    if restored is None:
        return None
    assert_state(restored.state, restored.step)
    return restored.step


@contextlib.contextmanager
def _cluster(root: Path) -> Iterator[EmbeddedCluster]:
    cluster = EmbeddedCluster(root, 1)
    cluster.replicator.start()
    try:
        yield cluster
    finally:
        cluster.replicator.stop()


def _save_and_see_taken(manager: mtc.ReplicatedCheckpointManager, volume: Path, step: int) -> None:
    assert manager.save(step, case_state(case_mesh(), step), force=True)
    manager.wait_until_finished()
    meta = files.ShareName(job="job-a", step=step, node_rank=0).meta
    eventually((volume / meta).exists, f"step {step} to be replicated")


def _prerestore(volume: Path) -> None:
    (volume / files.PRERESTORE_FILE).write_text("restore-step: 1\n")


@pytest.mark.parametrize(
    ("answer", "waited_for"),
    [
        pytest.param(None, "replicator.yaml", id="never answers"),
        pytest.param(lambda volume: None, "job-a-s<step>-n0-w0.restore", id="after the YAML"),
        pytest.param(_prerestore, "job-a-s<step>-n0-w0.restore", id="after .prerestore"),
    ],
)
def test_a_replicator_that_dies_in_the_handshake_is_named_and_nothing_is_lost(
    volume_root: Path, answer: Callable[[Path], None] | None, waited_for: str
) -> None:
    with _cluster(volume_root) as cluster, _open(_config(cluster.volumes[0])) as manager:
        assert _restored_step(manager) is None
        _save_and_see_taken(manager, cluster.volumes[0], 1)
    volume = cluster.volumes[0]
    dying = contextlib.nullcontext() if answer is None else ThreadedReplicator(volume, answer)
    begun = time.monotonic()
    config = _config(volume, timeout_secs=1)
    with pytest.raises(mtc.errors.WaitTimeoutError) as late, dying, _open(config) as manager:
        _restored_step(manager)
    assert time.monotonic() - begun < 20
    assert waited_for in str(late.value)
    assert str(volume) in str(late.value)

    with _cluster(volume_root), _open(_config(volume)) as manager:
        assert _restored_step(manager) == 1


def test_a_dangling_answer_with_nothing_else_is_an_error(volume_root: Path) -> None:
    volume = volume_root / "node0"
    volume.mkdir()

    def dangle(volume: Path) -> None:
        share = files.ShareName(job="job-a", step=7, node_rank=0)
        (volume / share.restore).symlink_to(files.data_name("D" + "0" * 64))

    named = pytest.raises(mtc.errors.RestoreError, match=r"7-n0-w0\.restore")
    with named, ThreadedReplicator(volume, dangle), _open(_config(volume)) as manager:
        _restored_step(manager)


def test_a_replicator_restarted_alone_takes_nothing_and_the_log_says_so(
    volume_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _cluster(volume_root) as cluster:
        volume = cluster.volumes[0]
        with _open(_config(volume)) as manager:
            manager._decider._backlog = Backlog(patience_secs=0.5)
            assert _restored_step(manager) is None
            _save_and_see_taken(manager, volume, 1)
            cluster.restart()
            assert manager.save(2, case_state(case_mesh(), 2), force=True)
            manager.wait_until_finished()
            slowest = _train_until(manager, 3, lambda: "has not taken step 2" in caplog.text)
            assert (volume / "2").is_dir()
            assert "a restart would come back to step 1" in caplog.text
        assert slowest < 1.0, "training is not held up"
        with _open(_config(volume)) as manager:
            assert _restored_step(manager) == 2, "it is in the volume, though nobody took it"


def test_a_replicator_that_falls_behind_holds_up_saves_and_not_training(
    volume_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    volume = volume_root / "node0"
    volume.mkdir()
    caplog.set_level(logging.INFO, "mtcheckpoint.decider")
    with PlayedReplicator(volume, 0, seconds_a_step=2.5) as replicator:
        with _open(_config(volume)) as manager:
            manager._decider._backlog = Backlog(patience_secs=0.5)
            assert _restored_step(manager) is None
            slowest = _train_until(
                manager,
                0,
                lambda: "saving goes on after" in caplog.text and len(replicator.taken) > 2,
            )
        assert slowest < 1.0
        assert "the replicator has not taken step" in caplog.text
    assert replicator.taken == sorted(replicator.taken)


def _train_until(
    manager: mtc.ReplicatedCheckpointManager, step: int, done: Callable[[], bool]
) -> float:
    """Trains and saves; the seconds of the slowest call of `save`."""
    limit = Deadline.after(60.0)
    state = case_state(case_mesh(), step)
    slowest = 0.0
    while not done():
        assert not limit.passed()
        begun = time.monotonic()
        manager.save(step, state)
        slowest = max(slowest, time.monotonic() - begun)
        limit.clock.sleep(0.01)
        step += 1
    return slowest


def test_an_old_volume_that_comes_back_is_not_restored_over_a_newer_step(
    volume_root: Path,
) -> None:
    with _cluster(volume_root) as cluster:
        volume = cluster.volumes[0]
        with _open(_config(volume)) as manager:
            assert _restored_step(manager) is None
            _save_and_see_taken(manager, volume, 1)
            old = {path.name: path for path in (*volume.glob("*.meta"), *volume.glob("*.data"))}
            for name, path in old.items():
                path.rename(volume_root / name)
            _save_and_see_taken(manager, volume, 2)
        for name, path in old.items():
            (volume_root / name).rename(path)
        with _open(_config(volume)) as manager:
            assert _restored_step(manager) == 2
            _save_and_see_taken(manager, volume, 3)
            eventually(lambda: not old.keys() & {p.name for p in volume.iterdir()}, "the clean-up")
