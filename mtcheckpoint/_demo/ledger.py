"""What was saved, element for element: digests that are kept apart from the checkpoints.

A process writes down what it hands to `save`, box by box as its devices hold it. When a state comes
back, on whatever mesh, it is put together, cut as it was saved, and compared with that.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["Ledger", "box_digests", "differences"]

# By leaf and box.
_Digests = Mapping[str, Mapping[str, str]]


def box_digests(state: Any) -> _Digests:
    """A digest of every part of `state` on this process's devices, by leaf and box."""
    return {
        name: {_box(shard.index, leaf.shape): _digest(shard.data) for shard in _shards(leaf)}
        for name, leaf in _leaves(state)
    }


def differences(saved: _Digests, state: Any, mesh: Mesh) -> list[str]:
    """Where `state` is not what was saved. Call on every process of the mesh at the same time.

    Args:
        saved: the digests of all processes that saved it.
        state: what came back, laid out in any way over `mesh`.
        mesh: of this run.

    Returns:
        The boxes that differ, and the devices of this process that hold something else.
    """
    found = dict(_leaves(state))
    whole = dict(_leaves(_gathered(state, mesh)))
    wrong = [f"{name}: only in one of the two" for name in sorted(saved.keys() ^ found.keys())]
    for name in sorted(saved.keys() & found.keys()):
        values = np.asarray(whole[name].addressable_data(0))
        wrong += [f"{name} {box}" for box in _wrong_boxes(saved[name], values)]
        wrong += [f"{name} on {device}" for device in _wrong_devices(found[name], values)]
    return wrong


def _wrong_boxes(saved: Mapping[str, str], values: np.ndarray) -> Iterator[str]:
    covered = np.zeros(values.shape, bool)
    for box, digest in saved.items():
        index = tuple(slice(start, stop) for start, stop in json.loads(box))
        covered[index] = True
        if _digest(values[index]) != digest:
            yield box
    if not covered.all():
        yield "has elements that no process wrote down"


def _wrong_devices(leaf: jax.Array, values: np.ndarray) -> Iterator[str]:
    # One copy of a replicated part went into the whole; the others may differ from it.
    for shard in _shards(leaf):
        if _digest(shard.data) != _digest(values[shard.index]):
            yield str(shard.device)


def _gathered(state: Any, mesh: Mesh) -> Any:
    """All of `state` on every device."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda tree: tree, out_shardings=everywhere)(state)


def _leaves(state: Any) -> Iterator[tuple[str, jax.Array]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        yield jax.tree_util.keystr(path), leaf


def _shards(leaf: jax.Array) -> list[Any]:
    return list(leaf.addressable_shards)


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return json.dumps(bounds)


def _digest(data: Any) -> str:
    values = np.asarray(data)
    described = f"{values.dtype} {values.shape} ".encode()
    return hashlib.blake2b(described + values.tobytes(), digest_size=16).hexdigest()


class Ledger:
    """The digests of all processes, in a folder that outlives them.

    Args:
        folder: the same for all runs of the job.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, run: int, step: int, process: int, state: Any) -> None:
        """Notes what `process` of `run` is about to save as `step`."""
        target = self._folder / f"run{run}-step{step}-process{process}.json"
        unfinished = target.with_suffix(".tmp")
        unfinished.write_text(json.dumps(box_digests(state)))
        os.rename(unfinished, target)

    def read(self, run: int, step: int) -> _Digests:
        """What all processes of `run` saved as `step`."""
        saved: dict[str, dict[str, str]] = {}
        for page in sorted(self._folder.glob(f"run{run}-step{step}-process*.json")):
            for name, boxes in json.loads(page.read_text()).items():
                saved.setdefault(name, {}).update(boxes)
        return saved
