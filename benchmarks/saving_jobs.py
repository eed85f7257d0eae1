"""What the processes of the save benchmarks run."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from benchmarks import sides, states
from benchmarks.timing import clocked

__all__ = ["QUEUED_STEPS", "save", "save_behind_steps"]

QUEUED_STEPS = 8

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
    with _opened(root, "ours", "orbax", "raw") as contestants:
        told: Times = {name: [] for name in contestants}
        for step in range(1, pairs + 2):
            for name, side in contestants.items():
                _together()
                told[name].append(_saved(side, step, state))
                _finish(side, step, state, tree)
    return told


def save_behind_steps(root: str, size_bytes: int, pairs: int) -> Times:
    """As `save`, with steps of training queued on the devices, whose result is saved.

    Returns:
        Also ``steps``: what the queue takes by itself.
    """
    tree = states.abstract(size_bytes)
    state = states.filled(tree)
    with _opened(root, "ours", "orbax") as contestants:
        told: Times = {name: [] for name in (*contestants, "steps")}
        for step in range(1, pairs + 2):
            for name, side in contestants.items():
                _together()
                state = _queue_steps(state)
                told[name].append(_saved(side, step, state))
                _finish(side, step, state, tree)
            _together()
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
    }
    contestants = {name: made[name](root) for name in names}
    for side in contestants.values():
        side.open()
    try:
        yield contestants
    finally:
        for side in contestants.values():
            side.close()


def _together() -> None:
    gc.collect()
    multihost_utils.sync_global_devices("save")


def _saved(side: sides.Side, step: int, state: Any) -> dict[str, float]:
    taken, blocked = clocked(lambda: _save_and_wait(side, step, state))
    assert side.step_folder(step).is_dir()
    return {**taken, "blocked": blocked}


def _finish(side: sides.Side, step: int, state: Any, tree: Any) -> None:
    """Compares what was saved, once, and deletes it."""
    if step == 1:
        sides.assert_saved(side, state, tree)
    sides.delete(side, step)


def _save_and_wait(side: sides.Side, step: int, state: Any) -> float:
    begun = time.perf_counter()
    side.save(step, state)
    blocked = time.perf_counter() - begun
    side.wait()
    return blocked


def _queue_steps(state: Any) -> Any:
    """Queues steps; returns before they are done."""
    for _ in range(QUEUED_STEPS):
        state = _step(state)
    return state


@functools.partial(jax.jit, donate_argnums=0)
def _step(state: Any) -> Any:
    """Each element changes, by something that takes all devices, as in a step of training."""
    total = jnp.sum(state["params"]["layer_0"]["norm_1"])
    return jax.tree.map(lambda leaf: leaf + (total * 1e-9).astype(leaf.dtype), state)
