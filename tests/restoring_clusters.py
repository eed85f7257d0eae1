"""The parent's side of the restore tests: replicators, jobs, and what the volumes hold."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import google_replicator
import pytest
from replicator_cluster import EmbeddedCluster, embedded_cluster, eventually
from restoring_jobs import JOB

from mtcheckpoint._handshake import files
from mtcheckpoint.testing import run_processes

JOB_SECONDS = 150.0

REPLICATORS = ["embedded", pytest.param("google", marks=pytest.mark.google_replicator)]


@contextlib.contextmanager
def start_replicator(kind: str, root: Path, nodes: int) -> Iterator[Any]:
    """A cluster of `nodes` volumes ``root/node<i>`` with a replicator of this kind opposite."""
    if kind == "google":
        if not os.environ.get(google_replicator.SOURCE_VARIABLE):
            pytest.skip(f"{google_replicator.SOURCE_VARIABLE} is not set")
        with google_replicator.google_cluster(root, nodes, JOB) as cluster:
            yield cluster
    else:
        with embedded_cluster(root, nodes, timeout_secs=30.0) as cluster:
            cluster.backup.mkdir()
            yield cluster


def run_job(target: Any, nodes: int, *args: Any, **options: Any) -> list[Any]:
    """Runs a job with all devices of the standard set-up: eight, over `nodes` processes."""
    options = {"devices": 8 // nodes, "timeout_secs": JOB_SECONDS, **options}
    return run_processes(target, nodes, args=list(args), **options)


def same(outcomes: Sequence[dict[str, Any]], *keys: str) -> Any:
    """The values of `keys`, which must be the same on all processes."""
    found = [[outcome.get(key) for key in keys] for outcome in outcomes]
    assert all(values == found[0] for values in found), outcomes
    return found[0] if len(keys) > 1 else found[0][0]


def wait_until_held(
    volumes: Sequence[Path], step: int, holders: Sequence[Sequence[int]] | None = None
) -> None:
    """Waits until every node's share of `step` lies on its node and where it is copied to.

    Args:
        holders: for each rank the positions of the volumes that hold its share; None: its own and
            the one half the cluster away.
    """
    count = len(volumes)
    holders = holders or [[rank, (rank + count // 2) % count] for rank in range(count)]
    for rank, places in enumerate(holders):
        for place in places:
            eventually(
                lambda v=volumes[place], r=rank: _holds(v, step, r),
                f"step {step} of rank {rank} in {volumes[place]}",
            )
    for volume in volumes:
        eventually(lambda v=volume: not list(v.glob("*.save")), f"{volume} to come to rest")


def _holds(volume: Path, step: int, rank: int) -> bool:
    meta = volume / files.ShareName(job=JOB, step=step, node_rank=rank).meta
    try:
        return (volume / files.data_name(meta.read_text())).is_dir()
    except FileNotFoundError:
        return False


def newest_held(volumes: Sequence[Path]) -> int | None:
    """The newest step of which every node's share lies on its node and on its peer."""
    count = len(volumes)
    steps = {
        share.step
        for meta in volumes[0].glob("*.meta")
        if (share := files.parse_share_name(meta.name, "meta")) is not None
    }
    whole = [
        step
        for step in steps
        if all(
            _holds(volumes[place], step, rank)
            for rank in range(count)
            for place in (rank, (rank + count // 2) % count)
        )
    ]
    return max(whole, default=None)


def wait_until_backed_up(backup: Path, step: int, nodes: int) -> Path:
    """Waits for a whole backup of `step`; returns its folder."""

    def look() -> Path | None:
        for folder in sorted((backup / JOB).glob("????-??-??_??-??"), reverse=True):
            if all(_holds(folder, step, rank) for rank in range(nodes)):
                return folder
        return None

    eventually(look, f"the backup of step {step}")
    found = look()
    assert found is not None
    return found


def lose_node(cluster: Any, position: int) -> None:
    """A node is lost with its memory and its replicator; another one takes its place."""
    if isinstance(cluster, EmbeddedCluster):
        cluster.replicator.stop()
        wipe(cluster.volumes[position])
        cluster.restart()
    else:
        cluster.stop()
        wipe(cluster.volumes[position])
        cluster.start()


def wipe(volume: Path) -> None:
    """The node's memory is lost."""
    for entry in volume.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
