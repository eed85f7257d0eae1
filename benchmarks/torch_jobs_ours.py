"""What the processes of our side run, beside those with PyTorch."""

from __future__ import annotations

import gc

from jax.experimental import multihost_utils

from benchmarks import sides, states
from benchmarks.timing import clocked, warm_bytes, warm_memory
from benchmarks.turns import Turns
from mtcheckpoint.testing import this_process

__all__ = ["save_and_load"]


def save_and_load(root: str, size_bytes: int, pairs: int) -> dict[str, list[dict[str, float]]]:
    """Saves and loads one state in turns with the other side.

    Args:
        root: where the nodes' folders are, and the marks of the turns.
        size_bytes: of the whole state.
        pairs: measured rounds; one more goes before, unmeasured.

    Returns:
        Seconds and CPU seconds of each round, of ``ours save`` and ``ours load``.
    """
    place = this_process()
    assert place is not None
    turns = Turns(root, group=0, rank=place.rank, processes=[place.processes] * 2)
    tree = states.abstract(size_bytes)
    state = states.filled(tree)
    saver, loader = sides.Ours(root), sides.Ours(root)
    saver.open()
    told: dict[str, list[dict[str, float]]] = {"ours save": [], "ours load": []}
    for step in range(1, pairs + 2):
        with turns.turn():
            told["ours save"].append(_saved(saver, step, state, size_bytes))
            told["ours load"].append(_loaded(loader, tree, size_bytes))
            if step == 1:
                sides.assert_saved(saver, state, tree)
            multihost_utils.sync_global_devices("compared")
            sides.delete(saver, step)
    saver.close()
    return told


def _saved(side: sides.Ours, step: int, state: object, size_bytes: int) -> dict[str, float]:
    def save() -> None:
        side.save(step, state)
        side.wait()

    _together(size_bytes)
    taken, _ = clocked(save)
    return taken


def _loaded(side: sides.Ours, tree: object, size_bytes: int) -> dict[str, float]:
    side.open()
    _together(size_bytes)
    taken, _ = clocked(lambda: side.restore(tree))
    side.close()
    return taken


def _together(size_bytes: int) -> None:
    gc.collect()
    warm_memory(warm_bytes(size_bytes))
    multihost_utils.sync_global_devices("turn")
