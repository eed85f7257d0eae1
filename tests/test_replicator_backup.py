"""Backups of the embedded replicator: when, in which order, and what happens when they fail."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import gcs_server
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from replicator_cluster import EmbeddedCluster, Job, eventually
from shares import write_share

from mtcheckpoint._handshake import files

SWAP = [[1], [0]]


class FaultyFileSystem(MemoryFileSystem):
    """An object store in memory whose operations fail as a test says.

    Attributes:
        failures: how often each operation still fails; -1 for ever.
        gate: uploads wait until it is set.
    """

    protocol = "faulty"
    failures: dict[str, int] = {}  # noqa: RUF012
    gate = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("faulty://", "memory://"))

    def _maybe_fail(self, operation: str) -> None:
        left = self.failures.get(operation, 0)
        if left:
            self.failures[operation] = left - 1
            raise OSError(f"{operation} refused")

    def put_file(self, *arguments: object, **keywords: object) -> None:
        self.gate.wait()
        self._maybe_fail("put")
        super().put_file(*arguments, **keywords)

    def get_file(self, *arguments: object, **keywords: object) -> None:
        self._maybe_fail("get")
        super().get_file(*arguments, **keywords)

    def ls(self, *arguments: object, **keywords: object) -> object:
        self._maybe_fail("list")
        return super().ls(*arguments, **keywords)


@pytest.fixture
def bucket() -> Iterator[str]:
    """URL of a fresh bucket without renames."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.failures = {}
    FaultyFileSystem.gate = threading.Event()
    FaultyFileSystem.gate.set()
    yield f"faulty://{uuid.uuid4().hex}"
    FaultyFileSystem.gate.set()


@pytest.fixture
def cluster(volume_root: Path, bucket: str) -> Iterator[EmbeddedCluster]:
    cluster = EmbeddedCluster(volume_root, 2, backup_url=bucket)
    cluster.replicator.start()
    yield cluster
    cluster.replicator.stop()


def entries(bucket: str) -> set[str]:
    """Names of the files and data in all backups of the bucket."""
    paths = fsspec.filesystem("faulty").find(bucket)
    return {path.split("/")[4] for path in paths if len(path.split("/")) > 4}


def metas(bucket: str) -> set[str]:
    return {name for name in entries(bucket) if name.endswith(".meta")}


def back_up(
    cluster: EmbeddedCluster, job: Job, step: int, contents: list[str] | None = None
) -> None:
    """Saves a step that is due for a backup."""
    cluster.let_backup_interval_pass()
    job.commit(step, contents)


def eventually_later(cluster: EmbeddedCluster, look: object, what: str) -> None:
    """Waits while the pauses between attempts pass quickly."""

    def look_later() -> object:
        cluster.clock.advance(0.5)
        return look()

    eventually(look_later, what)


def test_backup_in_an_object_store_is_restored(cluster: EmbeddedCluster, bucket: str) -> None:
    job = Job(cluster.volumes, peers=SWAP)
    job.handshake()
    back_up(cluster, job, 5)
    eventually(lambda: len(metas(bucket)) == 2, "the backup")
    for rank in (0, 1):
        job.wipe(rank)

    job.handshake()

    for rank in (0, 1):
        assert job.restored_step(rank) == 5
        assert (job.marker(rank) / "state" / "manifest.ocdbt").is_file()


def test_no_meta_appears_before_all_data(cluster: EmbeddedCluster, bucket: str) -> None:
    settings = {"backup-interval-minutes": 30, "assume-data-parallelism": 2}
    job = Job(cluster.volumes, peers=SWAP, settings=settings)
    job.handshake()
    FaultyFileSystem.gate.clear()
    back_up(cluster, job, 5, ["twin", "twin"])
    eventually(lambda: not (job.volumes[0] / "5").exists(), "step 5 to be taken")
    job.commit(6, ["next twin"] * 2)
    eventually(lambda: cluster.replicator.replicated_step == 6, "step 6")
    assert entries(bucket) == set()

    FaultyFileSystem.gate.set()

    eventually(lambda: len(metas(bucket)) == 2, "the backup")
    assert {name for name in entries(bucket) if name.endswith(".data")} == {
        files.data_name(job.digest(5, 1))
    }


def test_uploads_are_tried_again(cluster: EmbeddedCluster, bucket: str) -> None:
    job = Job(cluster.volumes, peers=SWAP)
    job.handshake()
    FaultyFileSystem.failures = {"put": 3}

    back_up(cluster, job, 5)

    eventually_later(cluster, lambda: len(metas(bucket)) == 2, "the backup")
    assert "backup" not in job.errors(0) + job.errors(1)


def test_failed_backup_is_reported_has_no_meta_and_stops_nothing(
    cluster: EmbeddedCluster, bucket: str
) -> None:
    job = Job(cluster.volumes, peers=SWAP)
    job.handshake()
    FaultyFileSystem.failures = {"put": -1}

    back_up(cluster, job, 5)

    for rank in (0, 1):
        eventually_later(
            cluster, lambda r=rank: "this backup stays incomplete" in job.errors(r), "the report"
        )
    assert metas(bucket) == set()
    job.save(6)
    FaultyFileSystem.failures = {}
    back_up(cluster, job, 7)
    eventually(lambda: metas(bucket) == {job.share(7, rank).meta for rank in (0, 1)}, "the next")


def test_unreadable_backups_are_never_taken_for_none(cluster: EmbeddedCluster, bucket: str) -> None:
    job = Job(cluster.volumes, peers=SWAP)
    FaultyFileSystem.failures = {"list": -1}
    for rank in (0, 1):
        job.write_yaml(rank)

    for rank in (0, 1):
        eventually_later(cluster, lambda r=rank: "cannot be read" in job.failure(r), "the failure")
        assert not job.markers(rank)


def test_failed_fetch_is_reported_and_leaves_a_dangling_link(
    cluster: EmbeddedCluster, bucket: str
) -> None:
    job = Job(cluster.volumes)
    job.handshake()
    back_up(cluster, job, 5)
    eventually(lambda: len(metas(bucket)) == 2, "the backup")
    for rank in (0, 1):
        job.wipe(rank)
    FaultyFileSystem.failures = {"get": -1}
    for rank in (0, 1):
        job.write_yaml(rank)

    for rank in (0, 1):
        eventually_later(cluster, lambda r=rank: job.markers(r), "the marker")
        assert job.marker(rank).is_symlink()
        assert not job.marker(rank).exists()
        assert "the .restore link will dangle" in job.errors(rank)
        assert not list(job.volumes[rank].glob("*.tmp"))


def test_wrong_restore_version_fails_and_deletes_nothing(
    cluster: EmbeddedCluster, bucket: str
) -> None:
    job = Job(cluster.volumes, peers=SWAP)
    job.handshake()
    job.save(5)
    store = fsspec.filesystem("faulty")
    store.pipe_file(f"{bucket}/job-a/restore.version", b"2020-01-01_00-00")
    for rank in (0, 1):
        job.write_yaml(rank)

    for rank in (0, 1):
        eventually(lambda r=rank: "2020-01-01_00-00" in job.failure(r), "the failure")
        assert job.metas(rank) == job.expected_metas(rank, 5)

    store.rm_file(f"{bucket}/job-a/restore.version")
    job.handshake()
    assert job.restored_step(0) == 5


def test_incomplete_backup_is_passed_over(volume_root: Path) -> None:
    cluster = EmbeddedCluster(volume_root, 2)
    job = Job(cluster.volumes)
    for folder, step, ranks in [
        ("2024-01-01_00-00", 10, (0, 1)),
        ("2024-01-02_00-00", 20, (0,)),
    ]:
        for rank in ranks:
            digest = f"D{step}{rank}".ljust(65, "0")
            place = cluster.backup / job.name / folder
            write_share(place / files.data_name(digest), f"{step} {rank}")
            (place / job.share(step, rank).meta).write_text(digest)

    with cluster.replicator:
        job.handshake()
        assert [job.restored_step(rank) for rank in (0, 1)] == [10, 10]


def test_interval_in_steps(volume_root: Path) -> None:
    cluster = EmbeddedCluster(volume_root, 1)
    job = Job(cluster.volumes, settings={"backup-interval-steps": 10})

    def backed_up() -> set[str]:
        return {path.name for path in cluster.backup.glob("job-a/*/*.meta")}

    with cluster.replicator:
        job.handshake()
        for step in (4, 9, 12, 17):
            job.commit(step)
            eventually(lambda s=step: cluster.replicator.replicated_step == s, f"step {step}")
        eventually(lambda: backed_up() == {job.share(12, 0).meta}, "the first backup")
        job.commit(23)
        both = {job.share(step, 0).meta for step in (12, 23)}
        eventually(lambda: backed_up() == both, "the second backup")
        status = cluster.replicator.status()[0]
        assert files.BACKUP_FOLDER.fullmatch(status.newest_backup)
    assert not list(cluster.backup.glob("job-a/*/*.tmp"))


def test_backup_in_cloud_storage_is_restored(
    volume_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gcs_server.running_server() as url:
        for name, value in gcs_server.environment(url).items():
            monkeypatch.setenv(name, value)
        bucket = gcs_server.make_bucket(url)
        cluster = EmbeddedCluster(volume_root, 2, backup_url=f"gs://{bucket}")
        job = Job(cluster.volumes, peers=SWAP)

        def backed_up() -> set[str]:
            return {Path(name).name for name in gcs_server.object_names(url, bucket)}

        with cluster.replicator:
            job.handshake()
            back_up(cluster, job, 5)
            wanted = {job.share(5, rank).meta for rank in (0, 1)}
            eventually(lambda: wanted <= backed_up(), "the backup")
            for rank in (0, 1):
                job.wipe(rank)
            job.handshake()

        for rank in (0, 1):
            assert job.restored_step(rank) == 5
            assert (job.marker(rank) / "state" / "manifest.ocdbt").is_file()
