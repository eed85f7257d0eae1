"""What the processes of the benchmarks of training steps run."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from benchmarks import sides, states
from benchmarks.timing import clocked

__all__ = ["DEVICE_STEP_SECONDS", "train"]

DEVICE_STEP_SECONDS = 0.1

Times = dict[str, list[dict[str, float]]]


def train(root: str, size_bytes: int, pairs: int, steps: int, on_host: bool) -> Times:
    """Steps without saves, with ours as often as it can, and with Orbax's as often, in turns.

    Args:
        root: where the nodes' folders are.
        size_bytes: of the whole state.
        pairs: measured rounds; one more goes before, unmeasured.
        steps: of a round.
        on_host: steps that compute on the host's cores, all elements of the state; else steps that
            change one leaf and take the time of a device.

    Returns:
        For ``none``, ``ours`` and ``orbax`` the seconds of all steps of a round, and the saves that
        were begun in them.
    """
    state = states.filled(states.abstract(size_bytes))
    loop = _Loop(state, _on_host if on_host else _wait, steps)
    del state
    ours = sides.Ours(root, enable_continuous_checkpointing=True, local_checkpoint_period=0)
    orbax = sides.Orbax(root, keep=1)
    ours.open()
    orbax.open()
    told: Times = {"none": [], "ours": [], "orbax": []}
    for _ in range(pairs + 1):
        told["none"].append(loop.run(lambda step, state: False))
        told["ours"].append(loop.run(ours.manager.save))
        ours.wait()
        assert ours.step_folder(loop.newest_saved).is_dir()
        saves = max(told["ours"][-1]["saves"], 1)
        told["orbax"].append(loop.run(_every(max(round(steps / saves), 1), orbax)))
        orbax.wait()
        assert orbax.step_folder(loop.newest_saved).is_dir()
    ours.close()
    orbax.close()
    return told


def _every(period: int, side: sides.Side) -> Callable[[int, Any], bool]:
    def save(step: int, state: Any) -> bool:
        if step % period:
            return False
        side.save(step, state)
        return True

    return save


class _Loop:
    """A training loop that goes on from round to round."""

    def __init__(self, state: Any, step: Callable[[Any], Any], steps: int) -> None:
        self._state = state
        self._step = step
        self._steps = steps
        self._number = 0
        self.newest_saved = -1

    def run(self, save: Callable[[int, Any], bool]) -> dict[str, float]:
        """Trains for the steps of a round and offers each to `save`."""
        gc.collect()
        multihost_utils.sync_global_devices("steps")
        taken, saves = clocked(lambda: self._train(save))
        return {**taken, "saves": saves}

    def _train(self, save: Callable[[int, Any], bool]) -> int:
        saves = 0
        for _ in range(self._steps):
            self._number += 1
            self._state = self._step(self._state)
            if save(self._number, self._state):
                saves += 1
                self.newest_saved = self._number
        jax.block_until_ready(self._state)
        return saves


def _wait(state: Any) -> Any:
    """A step on an accelerator: the host has nothing to do until it is over."""
    params = state["params"]
    layer = {**params["layer_0"], "norm_1": _changed(params["layer_0"]["norm_1"])}
    time.sleep(DEVICE_STEP_SECONDS)
    jax.block_until_ready(layer)
    return {**state, "params": {**params, "layer_0": layer}}


def _on_host(state: Any) -> Any:
    """A step on the host's cores. Many at once that wait for each other's processes can hang."""
    return jax.block_until_ready(_compute(state))


@functools.partial(jax.jit, donate_argnums=0)
def _compute(state: Any) -> Any:
    """Changes all elements."""
    change = _change(state["params"]["layer_0"]["norm_1"])
    return jax.tree.map(lambda leaf: leaf + change.astype(leaf.dtype), state)


@jax.jit  # type: ignore[untyped-decorator]
def _changed(leaf: Any) -> Any:
    return leaf + _change(leaf)


def _change(leaf: Any) -> Any:
    """A number that takes all devices."""
    return jnp.sum(leaf) * 1e-9
