"""What the processes of the tests of saving run: loops that save, fail, wait and report."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mtcheckpoint as mtc
from mtcheckpoint import _orbax
from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint.testing import assert_state, case_mesh, case_state, report, this_process


def rank() -> int:
    place = this_process()
    assert place is not None
    return place.rank


def volume(root: str) -> Path:
    return Path(root) / f"node-{rank()}"


def config(root: str, **changes: Any) -> mtc.CheckpointConfig:
    values: dict[str, Any] = {
        "enable_multi_tier_checkpointing": True,
        "multi_tier_checkpointing_backup_interval_minutes": 30,
        "local_checkpoint_directory": str(volume(root)),
        "enable_continuous_checkpointing": True,
        "run_name": "job-a",
        "timeout_secs": 60,
    }
    return mtc.CheckpointConfig(**{**values, **changes})


def alone(root: str, **changes: Any) -> mtc.CheckpointConfig:
    """Without a replicator."""
    return config(root, **{"enable_replicator": False, "max_num_checkpoints_to_keep": 2, **changes})


def mesh() -> Any:
    import jax

    devices = jax.device_count()
    return case_mesh(2, devices // 2)


def train() -> None:
    """A step of training, for which all processes are needed, as for a real one."""
    import jax
    import jax.numpy as jnp

    global _sum
    if _sum is None:
        sharding = jax.NamedSharding(mesh(), jax.P(("data", "model")))
        ones = jax.make_array_from_callback(
            (jax.device_count(),), sharding, lambda index: jnp.ones(1)
        )
        whole = jax.NamedSharding(mesh(), jax.P())
        total = jax.jit(jnp.sum, out_shardings=whole)
        _sum = lambda: total(ones)  # noqa: E731
    assert int(_sum()) == jax.device_count()


_sum: Callable[[], Any] | None = None


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class WriterWith:
    """A share writer that does something before it writes: delays, fails."""

    def __init__(self, writer: _orbax.ShareWriter, before: Callable[[int, Path], float]) -> None:
        self._writer = writer
        self._before = before
        self._staging = writer._staging

    def write(self, step: int, tree: Any, *arguments: Any, **options: Any) -> Any:
        slower = self._before(step, self._staging)
        begun = time.monotonic()
        share = self._writer.write(step, tree, *arguments, **options)
        pause((time.monotonic() - begun) * (slower - 1) if slower > 1 else 0.0)
        return share

    def close(self) -> None:
        self._writer.close()


class ManagerWith(mtc.ReplicatedCheckpointManager):
    """A manager whose writer does something first; what that returns is a factor of slowness."""

    def __init__(self, *args: Any, before: Callable[[int, Path], float], **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._before_write = before

    def _open_writer(self, staging: Path) -> Any:
        return WriterWith(super()._open_writer(staging), self._before_write)


# One host is slower than the others (case 1).


def slow_host(root: str, steps: int) -> dict[str, list[int]]:
    """The steps that were saved with one writer ten times slower, and with random delays."""
    rng = random.Random(f"delays of {rank()}")

    def ten_times(step: int, staging: Path) -> float:
        return 10.0 if rank() == 2 else 1.0

    def at_random(step: int, staging: Path) -> float:
        pause(rng.choice([0.0, 0.0, 0.02, 0.1]))
        return 1.0

    return {
        "ten times slower": _saved(config(root, run_name="job-slow"), steps, ten_times),
        "randomly delayed": _saved(config(root, run_name="job-random"), steps, at_random),
    }


def _saved(
    settings: mtc.CheckpointConfig, steps: int, before: Callable[[int, Path], float]
) -> list[int]:
    state = case_state(mesh(), 0)
    with ManagerWith(settings, mesh=mesh(), before=before) as manager:
        assert manager.restore_latest(state) is None
        saved = []
        for step in range(steps):
            train()
            pause(0.015)
            if manager.save(step, case_state(mesh(), step)):
                saved.append(step)
        manager.wait_until_finished()
        assert manager.latest_step() == saved[-1]
    return saved


# A digits-only name is a finished step, and only ours are deleted (case 8).


def many_saves(root: str, steps: int) -> int:
    """Saves `steps` steps and keeps them, fails at step 9000, goes on, and keeps two."""
    generous = alone(root, max_num_checkpoints_to_keep=steps + 1)
    with mtc.ReplicatedCheckpointManager(generous, mesh=mesh()) as manager:
        for step in range(steps):
            assert manager.save(step, case_state(mesh(), step), extras={"rank": rank()}, force=True)
        manager.wait_until_finished()
        try:
            manager.save(9000, case_state(mesh(), 9000), force=True)
            manager.wait_until_finished()
        except mtc.errors.SaveError as error:
            report("refused", text=str(error))
    with mtc.ReplicatedCheckpointManager(alone(root), mesh=mesh()) as manager:
        restored = manager.restore_latest(case_state(mesh(), 0))
        assert restored is not None
        assert_state(restored.state, restored.step)
        assert restored.extras == tuple({"rank": r} for r in range(2))
        assert manager.save(steps, case_state(mesh(), steps), force=True)
        return restored.step


# A slow replicator and a small disk (case 9).


def big_state(step: int) -> dict[str, Any]:
    """4 MiB on each of two processes."""
    import jax
    import numpy as np

    sharding = jax.NamedSharding(mesh(), jax.P("data", "model"))
    shape = (8, 1 << 18)
    w = jax.make_array_from_callback(
        shape, sharding, lambda index: np.full(shape, step, np.float32)[index]
    )
    return {"w": w}


def slow_replicator(root: str, seconds: float) -> dict[str, Any]:
    """Trains steps of 20 ms for a while; the steps that were saved, and how long `save` took."""
    saved, skipped_seconds, saved_seconds = [], [], []
    with mtc.ReplicatedCheckpointManager(config(root), mesh=mesh()) as manager:
        manager.restore_latest(None)
        states = [big_state(step) for step in range(4)]
        for step in range(round(seconds / 0.02)):
            begun = time.monotonic()
            started = manager.save(step, states[step % 4])
            passed = time.monotonic() - begun
            (saved_seconds if started else skipped_seconds).append(passed)
            if started:
                saved.append(step)
            pause(0.02)
        manager.wait_until_finished()
    return {"saved": saved, "skipped": sorted(skipped_seconds), "started": sorted(saved_seconds)}


def full_disk(root: str) -> dict[str, Any]:
    """Process 1's disk is full when step 20 is saved."""
    filler = volume(root) / "filler"
    with mtc.ReplicatedCheckpointManager(alone(root), mesh=mesh()) as manager:
        manager.save(10, big_state(10))
        manager.wait_until_finished()
        if rank() == 1:
            _fill(filler)
        try:
            manager.save(20, big_state(20), force=True)
            manager.wait_until_finished()
            failure = None
        except mtc.errors.SaveError as error:
            failure = [str(error), error.step, list(error.processes)]
        skipped = not any(manager.save(step, big_state(step)) for step in range(21, 24))
        left = sorted(path.name for path in volume(root).iterdir())
        filler.unlink(missing_ok=True)
        saved = wait_for(
            lambda: _first(manager, range(24, 10_000)), Deadline.after(30.0), "a save that fits"
        )
        manager.wait_until_finished()
        latest = manager.latest_step()
    return {
        "failure": failure,
        "skipped": skipped,
        "left": left,
        "saved": saved == latest,
    }


def _first(manager: mtc.ReplicatedCheckpointManager, steps: range) -> int | None:
    for step in steps:
        pause(0.01)
        if manager.save(step, big_state(step)):
            return step
    return None


def _fill(filler: Path) -> None:
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


# The replicator is not yet watching.


def save_at_once(root: str, saves: int) -> None:
    """Saves as soon as the restore has returned, and leaves as soon as that is done."""
    with mtc.ReplicatedCheckpointManager(config(root), mesh=mesh()) as manager:
        assert manager.restore_latest(None) is None
        for step in range(saves):
            assert manager.save(step, case_state(mesh(), step), force=True)


# Processes that are stopped or killed.


def until_told(root: str) -> Iterator[int]:
    """Steps until the parent makes the file ``enough``; process 0 looks, so that all agree."""
    from mtcheckpoint._coordination import job_coordinator

    coordinator = job_coordinator("until-told", timeout_secs=60)
    enough = Path(root) / "enough"
    step = 0
    while not coordinator.lead(f"enough/{step}", enough.exists):
        yield step
        step += 1


def stopped_host(root: str) -> dict[str, Any]:
    """Saves while the parent stops process 1, then again with a short limit."""
    saved = []
    with mtc.ReplicatedCheckpointManager(alone(root), mesh=mesh()) as manager:
        for step in until_told(root):
            train()
            if manager.save(step, case_state(mesh(), step)):
                saved.append(step)
                report("saved", step=step)
            pause(0.005)
        manager.wait_until_finished()
        assert manager.latest_step() == saved[-1]
    return {"saved": saved, "error": _short_limit(root)}


def _short_limit(root: str) -> str:
    settings = alone(root, timeout_secs=2, run_name="job-b")
    try:
        with mtc.ReplicatedCheckpointManager(settings, mesh=mesh()) as manager:
            manager.save(0, case_state(mesh(), 0))
            manager.wait_until_finished()
            report("stop me")
            go_on = Path(root) / "stopped"
            wait_for(lambda: go_on.exists() or None, Deadline.after(30.0), "the parent")
            manager.save(1, case_state(mesh(), 1), force=True)
            manager.wait_until_finished()
    except mtc.errors.MtCheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def killed(root: str, keep: int) -> None:
    """Restores, checks, and saves as often as it can until it is killed."""
    settings = alone(root, max_num_checkpoints_to_keep=keep)
    with mtc.ReplicatedCheckpointManager(settings, mesh=mesh()) as manager:
        restored = manager.restore_latest(case_state(mesh(), 0))
        if restored is not None:
            assert_state(restored.state, restored.step)
        first = restored.step + 1 if restored is not None else 0
        report("began", step=first - 1)
        assert manager.save(first, case_state(mesh(), first), force=True)
        manager.wait_until_finished()
        found = [*volume(root).iterdir(), *volume(root).glob("mtcheckpoint.staging/*")]
        report("saved one", names=sorted(path.name for path in found))
        for step in range(first + 1, first + 100_000):
            train()
            if manager.save(step, case_state(mesh(), step)):
                report("started", step=step)
            latest = manager.latest_step()
            report("latest", step=latest if latest is not None else -1)


def preempted(root: str) -> dict[str, Any]:
    """Trains until the preemption of one process has reached all."""
    settings = alone(
        root,
        enable_continuous_checkpointing=False,
        local_checkpoint_period=1_000_000,
        save_checkpoint_on_start=False,
        enable_autocheckpoint=True,
    )
    with mtc.ReplicatedCheckpointManager(settings, mesh=mesh()) as manager:
        for step in range(2000):
            started = manager.save(step, case_state(mesh(), step))
            if manager.reached_preemption(step):
                return {"step": step, "started": started}
            assert not started
            report("step", step=step)
            pause(0.01)
    return {}


@contextmanager
def caught(kind: type[BaseException]) -> Iterator[list[BaseException]]:
    found: list[BaseException] = []
    try:
        yield found
    except kind as error:
        found.append(error)


def save_once(root: str, step: int) -> int | None:
    """Restores, saves at once, and leaves; the step that was restored."""
    settings = config(root, local_checkpoint_directory=f"{root}/node{rank()}")
    with mtc.ReplicatedCheckpointManager(settings, mesh=mesh()) as manager:
        restored = manager.restore_latest(case_state(mesh(), 0))
        assert manager.save(step, case_state(mesh(), step), force=True)
        if restored is None:
            return None
        assert_state(restored.state, restored.step)
        return restored.step
