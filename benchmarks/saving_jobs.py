"""What the processes of the save benchmarks run."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from benchmarks import sides, states
from benchmarks.timing import clocked, warm_bytes, warm_memory

__all__ = ["QUEUED_STEPS", "save", "save_behind_steps"]

QUEUED_STEPS = 8  # an even number: then the state is as it was

Times = dict[str, list[dict[str, float]]]


def save(root: str, size_bytes: int, pairs: int) -> Times:
    """Saves one state by each side in turns.

    Args:
        root: where the nodes' folders are.
        size_bytes: of the whole state.
        pairs: measured rounds; one more goes before, unmeasured.

    Returns:
        For each side and round: seconds, CPU seconds, and seconds until `save` returned.
    """
    tree = states.abstract(size_bytes)
    state = states.filled(tree)
    with _opened(root, "ours", "orbax", "raw", "raw_over") as contestants:
        told: Times = {name: [] for name in contestants}
        for step in range(1, pairs + 2):
            for name, side in contestants.items():
                _together(size_bytes)
                told[name].append(_saved(side, step, state))
                _finish(side, step, state, tree)
    return told


def save_behind_steps(root: str, size_bytes: int, pairs: int) -> Times:
    """As `save`, with steps of training queued on the devices, whose result is saved.

    Returns:
        Also ``next``, the seconds in which the next step is queued, and of ``steps`` what the queue
        takes by itself.
    """
    tree = states.abstract(size_bytes)
    state = states.filled(tree)
    with _opened(root, "ours", "orbax") as contestants:
        told: Times = {name: [] for name in (*contestants, "steps")}
        for step in range(1, pairs + 2):
            for name, side in contestants.items():
                _together(size_bytes)
                state = _queue_steps(state)
                taken, state = _saved_behind(side, step, state)
                told[name].append(taken)
                _finish(side, step, state, tree)
            _together(size_bytes)
            state = _queue_steps(state)
            taken, _ = clocked(functools.partial(jax.block_until_ready, state))
            told["steps"].append(taken)
    return told


@contextlib.contextmanager
def _opened(root: str, *names: str) -> Iterator[dict[str, sides.Side]]:
    made: dict[str, Callable[[str], sides.Side]] = {
        "ours": sides.Ours,
        "orbax": sides.Orbax,
        "raw": sides.Raw,
        "raw_over": functools.partial(sides.Raw, over=True),
    }
    contestants = {name: made[name](root) for name in names}
    for side in contestants.values():
        side.open()
    try:
        yield contestants
    finally:
        for side in contestants.values():
            side.close()


def _together(size_bytes: int) -> None:
    gc.collect()
    warm_memory(warm_bytes(size_bytes, jax.process_count()))
    multihost_utils.sync_global_devices("save")


def _saved(side: sides.Side, step: int, state: Any) -> dict[str, float]:
    def save() -> float:
        blocked, _ = clocked(lambda: side.save(step, state))
        side.wait()
        return blocked["seconds"]

    taken, blocked = clocked(save)
    assert side.step_folder(step).is_dir()
    return {**taken, "blocked": blocked}


def _saved_behind(side: sides.Side, step: int, state: Any) -> tuple[dict[str, float], Any]:
    """A save, and the next step, which is given the memory of the state; the state as it was."""
    blocked, _ = clocked(lambda: side.save(step, state))
    queued, state = clocked(lambda: _step(state))
    waited, _ = clocked(side.wait)
    cpu_seconds = sum(part["cpu_seconds"] for part in (blocked, queued, waited))
    taken = {"blocked": blocked["seconds"], "next": queued["seconds"], "cpu_seconds": cpu_seconds}
    return taken, jax.block_until_ready(_step(state))


def _finish(side: sides.Side, step: int, state: Any, tree: Any) -> None:
    """Compares what was saved, once, and deletes it."""
    if step == 1:
        sides.assert_saved(side, state, tree)
    sides.delete(side, step)


def _queue_steps(state: Any) -> Any:
    """Queues steps; returns before they are done."""
    for _ in range(QUEUED_STEPS):
        state = _step(state)
    return state


@functools.partial(jax.jit, donate_argnums=0)
def _step(state: Any) -> Any:
    """Each element changes its sign, which waits for all devices, as a step of training does."""
    nothing = 0 * jnp.sum(state["params"]["layer_0"]["norm_1"])
    return jax.tree.map(lambda leaf: nothing.astype(leaf.dtype) - leaf, state)
