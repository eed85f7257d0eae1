"""Who saves and restores in the benchmarks: this library, Orbax's manager, and plain system calls.

Each side keeps its steps in a folder of its own on the volume of this process.
"""

from __future__ import annotations

import concurrent.futures
import mmap
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from orbax.checkpoint import multihost
from orbax.checkpoint.experimental.emergency import replicator_checkpoint_manager as replicated

import mtcheckpoint as mtc
from benchmarks import states
from mtcheckpoint.testing import this_process

__all__ = ["JOB", "Orbax", "Ours", "Raw", "Side", "assert_saved", "delete", "own_volume"]

JOB = "bench"

_LIMIT_SECONDS = 300.0
_BLOCK_BYTES = 64 << 20  # of one system call


class Side(Protocol):
    """One side of a comparison. All processes call the same methods in the same order."""

    def open(self) -> None:
        """Makes ready; not measured."""

    def save(self, step: int, state: Any) -> None:
        """Begins to save; the training thread is kept as long as this takes."""

    def wait(self) -> None:
        """Waits until the step is committed on all processes."""

    def step_folder(self, step: int) -> Path:
        """Where a committed step of this process lies."""

    def restore(self, tree: Any) -> Any:
        """The newest step, all of it there, as the abstract `tree` says."""

    def close(self) -> None:
        """Ends what `open` began."""


def own_volume(root: str) -> Path:
    """What stands for the RAM disk of this process."""
    place = this_process()
    assert place is not None
    return Path(root) / f"node{place.rank}"


class Ours:
    """`ReplicatedCheckpointManager` without a replicator, sealed and verified as it comes.

    Args:
        root: below it are the volumes of all processes.
        flags_of_config: of `CheckpointConfig`, in place of what is taken here.
    """

    def __init__(self, root: str, **flags_of_config: Any) -> None:
        self._folder = own_volume(root) / "ours"
        self._folder.mkdir(parents=True, exist_ok=True)
        given: dict[str, Any] = {
            "enable_multi_tier_checkpointing": True,
            "enable_replicator": False,
            "local_checkpoint_directory": str(self._folder),
            "local_checkpoint_period": 1,
            "max_num_checkpoints_to_keep": 1,
            "multi_tier_checkpointing_backup_interval_minutes": 30,
            "run_name": JOB,
            "timeout_secs": _LIMIT_SECONDS,
        }
        self._config = mtc.CheckpointConfig(**{**given, **flags_of_config})

    def open(self) -> None:
        self.manager = mtc.ReplicatedCheckpointManager(self._config, mesh=states.mesh())

    def save(self, step: int, state: Any) -> None:
        assert self.manager.save(step, state)

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def step_folder(self, step: int) -> Path:
        return self._folder / str(step)

    def restore(self, tree: Any) -> Any:
        restored = self.manager.restore_latest(tree)
        assert restored is not None
        self.report = restored.report
        return jax.block_until_ready(restored.state)

    def close(self) -> None:
        self.manager.close()


class Orbax:
    """Orbax's `ReplicatorCheckpointManager` as it comes.

    Args:
        root: below it are the volumes of all processes.
        keep: newest steps that it keeps; None keeps all.
    """

    def __init__(self, root: str, *, keep: int | None = None) -> None:
        self._policy = None if keep is None else ocp.checkpoint_managers.LatestN(n=keep)
        self._folder = own_volume(root) / "orbax"
        self._folder.mkdir(parents=True, exist_ok=True)
        _be_a_program()

    def open(self) -> None:
        self.manager = replicated.ReplicatorCheckpointManager(
            self._folder,
            options=replicated.ReplicatorCheckpointManagerOptions(preservation_policy=self._policy),
            global_mesh=states.mesh(),
        )

    def save(self, step: int, state: Any) -> None:
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state))
        assert self.manager.save(step, args=args)

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def step_folder(self, step: int) -> Path:
        return self._folder / str(step)

    def restore(self, tree: Any) -> Any:
        restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
        args = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(item=tree, restore_args=restore_args)
        )
        step = self.manager.latest_step()
        return jax.block_until_ready(self.manager.restore(step, args=args)["state"])

    def close(self) -> None:
        self.manager.close()


def _be_a_program() -> None:
    """What Orbax's manager expects of the program around it."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["benchmark"])
        multihost.initialize_runtime_to_distributed_ids()
        multihost.initialize_distributed_to_device_ids()


class Raw:
    """The same buffers by plain system calls: one file for each shard, no checksum, no metadata.

    Args:
        root: below it are the volumes of all processes.
        over: each step is written over the files of one that was deleted.

    Written from the state itself in large blocks, and read into fresh memory; by as many threads as
    this process has cores. The files are opened and closed each time. Fresh is what the kernel
    gives, as in a process that was just started: what the C library keeps for itself from one
    measured pair to the next would not have to be cleared.
    """

    def __init__(self, root: str, *, over: bool = False) -> None:
        self._folder = own_volume(root) / ("raw_over" if over else "raw")
        self._old = own_volume(root) / "raw_old" if over else None
        cores = len(os.sched_getaffinity(0)) // jax.process_count()
        self._pool = concurrent.futures.ThreadPoolExecutor(max(cores, 1))

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: Any) -> None:
        if self._old is not None and self._old.is_dir():
            self._old.rename(self.step_folder(step))
        else:
            self.step_folder(step).mkdir()
        buffers = [np.asarray(shard.data) for leaf in _leaves(state) for shard in _shards(leaf)]
        paths = (self.step_folder(step) / str(number) for number in range(len(buffers)))
        self._all(_write_file, zip(paths, buffers, strict=True))

    def wait(self) -> None:
        pass

    def step_folder(self, step: int) -> Path:
        return self._folder / str(step)

    def restore(self, tree: Any) -> list[np.ndarray]:
        """The buffers, in the order of leaves and devices."""
        newest = max(self._folder.iterdir(), key=lambda folder: int(folder.name))
        paths = sorted(newest.iterdir(), key=lambda path: int(path.name))
        return self._all(_read_file, ((path,) for path in paths))

    def close(self) -> None:
        pass

    def delete(self, step: int) -> None:
        """Deletes a step; its files stay where the next one is to be written over them."""
        if self._old is None:
            shutil.rmtree(self.step_folder(step))
        else:
            self.step_folder(step).rename(self._old)

    def _all(self, action: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        return list(self._pool.map(lambda given: action(*given), arguments))


def _leaves(state: Any) -> list[jax.Array]:
    return list(jax.tree.leaves(state))


def _shards(leaf: jax.Array) -> list[Any]:
    return list(leaf.addressable_shards[: None if leaf.ndim else 1])


def _write_file(path: Path, array: np.ndarray) -> None:
    view = memoryview(array.reshape(-1)).cast("B")
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while view:
            view = view[os.write(file, view[:_BLOCK_BYTES]) :]
    finally:
        os.close(file)


def _read_file(path: Path) -> np.ndarray:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # As numpy asks for large arrays.
        memory.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(memory)
        while view and (count := file.readinto(view)):
            view = view[count:]
    return np.frombuffer(memory, np.uint8)


def assert_saved(side: Side, state: Any, tree: Any) -> None:
    """Asserts that a side gives back the state that it saved last."""
    found = side.restore(tree)
    if isinstance(side, Raw):
        wanted = [np.asarray(s.data) for leaf in _leaves(state) for s in _shards(leaf)]
        for buffer, array in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(buffer, array.reshape(-1).view(np.uint8))
    else:
        states.assert_equal(found, state)


def delete(side: Side, step: int) -> None:
    """Deletes a step of this process, as a replicator would in time."""
    if isinstance(side, Raw):
        side.delete(step)
    else:
        shutil.rmtree(side.step_folder(step))
