"""The two replicators read each other's volumes and backups."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from google_replicator import SOURCE_VARIABLE, google_cluster
from replicator_cluster import Cluster, Job, embedded_cluster, eventually, names

from mtcheckpoint._handshake import files

Start = Callable[[Path, int], AbstractContextManager[Cluster]]
SWAP = [[1], [0]]

pytestmark = [
    pytest.mark.google_replicator,
    pytest.mark.skipif(SOURCE_VARIABLE not in os.environ, reason=f"{SOURCE_VARIABLE} is not set"),
]
ORDERS = pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(google_cluster, embedded_cluster, id="written by google's"),
        pytest.param(embedded_cluster, google_cluster, id="written by ours"),
    ],
)


def job_on(cluster: Cluster) -> Job:
    return Job(cluster.volumes, peers=SWAP, settings=cluster.settings(backups=True))


def save_with_backup(start: Start, root: Path, step: int) -> tuple[list[str], Path]:
    """Returns each rank's digest and the backup's folder."""
    with start(root, 2) as cluster:
        job = job_on(cluster)
        job.handshake()
        cluster.wait_until_watching(job.volumes)
        cluster.let_backup_interval_pass()
        job.save(step)
        digests = [job.digest(step, rank) for rank in (0, 1)]
        wanted = {job.share(step, rank).meta for rank in (0, 1)}
        wanted |= set(map(files.data_name, digests))
        folder = cluster.backup / job.name

        def is_there() -> bool:
            return any(wanted <= names(backup) for backup in folder.iterdir() if backup.is_dir())

        eventually(lambda: folder.is_dir() and is_there(), "the backup")
        return digests, folder


@ORDERS
@pytest.mark.parametrize("lost", [(), (1,), (0, 1)], ids=["nothing", "a node", "all memory"])
def test_step_survives_a_change_of_replicators(
    writer: Start, reader: Start, lost: tuple[int, ...], volume_root: Path
) -> None:
    digests, _ = save_with_backup(writer, volume_root, 7)

    with reader(volume_root, 2) as cluster:
        job = job_on(cluster)
        for rank in lost:
            job.wipe(rank)
        job.handshake()

        for rank in (0, 1):
            assert job.restored_step(rank) == 7
            assert os.readlink(job.marker(rank)) == files.data_name(digests[rank])
            assert (job.marker(rank) / "state" / "manifest.ocdbt").is_file()
