"""What the processes of the memory benchmarks run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.experimental import multihost_utils

from benchmarks import sides, states
from benchmarks.results import memory_bytes

__all__ = ["prepare", "restore", "save"]

_WARM_BYTES = 4 << 20
_SIDES: dict[str, Callable[[str], sides.Side]] = {"ours": sides.Ours, "orbax": sides.Orbax}


def save(root: str, size_bytes: int, side: str, rounds: int) -> dict[str, Any]:
    """Saves a state again and again, as training does.

    Returns:
        ``state_bytes``: this process's part of the state, and ``beyond``: for each save the peak
        of resident memory beyond that and what was resident before there was a state.
    """
    tree = states.abstract(size_bytes)
    saver = _SIDES[side](root)
    saver.open()
    _save(saver, 0, states.filled(states.abstract(_WARM_BYTES)))
    before = _resident() + states.own_bytes(tree)
    state = states.filled(tree)
    beyond = []
    for step in range(1, rounds + 1):
        _reset_peak()
        _save(saver, step, state)
        beyond.append(memory_bytes("VmHWM") - before)
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
    _save(saver, 1, states.filled(states.abstract(size_bytes)))
    saver.close()


def _save(side: sides.Side, step: int, state: Any) -> None:
    _together()
    side.save(step, state)
    side.wait()


def _resident() -> int:
    gc.collect()
    return memory_bytes("VmRSS")


def _reset_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def _together() -> None:
    multihost_utils.sync_global_devices("memory")
