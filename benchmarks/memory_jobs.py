"""What the processes of the memory benchmarks run."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from benchmarks import sides, states
from benchmarks.results import memory_bytes

__all__ = ["prepare", "restore", "save"]

_WARM_BYTES = 4 << 20
_SIDES: dict[str, Callable[[str], sides.Side]] = {"ours": sides.Ours, "orbax": sides.Orbax}


def save(root: str, size_bytes: int, side: str, rounds: int) -> dict[str, Any]:
    """Saves a state again and again, as training does, which goes on in the memory of the state.

    Returns:
        ``state_bytes``: this process's part of the state, and ``beyond``: for each save the peak
        of resident memory beyond that and what was resident before there was a state.
    """
    tree = states.abstract(size_bytes)
    saver = _SIDES[side](root)
    saver.open()
    _begin_save(saver, 0, _step(states.filled(states.abstract(_WARM_BYTES))))
    saver.wait()
    before = _resident() + states.own_bytes(tree)
    state = states.filled(tree)
    beyond = []
    for step in range(1, rounds + 1):
        _reset_peak()
        _begin_save(saver, step, state)
        state = _step(state)
        saver.wait()
        beyond.append(memory_bytes("VmHWM") - before)
        state = _step(state)  # the state as it was
        if step == rounds:
            sides.assert_saved(saver, state, tree)
        _together()
        sides.delete(saver, step)
    saver.close()
    return {"state_bytes": states.own_bytes(tree), "beyond": beyond}


def restore(root: str, size_bytes: int, side: str, rounds: int) -> dict[str, Any]:
    """Restores a state again and again; each time the one before is gone: see `save`."""
    tree = states.abstract(size_bytes)
    restorer = _SIDES[side](root)
    restorer.open()
    before = _resident() + states.own_bytes(tree)
    beyond = []
    for number in range(rounds):
        _together()
        _reset_peak()
        state = restorer.restore(tree)
        beyond.append(memory_bytes("VmHWM") - before)
        if number == rounds - 1:
            states.check(state)
        del state
    restorer.close()
    return {"state_bytes": states.own_bytes(tree), "beyond": beyond}


def prepare(root: str, size_bytes: int, side: str) -> None:
    """Saves what `restore` restores, in processes of its own, since a save leaves memory behind."""
    saver = _SIDES[side](root)
    saver.open()
    _begin_save(saver, 1, states.filled(states.abstract(size_bytes)))
    saver.wait()
    saver.close()


def _begin_save(side: sides.Side, step: int, state: Any) -> None:
    _together()
    side.save(step, state)


@functools.partial(jax.jit, donate_argnums=0)
def _step(state: Any) -> Any:
    """Each element changes its sign, in the memory where it lies, unless that is being saved."""
    return jax.tree.map(lambda leaf: -leaf, state)


def _resident() -> int:
    _give_back()
    return memory_bytes("VmRSS")


def _reset_peak() -> None:
    _give_back()
    Path("/proc/self/clear_refs").write_text("5")


def _give_back() -> None:
    """Gives the system what is free: the allocator keeps it, here up to the size of the state."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _together() -> None:
    multihost_utils.sync_global_devices("memory")
