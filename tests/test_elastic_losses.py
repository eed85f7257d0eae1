"""What memory no longer holds, or never had taken: named, and nothing else is lost with it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import elastic_jobs
import numpy as np
import pytest
from elastic_jobs import JOB, Run, lay_out
from replicator_cluster import EmbeddedCluster, eventually
from restoring_clusters import REPLICATORS, run_job, same, start_replicator
from synthetic_saves import SyntheticSave
from test_elastic_memory import Job, contents

from mtcheckpoint import _saver, _session, manager
from mtcheckpoint.errors import RestoreError
from mtcheckpoint.testing import ProcessGroup, report

pytestmark = pytest.mark.extended

NODES = 4
BACKUP = "2031-01-02_00-00"


ALONE = Run(hosts=[0], mesh=[2, 4])


@pytest.fixture(params=REPLICATORS)
def job(request: pytest.FixtureRequest, volume_root: Path) -> Iterator[Job]:
    with start_replicator(request.param, volume_root, NODES) as cluster:
        yield Job(cluster, volume_root)


@contextlib.contextmanager
def no_replicator(cluster: Any) -> Iterator[None]:
    """The replicator is down for a while."""
    if isinstance(cluster, EmbeddedCluster):
        cluster.replicator.stop()
        yield
        cluster.restart()
    else:
        cluster.stop()
        yield
        cluster.start()


def test_steps_that_were_committed_and_never_taken(job: Job, volume_root: Path) -> None:
    run = Run(hosts=[0, 1], mesh=[4, 2], steps=[1])
    job.run(run)

    untaken = dataclasses.asdict(dataclasses.replace(run, steps=[2]))
    with no_replicator(job.cluster):
        run_job(elastic_jobs.save_alone, 2, str(volume_root), untaken)
        assert (volume_root / "node0" / "2").is_dir()
    found = job.run(dataclasses.replace(run, steps=[]))
    assert same(found, "step", "tier", "passed_over") == [2, "local", []]

    with no_replicator(job.cluster):
        untaken["steps"] = [9]
        run_job(elastic_jobs.save_alone, 2, str(volume_root), untaken)
        shutil.rmtree(volume_root / "node1" / "9")
    found = job.run(dataclasses.replace(run, steps=[10]))
    assert same(found, "step", "tier") == [2, "local"]
    ((step, _, reason),) = same(found, "passed_over")
    assert step == 9
    assert "the shares of its ranks 1 are gone" in reason


def test_survivors_that_do_not_hold_everything(job: Job, volume_root: Path) -> None:
    """Nodes 0 and 2 hold each other's copies; what 1 and 3 had is gone with them."""
    job.run(Run(hosts=[0, 1, 2, 3], mesh=[4, 2], steps=[6]))
    backup = volume_root / "elsewhere"
    keep_as_backup(job.cluster.volumes, backup)
    survivors = [job.cluster.volumes[0], job.cluster.volumes[2]]
    before = [contents(volume) for volume in survivors]

    two = Run(hosts=[0, 2], mesh=[4, 2])
    found = job.attempt(two)
    assert same(found, "error") == "RestoreError"
    assert "the shares of its ranks 1, 3 are gone" in found[0]["message"]
    assert "Nothing was deleted" in found[0]["message"]
    assert [contents(volume) for volume in survivors] == before, "memory is as it was"

    listed = contents_of(backup)
    two = dataclasses.replace(two, flags={"backup_root": str(backup)})
    found = job.run(two)
    assert same(found, "step", "tier") == [6, "backup"]
    ((step, source, reason),) = same(found, "passed_over")
    assert (step, source) == (6, "the cluster's memory")
    assert "the shares of its ranks 1, 3 are gone" in reason
    assert contents_of(backup) == listed
    assert same(job.run(two), "step", "tier", "passed_over") == [6, "local", []]


def keep_as_backup(volumes: list[Path], backup: Path) -> None:
    folder = backup / JOB / BACKUP
    for volume in volumes:
        for entry in [*volume.glob("*.meta"), *volume.glob("*.data")]:
            if entry.is_dir():
                shutil.copytree(entry, folder / entry.name, dirs_exist_ok=True)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(entry, folder)


def contents_of(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def test_half_a_step_is_a_step_until_it_was_tried(volume_root: Path) -> None:
    """A loop that asks for the latest step first must not begin anew."""
    save_one_of_two(volume_root)
    with elastic_jobs.open_alone(volume_root, ALONE) as manager:
        assert list(manager.all_steps()) == [NEWEST]
        assert manager.latest_step() == NEWEST
        with pytest.raises(RestoreError, match="the shares of its ranks 1 are gone"):
            manager.restore_latest()


def test_the_loss_of_another_job_is_not_ours(volume_root: Path) -> None:
    (volume_root / "node0").mkdir()
    note = volume_root / "node0" / "mtcheckpoint.unsafe.json"
    for job, text in (("job-b", "another's"), (JOB, "ours")):
        note.write_text(json.dumps({"job": job, "step": NEWEST}))
        with elastic_jobs.open_alone(volume_root, ALONE) as manager:
            if text == "another's":
                assert manager.restore_latest(elastic_jobs.target_of(ALONE)) is None
            else:
                with pytest.raises(RestoreError, match=f"step {NEWEST}"):
                    manager.restore_latest(elastic_jobs.target_of(ALONE))


def save_one_of_two(root: Path) -> None:
    """Leaves, on the only node, one of two shares of a step."""
    mesh = {"data": 2, "model": 4}
    save = SyntheticSave(
        job=JOB,
        step=NEWEST,
        values={"w": np.ones((16, 32), np.float32)},
        specs={"w": (("data",), ("model",))},
        mesh=mesh,
        ranks=2,
    )
    share, _ = save.write(root / "shares")
    lay_out(share, f"{root}/node0", step=NEWEST, node_rank=0)


# A crash in the middle of salvage: the newest step was never taken, so the handshake destroys it.

NEWEST, BACKED_UP = 5, 3
SAVED = Run(hosts=[0, 1], mesh=[4, 2], steps=[BACKED_UP, NEWEST])
SAVED_BY_ONE = dataclasses.replace(SAVED, hosts=[0])

# Where the process is killed, and what its next start finds.
STILL_IN_MEMORY = ["looked", "held", "read", "marked", "committed"]
ONLY_IN_THE_BUCKET = ["handed over", "saving", "written"]


@pytest.mark.parametrize("point", [*STILL_IN_MEMORY, *ONLY_IN_THE_BUCKET])
def test_killed_during_salvage(volume_root: Path, point: str) -> None:
    saved, volume = volume_root / "saved", volume_root / "node0"
    saved.mkdir()
    elastic_jobs.save_alone(str(saved), dataclasses.asdict(SAVED_BY_ONE))
    shutil.copytree(saved / "node0" / str(NEWEST), volume / str(NEWEST))
    backup = volume_root / "elsewhere"
    back_up(saved / "node0", backup, 0)
    listed = contents_of(backup)
    run = dataclasses.replace(SAVED_BY_ONE, steps=[], flags={"backup_root": str(backup)})
    without_backup = dataclasses.asdict(dataclasses.replace(run, flags={}))

    with start_replicator("embedded", volume_root, 1):
        killed_at(point, volume_root, run)
        if point in ONLY_IN_THE_BUCKET:
            without = elastic_jobs.train(str(volume_root), without_backup)
            assert without["error"] == "RestoreError", "never a fresh start"
            assert f"step {NEWEST}" in without["message"]
        found = elastic_jobs.train(str(volume_root), dataclasses.asdict(run))
        assert contents_of(backup) == listed
        if point in STILL_IN_MEMORY:
            assert (found["step"], found["tier"], found["passed_over"]) == (NEWEST, "local", [])
        else:
            assert (found["step"], found["tier"]) == (BACKED_UP, "backup")
        if point in ONLY_IN_THE_BUCKET:
            lost = [(step, reason) for step, _, reason in found["passed_over"]]
            assert lost[0][0] == NEWEST
            assert "before it had saved it again" in lost[0][1]
        again = elastic_jobs.train(str(volume_root), dataclasses.asdict(run))
    assert (again["step"], again["tier"], again["passed_over"]) == (found["step"], "local", [])
    assert sorted(p.name for p in volume.glob("mtcheckpoint*")) == []


@pytest.mark.parametrize(
    ("point", "rank", "gone"),
    [
        ("handed over", 0, None),
        # The other one has committed.
        ("written", 1, "1"),
    ],
)
def test_killed_while_two_are_at_different_points(
    volume_root: Path, point: str, rank: int, gone: str | None
) -> None:
    saved, backup = volume_root / "saved", volume_root / "elsewhere"
    saved.mkdir()
    run_job(elastic_jobs.save_alone, 2, str(saved), dataclasses.asdict(SAVED))
    with start_replicator("embedded", volume_root, 2) as cluster:
        other = cluster.volumes[1 - rank]
        for node, volume in enumerate(cluster.volumes):
            shutil.copytree(saved / f"node{node}" / str(NEWEST), volume / str(NEWEST))
            back_up(saved / f"node{node}", backup, node)
        run = dataclasses.replace(SAVED, steps=[], flags={"backup_root": str(backup)})
        arguments = [str(volume_root), dataclasses.asdict(run), point, rank]
        with ProcessGroup(train_until, 2, devices=4, args=arguments) as group:
            group.wait_for("there", rank=rank, timeout_secs=90)
            if point == "written":
                eventually(lambda: list(other.glob("*.meta")), "the other's commit")
            for process in range(2):
                group.kill(process)
        job = Job(cluster, volume_root)
        found = job.run(run)
        assert same(found, "step", "tier") == [BACKED_UP, "backup"]
        reasons = "".join(reason for _, _, reason in same(found, "passed_over"))
        assert {step for step, _, _ in same(found, "passed_over")} <= {NEWEST}
        assert "before it had saved it again" in reasons
        assert (f"the shares of its ranks {gone} are gone" in reasons) == (gone is not None)
        assert same(job.run(run), "step", "tier", "passed_over") == [BACKED_UP, "local", []]


def back_up(volume: Path, backup: Path, rank: int) -> None:
    folder = f"{backup}/{JOB}/{BACKUP}"
    lay_out(volume / str(BACKED_UP), folder, step=BACKED_UP, node_rank=rank)


def killed_at(point: str, root: Path, run: Run) -> None:
    arguments = [str(root), dataclasses.asdict(run), point]
    with ProcessGroup(train_until, 1, devices=8, args=arguments) as group:
        group.wait_for("there", timeout_secs=90)
        group.kill(0)


def train_until(
    root: str, fields: dict[str, Any], point: str, rank: int | None = None
) -> dict[str, Any]:
    """Trains up to a named point, where this process, or that rank, reports and stays."""
    owner, name, when = {
        "looked": (_session.Session, "_noted", "after"),
        "held": (_session.Session, "_hold", "after"),
        "read": (manager.ReplicatedCheckpointManager, "_make_safe", "before"),
        "marked": (_session.Session, "mark_unsafe", "after"),
        "handed over": (_session.Session, "_shake_hands", "after"),
        "saving": (_saver.Saver, "start", "before"),
        "written": (_saver.Saver, "_commit", "before"),
        "committed": (_saver.Saver, "_commit", "after"),
    }[point]
    if rank in (None, elastic_jobs.rank()):
        stop_at(owner, name, when)
    return elastic_jobs.train(root, fields)


def stop_at(owner: Any, name: str, when: str) -> None:
    original = getattr(owner, name)

    def stop() -> None:
        report("there")
        threading.Event().wait()

    def stopping(*arguments: Any, **keywords: Any) -> Any:
        if when == "before":
            stop()
        result = original(*arguments, **keywords)
        stop()
        return result

    setattr(owner, name, stopping)
