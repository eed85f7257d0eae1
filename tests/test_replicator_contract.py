"""What a replicator does to the volumes: the embedded one and Google's public one, alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import google_replicator
import pytest
import yaml
from replicator_cluster import (
    Cluster,
    Job,
    embedded_cluster,
    eventually,
    names,
)
from shares import commit_step, write_share

from mtcheckpoint._handshake import files

StartCluster = Callable[[int], Cluster]
SWAP = [[1], [0]]


@pytest.fixture(
    params=["embedded", pytest.param("google", marks=pytest.mark.google_replicator)],
)
def start_cluster(request: pytest.FixtureRequest, volume_root: Path) -> Iterator[StartCluster]:
    """Starts a cluster of so many nodes."""
    kind = request.param
    if kind == "google" and not os.environ.get(google_replicator.SOURCE_VARIABLE):
        pytest.skip(f"{google_replicator.SOURCE_VARIABLE} is not set")
    start = {"embedded": embedded_cluster, "google": google_replicator.google_cluster}[kind]
    with ExitStack() as stack:
        yield lambda nodes: stack.enter_context(start(volume_root, nodes))


def job_on(cluster: Cluster, *, peers: list[list[int]] | None = None, **settings: object) -> Job:
    return Job(cluster.volumes, peers=peers, settings={**cluster.settings(), **settings})


def start_run(cluster: Cluster, job: Job) -> None:
    job.handshake()
    cluster.wait_until_watching(job.volumes)


def test_first_start_answers_nothing_and_leaves_nothing(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    job = job_on(cluster, peers=SWAP)
    cluster.volumes[0].mkdir(exist_ok=True)
    write_share(cluster.volumes[0] / files.data_name("D" + "a" * 64), "orphan")
    (cluster.volumes[0] / "jax-init-info.txt").write_text("0\n127.0.0.1:1\n")

    job.handshake()

    for rank, volume in enumerate(job.volumes):
        assert job.restored_step(rank) is None
        assert yaml.safe_load((volume / files.PRERESTORE_FILE).read_text()) == {}
        assert "no valid checkpoints found" in job.errors(rank).lower()
        assert job.failure(rank) == ""
    eventually(lambda: not list(cluster.volumes[0].glob("*.data")), "the orphan to go")
    assert (cluster.volumes[0] / "jax-init-info.txt").exists()


def test_handshake_deletes_all_but_shares_and_start_up_files(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    job = job_on(cluster)
    start_run(cluster, job)
    job.save(5)
    volume = job.volumes[0]
    kept = {"jax-init-info.txt", job.share(5, 0).meta, files.data_name(job.digest(5, 0))}
    (volume / "jax-init-info.txt").write_text("0\n127.0.0.1:1\n")
    (volume / "notes.txt").write_text("ours")
    (volume / files.FAILED_FILE).touch()
    (volume / f"{files.data_name('D' + 'b' * 64)}.tmp").mkdir()
    write_share(volume / job.share(6, 0).save, "half hashed")
    write_share(volume / ".staging", "half written")

    job.handshake()

    assert job.restored_step(0) == 5
    assert kept <= names(volume)
    answers = {files.PRERESTORE_FILE, job.marker(0).name, files.ERRORS_FILE}
    assert names(volume) - kept <= answers


def test_step_is_renamed_to_its_hash_and_copied_to_the_peer(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    job = job_on(cluster, peers=SWAP)
    start_run(cluster, job)

    job.save(3)

    for rank, volume in enumerate(job.volumes):
        assert not (volume / "3").exists()
        assert not list(volume.glob("*.save"))
        for holder in (0, 1):
            digest = job.digest(3, rank, holder)
            assert files.DATA_NAME.fullmatch(files.data_name(digest))
            data = job.volumes[holder] / files.data_name(digest)
            assert (data / "state" / "manifest.ocdbt").is_file()
    assert job.digest(3, 0) != job.digest(3, 1)


def test_copies_in_a_ring_and_only_the_newest_step_stays(start_cluster: StartCluster) -> None:
    cluster = start_cluster(3)
    job = job_on(cluster, peers=[[1], [2], [0]])
    start_run(cluster, job)

    for step in (1, 2, 4):
        job.save(step)

    for rank, volume in enumerate(job.volumes):
        held = {job.digest(4, rank), job.digest(4, (rank - 1) % 3)}
        assert {path.name for path in volume.glob("*.data")} == set(map(files.data_name, held))
        assert len(held) == 2


def test_restart_restores_the_newest_step_that_all_hold(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    job = job_on(cluster, peers=SWAP)
    start_run(cluster, job)
    job.save(7)
    commit_step(job.volumes[0], 9, "only on one node")
    eventually(lambda: not (job.volumes[0] / "9").exists(), "step 9 to be taken")
    eventually(lambda: (job.volumes[0] / job.share(9, 0).meta).exists(), "the meta of step 9")

    start_run(cluster, job)

    for rank, volume in enumerate(job.volumes):
        assert job.restored_step(rank) == 7
        prerestore = yaml.safe_load((volume / files.PRERESTORE_FILE).read_text())
        assert prerestore == {"restore-step": 7}
        eventually(
            lambda r=rank: job.metas(r) == job.expected_metas(r, 7), "the unfinished step to go"
        )
    job.save(8)


def test_node_with_wiped_memory_gets_its_share_from_its_peer(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    job = job_on(cluster, peers=SWAP)
    start_run(cluster, job)
    job.save(7)
    digest = job.digest(7, 1)
    job.wipe(1)

    start_run(cluster, job)

    assert [job.restored_step(rank) for rank in (0, 1)] == [7, 7]
    assert os.readlink(job.marker(1)) == files.data_name(digest)
    assert (job.marker(1) / "state" / "manifest.ocdbt").is_file()


def test_all_memory_lost_restores_the_backup(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    job = job_on(cluster, peers=SWAP, **cluster.settings(backups=True))
    start_run(cluster, job)
    cluster.let_backup_interval_pass()
    job.save(10)
    digests = [job.digest(10, rank) for rank in (0, 1)]
    wanted = {job.share(10, rank).meta for rank in (0, 1)} | {*map(files.data_name, digests)}
    folder = cluster.backup / job.name
    eventually(lambda: backups(folder) and wanted <= names(backups(folder)[-1]), "the backup")
    backup = backups(folder)[-1]
    assert files.BACKUP_FOLDER.fullmatch(backup.name)
    assert not list(backup.glob("*.tmp"))
    for rank in (0, 1):
        job.wipe(rank)

    start_run(cluster, job)

    for rank, volume in enumerate(job.volumes):
        assert job.restored_step(rank) == 10
        assert os.readlink(job.marker(rank)) == files.data_name(digests[rank])
        prerestore = yaml.safe_load((volume / files.PRERESTORE_FILE).read_text())
        assert prerestore == {"restore-step": 10, "restore-backup": backup.name}
    assert wanted <= names(backup), "a backup is never deleted"


def backups(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if files.BACKUP_FOLDER.fullmatch(path.name))


def test_restore_version_overrules_newer_steps_once(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    job = job_on(cluster)
    version = cluster.backup / job.name / files.FORCED_RESTORE_FILE
    old = version.parent / "2020-01-02_03-04"
    digest = "D" + "c" * 64
    write_share(old / files.data_name(digest), "old")
    (old / job.share(2, 0).meta).write_text(digest)
    start_run(cluster, job)
    job.save(30)
    version.write_text(f"{old.name}\n")

    start_run(cluster, job)

    assert job.restored_step(0) == 2
    assert os.readlink(job.marker(0)) == files.data_name(digest)
    assert version.exists()
    job.save(31)
    eventually(lambda: not version.exists(), "restore.version to go")


def test_equal_data_is_kept_once_and_reported(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    job = job_on(cluster)
    start_run(cluster, job)
    job.save(1, ["same"])
    digest = job.digest(1, 0)

    job.save(2, ["same"])

    assert job.digest(2, 0) == digest
    assert {path.name for path in job.volumes[0].glob("*.data")} == {files.data_name(digest)}
    assert digest in job.errors(0)
    start_run(cluster, job)
    assert job.restored_step(0) == 2


def test_data_parallelism_copies_meta_only_and_infers_what_is_missing(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(2)
    job = job_on(cluster, peers=SWAP, **{"assume-data-parallelism": 2})
    start_run(cluster, job)
    job.save(4, ["twin", "twin"])
    assert job.digest(4, 0) == job.digest(4, 1)
    job.wipe(1)
    (job.volumes[0] / job.share(4, 1).meta).unlink()

    start_run(cluster, job)

    assert [job.restored_step(rank) for rank in (0, 1)] == [4, 4]
    job.save(5, ["next", "next"])


def test_files_of_another_job_are_not_restored_and_go(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    job = job_on(cluster)
    volume = cluster.volumes[0]
    volume.mkdir(exist_ok=True)
    digest = "D" + "d" * 64
    write_share(volume / files.data_name(digest), "foreign")
    foreign = files.ShareName(job="job-b", step=99, node_rank=0)
    (volume / foreign.meta).write_text(digest)

    job.handshake()

    assert job.restored_step(0) is None
    eventually(lambda: foreign.meta not in names(volume), "the foreign meta to go")
    eventually(lambda: files.data_name(digest) not in names(volume), "the foreign data to go")


def test_fewer_nodes_than_saved_lose_the_rest(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    job = job_on(cluster, peers=SWAP)
    start_run(cluster, job)
    job.save(6)
    smaller = Job(cluster.volumes[:1], settings=cluster.settings())
    job.wipe(1)

    start_run(cluster, smaller)

    assert smaller.restored_step(0) == 6
    assert smaller.digest(6, 0) == job.digest(6, 0)
