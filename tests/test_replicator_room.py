"""The embedded replicator in volumes that are full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from replicator_cluster import Job, embedded_cluster, eventually
from shares import commit_step, write_share

from mtcheckpoint._handshake import files

SWAP = [[1], [0]]


@pytest.fixture
def small_volume(volume_root: Path) -> Iterator[Path]:
    """Node 1's directory as a tmpfs of 2 MiB; mounting needs privileges."""
    volume = volume_root / "node1"
    volume.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(volume)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("not allowed to mount a tmpfs")
    yield volume
    subprocess.run(["umount", "-l", str(volume)], check=True)


def fill(volume: Path) -> Path:
    """Leaves no room at all."""
    filler = volume / "filler.bin"
    with pytest.raises(OSError, match="No space left"):
        _write_for_ever(filler)
    return filler


def _write_for_ever(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_step_in_a_full_volume_is_taken_when_there_is_room(
    small_volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with embedded_cluster(small_volume.parent, 2) as cluster:
        job = Job(cluster.volumes, peers=[[], []])
        job.handshake()
        staging = write_share(small_volume / ".staging", "one")
        write_share(job.volumes[0] / ".staging", "zero").rename(job.volumes[0] / "1")
        filler = fill(small_volume)
        os.rename(staging, small_volume / "1")
        eventually(lambda: "waits for room" in caplog.text, "the report")
        assert job.failure(1) == ""

        filler.unlink()

        job.wait_until_only(1)


def test_copy_without_room_is_reported_and_the_next_step_has_copies_again(
    small_volume: Path,
) -> None:
    with embedded_cluster(small_volume.parent, 2) as cluster:
        job = Job(cluster.volumes, peers=SWAP)
        job.handshake()
        job.save(1)
        large = write_share(job.volumes[0] / ".staging", "large")
        (large / "extras.bin").write_bytes(b"x" * 2**21)
        commit_step(small_volume, 2, "small")
        large.rename(job.volumes[0] / "2")
        report = f"cannot copy step 2 to node rank 1 ({small_volume})"
        eventually(lambda: report in job.errors(0), "the report")
        eventually(lambda: not (small_volume / "2").exists(), "step 2 to be taken")
        assert cluster.replicator.replicated_step == 1
        assert job.failure(0) == job.failure(1) == ""

        job.save(3)

        assert job.digest(3, 0, holder=1) == job.digest(3, 0)
        assert not list(small_volume.glob("*.tmp"))
        assert files.data_name(job.digest(3, 0)) in {path.name for path in small_volume.iterdir()}
