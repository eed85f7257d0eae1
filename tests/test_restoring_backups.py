"""Backups in a folder and in a bucket: unfinished, foreign and damaged ones beside good ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import gcs_server
import pytest
from replicator_cluster import embedded_cluster, eventually
from restoring_clusters import run_job, same, wait_until_held
from restoring_jobs import (
    JOB,
    alone,
    open_manager,
    outcome,
    restore_outcome,
    together,
    train_with_backups,
)

from mtcheckpoint._handshake import files
from mtcheckpoint.testing import ram_disk

pytestmark = pytest.mark.extended

NODES = 4
STEP, OLDER_STEP = 4, 3
NEWEST, NEWER, GOOD, OLDER = (f"2031-01-0{day}_00-00" for day in (4, 3, 2, 1))


@pytest.fixture(scope="module", params=["folder", "bucket"])
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """A replicator makes the backups; then every scenario in one job."""
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(ram_disk())
        environment, bucket = {}, f"{root}/backup"
        Path(bucket).mkdir()
        if request.param == "bucket":
            server = stack.enter_context(gcs_server.running_server())
            environment = gcs_server.environment(server)
            for name, value in environment.items():
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                patch.setenv(name, value)
            bucket = f"gs://{gcs_server.make_bucket(server)}"
        make_backups(root, bucket, environment)
        before = listing(bucket)
        found = run_job(restore_all, NODES, str(root), bucket, env=environment)
        yield {
            **{name: [process[name] for process in found] for name in found[0]},
            "untouched": listing(bucket) == before,
        }


def make_backups(root: Path, bucket: str, environment: dict[str, str]) -> None:
    """A good backup of step 4 and, older, of step 3; newer ones are of no use."""
    with embedded_cluster(root, NODES, backup_url=bucket, timeout_secs=30.0) as cluster:
        interval = {"backup-interval-steps": 1}
        made = []
        for step in (OLDER_STEP, STEP):
            run_job(train_with_backups, NODES, str(root), {}, interval, [step], env=environment)
            wait_until_held(cluster.volumes, step)
            eventually(lambda step=step: backup_of(bucket, step), f"the backup of step {step}")
            made.append(backup_of(bucket, step))
            move(f"{bucket}/{JOB}/{made[-1]}", f"{bucket}/{JOB}/{GOOD if step == STEP else OLDER}")
    good = f"{bucket}/{JOB}/{GOOD}"
    half = f"{bucket}/{JOB}/{NEWEST}"
    copy(good, half)
    remove(f"{half}/{files.ShareName(job=JOB, step=STEP, node_rank=2).meta}")
    lost = f"{bucket}/{JOB}/{NEWER}"
    copy(good, lost)
    manifest = next(name for name in listing(lost) if name.endswith("/state/manifest.ocdbt"))
    remove(lost + manifest.partition(NEWER)[2])
    copy(good, f"{bucket}/job-b/{NEWEST}")
    copy(good, f"{bucket}/{JOB}/unfinished")


def backup_of(bucket: str, step: int) -> str | None:
    """The name of the folder with a whole backup of a step."""
    metas = [files.ShareName(job=JOB, step=step, node_rank=rank).meta for rank in range(NODES)]
    for folder in {name.split("/")[-2] for name in listing(bucket) if name.endswith(metas[0])}:
        names = listing(f"{bucket}/{JOB}/{folder}")
        data = {part for name in names for part in name.split("/") if part.endswith(".data")}
        if len(data) >= NODES and all(any(n.endswith(meta) for n in names) for meta in metas):
            return folder
    return None


def listing(url: str) -> list[str]:
    filesystem, path = fsspec.core.url_to_fs(url)
    return sorted(filesystem.find(path))


def copy(source: str, target: str) -> None:
    filesystem, path = fsspec.core.url_to_fs(source)
    _, destination = fsspec.core.url_to_fs(target)
    for name in filesystem.find(path):
        new = destination + name[len(path) :]
        filesystem.makedirs(new.rpartition("/")[0], exist_ok=True)
        filesystem.pipe_file(new, filesystem.cat_file(name))


def move(source: str, target: str) -> None:
    copy(source, target)
    filesystem, path = fsspec.core.url_to_fs(source)
    filesystem.rm(path, recursive=True)


def remove(name: str) -> None:
    filesystem, path = fsspec.core.url_to_fs(name)
    filesystem.rm_file(path)


def test_the_newest_whole_backup_is_restored(outcomes: dict[str, Any]) -> None:
    found = outcomes["backup"]
    assert same(found, "step", "tier") == [STEP, "backup"]
    assert same(found, "extras") == [[rank, STEP, True] for rank in range(NODES)]
    assert all(set(process["bytes"]) == {"backup"} for process in found)
    passed_over = {source.rpartition("/")[2]: why for _, source, why in same(found, "passed_over")}
    assert "no .meta of rank 2" in passed_over[NEWEST]
    assert "manifest" in passed_over[NEWER]
    assert "job-b" not in str(passed_over) and "unfinished" not in str(passed_over)


def test_nothing_is_written_or_deleted_there(outcomes: dict[str, Any]) -> None:
    assert outcomes["untouched"]


def test_an_explicit_older_step(outcomes: dict[str, Any]) -> None:
    assert same(outcomes["older step"], "step") == OLDER_STEP


def test_an_explicit_step_that_is_not_there(outcomes: dict[str, Any]) -> None:
    found = outcomes["no such step"]
    assert same(found, "error", "available") == ["StepNotFoundError", [OLDER_STEP, STEP]]


def test_backups_of_other_jobs_are_nothing(outcomes: dict[str, Any]) -> None:
    assert same(outcomes["other job"], "step") is None


def restore_all(root: str, bucket: str) -> dict[str, Any]:
    together("begun")
    found = {"backup": restore_outcome(alone(f"{root}/a", backup_root=bucket))}
    for name, step in (("older step", OLDER_STEP), ("no such step", 77)):
        found[name] = outcome(lambda n=name, s=step: explicit(f"{root}/{n[:2]}", bucket, s))
    found["other job"] = restore_outcome(alone(f"{root}/c", backup_root=bucket, run_name="job-c"))
    return found


def explicit(root: str, bucket: str, step: int) -> dict[str, Any]:
    from orbax.checkpoint import args

    from mtcheckpoint.testing import abstract_state, assert_state, case_mesh, case_state

    wanted = args.StandardRestore(abstract_state(case_state(case_mesh(), 0)))
    with open_manager(alone(root, backup_root=bucket)) as manager:
        restored = manager.restore(step, args=args.Composite(state=wanted))["state"]
    assert_state(restored, step)
    return {"step": step}
