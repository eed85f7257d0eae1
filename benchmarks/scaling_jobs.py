"""What the processes of the scaling benchmarks run: our side only."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from jax.experimental import multihost_utils

from benchmarks import sides, states
from benchmarks.timing import clocked
from benchmarks.turns import Turns
from mtcheckpoint.testing import this_process

__all__ = ["ACTIONS", "one_size", "two_sizes"]

ACTIONS = ("save", "restore")

Times = dict[str, list[dict[str, float]]]


def two_sizes(root: str, sizes: Sequence[Sequence[int]], pairs: int) -> Times:
    """Saves and restores a small and a large state in turns.

    Args:
        root: where the nodes' folders are.
        sizes: of either the bytes of the whole state, and its leaves; 0 for those of a transformer.
        pairs: measured rounds; one more goes before, unmeasured.

    Returns:
        For ``small save``, ``small restore``, ``large save`` and ``large restore`` the rounds.
    """
    cycles = [
        _Cycle(f"{root}/{name}", name, _tree(*size))
        for name, size in zip(("small", "large"), sizes, strict=True)
    ]
    for step in range(1, pairs + 2):
        for cycle in cycles:
            cycle.run(step)
    return _closed(*cycles)


def one_size(
    root: str, name: str, size_bytes: int, pairs: int, group: int, processes: Sequence[int]
) -> Times:
    """As `two_sizes` for one of them, in turns with the other group of processes."""
    place = this_process()
    assert place is not None
    turns = Turns(root, group=group, rank=place.rank, processes=processes)
    cycle = _Cycle(f"{root}/{name}", name, _tree(size_bytes, 0))
    for step in range(1, pairs + 2):
        with turns.turn():
            cycle.run(step)
    return _closed(cycle)


def _tree(size_bytes: int, leaves: int) -> Any:
    return states.flat(size_bytes, leaves) if leaves else states.abstract(size_bytes)


class _Cycle:
    """A save and a restore of one state, again and again."""

    def __init__(self, root: str, name: str, tree: Any) -> None:
        self._name = name
        self._tree = tree
        self._state = states.filled(tree)
        self._saver, self._restorer = sides.Ours(root), sides.Ours(root)
        self._saver.open()
        self.times: Times = {f"{name} {action}": [] for action in ACTIONS}

    def run(self, step: int) -> None:
        self._note("save", lambda: self._save(step))
        self._restorer.open()
        restored = self._note("restore", lambda: self._restorer.restore(self._tree))
        self._restorer.close()
        if step == 1:
            states.assert_equal(restored, self._state)
        _together()
        sides.delete(self._saver, step)

    def close(self) -> None:
        self._saver.close()

    def _save(self, step: int) -> None:
        self._saver.save(step, self._state)
        self._saver.wait()

    def _note(self, action: str, attempt: Any) -> Any:
        _together()
        taken, result = clocked(attempt)
        self.times[f"{self._name} {action}"].append(taken)
        return result


def _closed(*cycles: _Cycle) -> Times:
    for cycle in cycles:
        cycle.close()
    return {name: times for cycle in cycles for name, times in cycle.times.items()}


def _together() -> None:
    gc.collect()
    multihost_utils.sync_global_devices("scaling")
