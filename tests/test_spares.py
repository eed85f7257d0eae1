"""A share is written into the memory of one that is gone, and of no other."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import saving_jobs as jobs

import mtcheckpoint as mtc
from mtcheckpoint._shares.spares import Spares
from mtcheckpoint.testing import run_processes

SIZE = 1 << 20


@pytest.fixture
def spares(volume_root: Path) -> Spares:
    return Spares(volume_root / "spare")


def share(root: Path, name: str, *sizes: int) -> Path:
    """A folder with data files of these sizes."""
    folder = root / name
    folder.mkdir()
    for position, size in enumerate(sizes):
        (folder / str(position)).write_bytes(bytes([position + 1]) * size)
    return folder


def opened(spares: Spares, path: Path) -> int:
    """Opens and closes a file at `path`; its inode."""
    file = spares.open(path)
    try:
        return os.fstat(file).st_ino
    finally:
        os.close(file)


def test_only_what_has_no_other_name_is_taken(spares: Spares, volume_root: Path) -> None:
    step = share(volume_root, "1", SIZE)
    inode = (step / "0").stat().st_ino
    spares.remember(step)
    assert spares.free_bytes() == 0
    assert opened(spares, volume_root / "while it is there") != inode
    shutil.rmtree(step)
    assert spares.free_bytes() == SIZE
    assert opened(spares, volume_root / "then") == inode
    assert spares.free_bytes() == 0
    assert opened(spares, volume_root / "a second time") != inode


def reading(path: Path) -> Any:
    return open(path, "rb")


def mapped(path: Path) -> Any:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


@pytest.mark.parametrize("hold", [reading, mapped])
def test_what_somebody_still_reads_is_not_written_to(
    hold: Callable[[Path], Any], spares: Spares, volume_root: Path
) -> None:
    """As a replicator does that sends a step which it has deleted."""
    step = share(volume_root, "1", SIZE)
    spares.remember(step)
    reader = hold(step / "0")
    shutil.rmtree(step)
    assert spares.free_bytes() == 0
    file = spares.open(volume_root / "new")
    os.write(file, b"other")
    os.close(file)
    assert reader.read(5) == b"\1" * 5
    reader.close()
    assert spares.free_bytes() == SIZE
    inode = next((volume_root / "spare").iterdir()).stat().st_ino
    assert opened(spares, volume_root / "newer") == inode, "now nobody reads it"


def test_a_file_that_was_kept_by_another_name_stays_as_it_is(
    spares: Spares, volume_root: Path
) -> None:
    step = share(volume_root, "1", SIZE)
    os.link(step / "0", volume_root / "pinned")
    spares.remember(step)
    shutil.rmtree(step)
    os.close(spares.open(volume_root / "new"))
    assert (volume_root / "pinned").read_bytes() == b"\1" * SIZE


def test_no_more_is_kept_than_told(spares: Spares, volume_root: Path) -> None:
    step = share(volume_root, "1", SIZE, 2 * SIZE, SIZE, 100)
    spares.remember(step)
    shutil.rmtree(step)
    assert spares.free_bytes() == 4 * SIZE, "small files are not worth a name"
    spares.trim(4 * SIZE)
    assert spares.free_bytes() == 4 * SIZE
    spares.trim(2 * SIZE)
    assert 0 < spares.free_bytes() <= 2 * SIZE
    spares.trim(0)
    assert not list((volume_root / "spare").iterdir())


def test_each_is_taken_once_by_threads_that_ask_together(spares: Spares, volume_root: Path) -> None:
    step = share(volume_root, "1", *[SIZE] * 6)
    inodes = {path.stat().st_ino for path in step.iterdir()}
    spares.remember(step)
    shutil.rmtree(step)
    found: list[int] = []
    together = threading.Barrier(8)

    def take(number: int) -> None:
        together.wait(10)
        found.append(opened(spares, volume_root / str(number)))

    threads = [threading.Thread(target=take, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(set(found)) == len(found) == 8
    assert inodes < set(found)


def test_a_volume_without_leases_or_links_does_without(
    spares: Spares, volume_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refused)
    step = share(volume_root, "1", SIZE)
    spares.remember(step)
    shutil.rmtree(step)
    assert spares.free_bytes() == 0
    assert opened(spares, volume_root / "new")


def test_a_link_in_the_folder_is_not_followed(spares: Spares, volume_root: Path) -> None:
    (volume_root / "spare").mkdir()
    (volume_root / "precious").write_bytes(b"x" * SIZE)
    (volume_root / "spare" / "a").symlink_to(volume_root / "precious")
    os.close(spares.open(volume_root / "new"))
    assert (volume_root / "precious").read_bytes() == b"x" * SIZE


def state(step: int) -> dict[str, jax.Array]:
    sharding = jax.NamedSharding(jobs.mesh(), jax.P(("data", "model")))
    values = np.random.default_rng(step).random((1024, 1024), np.float32)
    return {"w": jax.make_array_from_callback(values.shape, sharding, lambda i: values[i])}


def save_again_and_again(root: str, settings: Any) -> tuple[list[int], int]:
    """The file that each step was written into; files of ours that are there after the end."""
    inodes = []
    open_file = Spares.open

    def noting(self: Spares, path: Path) -> int:
        file = open_file(self, path)
        inodes.append(os.fstat(file).st_ino)
        return file

    Spares.open = noting  # type: ignore[method-assign]
    with mtc.ReplicatedCheckpointManager(settings, mesh=jobs.mesh()) as manager:
        manager.restore_latest(state(0))
        for step in range(6):
            manager.save(step, state(step), force=True)
            manager.wait_until_finished()
    return inodes, len(list(jobs.volume(root).glob("*.staging/**/*")))


def kept_job(root: str) -> tuple[list[int], int]:
    return save_again_and_again(root, jobs.alone(root, max_num_checkpoints_to_keep=1))


def replicated_job(root: str) -> tuple[list[int], int]:
    return save_again_and_again(root, jobs.config(root))


def restore_job(root: str, replicated: bool) -> None:
    settings = jobs.config(root) if replicated else jobs.alone(root)
    with mtc.ReplicatedCheckpointManager(settings, mesh=jobs.mesh()) as manager:
        restored = manager.restore_latest(state(0))
        assert restored is not None
        assert restored.step == 5
        wanted = state(5)["w"].addressable_shards
        for found, expected in zip(restored.state["w"].addressable_shards, wanted, strict=True):
            assert np.array_equal(found.data, expected.data)


@pytest.mark.parametrize("replicated", [False, True], ids=["alone", "with a replicator"])
def test_a_run_writes_into_the_memory_of_its_earlier_steps(
    replicated: bool, volume_root: Path
) -> None:
    nodes = [volume_root / f"node-{rank}" for rank in range(2)]
    for node in nodes:
        node.mkdir()
    job = replicated_job if replicated else kept_job
    with contextlib.ExitStack() as stack:
        if replicated:
            backup = volume_root / "backup"
            stack.enter_context(mtc.EmbeddedReplicator(node_directories=nodes, backup=str(backup)))
        told = run_processes(job, 2, devices=4, args=[str(volume_root)], timeout_secs=120)
        run_processes(
            restore_job, 2, devices=4, args=[str(volume_root), replicated], timeout_secs=120
        )
    for inodes, left in told:
        assert len(inodes) == 6
        assert len(set(inodes)) < 6, "the memory of one that is gone"
        assert left == 0, "nothing stays when the manager is closed"
