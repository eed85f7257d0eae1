"""Which ranks of a save hold which chunks, from the saved shardings alone. Pure.

Every share tells the whole layout, so nobody has to look into thousands of shares to find the few
that hold what is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

__all__ = ["Layout", "ranks_to_open"]

Chunk = tuple[int, ...]

# What a description raises that is none. Then only a look into the shares tells.
_NONSENSE = (LookupError, TypeError, ValueError, AttributeError, RecursionError)


class Layout:
    """Where the chunks of one save were written."""

    def __init__(self, process_devices: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
        """
        Args:
            process_devices: device ids of each process of the save, in rank order; empty when the
                save does not say.
            ranks: the ranks of the save.
        """
        self._rank_of_device = {
            device: rank for rank, devices in enumerate(process_devices) for device in devices
        }
        self._everyone = frozenset(ranks)
        # By identity: leaves with the same sharding share one description of it.
        self._meshes: dict[int, tuple[Any, _MeshRanks | None]] = {}
        self._ranks: dict[tuple[int, Chunk], frozenset[int]] = {}

    def ranks_of(self, sharding: Mapping[str, Any] | None, chunk: Chunk) -> frozenset[int]:
        """The ranks whose shares hold a chunk of a leaf.

        All ranks for a leaf without a mesh: a number, a host's array, or a sharding of a kind that
        the save does not describe. Then only a look into the shares tells.
        """
        key = (id(sharding), chunk)
        if key not in self._ranks:
            mesh = self._mesh(sharding)
            self._ranks[key] = self._everyone if mesh is None else self._on(mesh, chunk)
        return self._ranks[key]

    def _on(self, mesh: _MeshRanks, chunk: Chunk) -> frozenset[int]:
        try:
            return mesh.ranks_of(chunk)
        except _NONSENSE:
            return self._everyone

    def _mesh(self, sharding: Mapping[str, Any] | None) -> _MeshRanks | None:
        if id(sharding) not in self._meshes:
            try:
                mesh = self._read(sharding)
            except _NONSENSE:
                mesh = None
            self._meshes[id(sharding)] = (sharding, mesh)
        return self._meshes[id(sharding)][1]

    def _read(self, sharding: Mapping[str, Any] | None) -> _MeshRanks | None:
        if not sharding or sharding.get("sharding_type") != "NamedSharding":
            return None
        devices = sharding.get("device_mesh")
        if not devices or not self._rank_of_device:
            return None
        ranks = [self._rank_of_device.get(device, -1) for device in _flat(devices["mesh"])]
        return _MeshRanks(
            names=tuple(sharding["axis_names"]),
            spec=tuple(_axes(part) for part in sharding["partition_spec"]),
            ranks=np.array(ranks).reshape(sharding["shape"]),
        )


def ranks_to_open(
    missing: Iterable[tuple[Mapping[str, Any] | None, Iterable[Chunk]]],
    layout: Layout,
    *,
    closed: Set[int],
    turn: int,
) -> set[int]:
    """A few ranks whose shares should hold, together, all that is missing.

    Args:
        missing: the chunks that are missing of each leaf, with the leaf's sharding.
        layout: of the save.
        closed: ranks whose shares can be opened and were not yet.
        turn: where to begin among equal ones.
    """
    chosen: set[int] = set()
    for sharding, chunks in missing:
        for chunk in chunks:
            ranks = layout.ranks_of(sharding, chunk)
            if chosen.isdisjoint(ranks) and not closed.isdisjoint(ranks):
                holders = sorted(ranks & closed)
                chosen.add(holders[turn % len(holders)])
    return chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MeshRanks:
    """A mesh of ranks, and how one kind of leaf lies on it."""

    names: tuple[str, ...]
    spec: tuple[tuple[str, ...], ...]
    ranks: np.ndarray[Any, Any]

    def ranks_of(self, chunk: Chunk) -> frozenset[int]:
        position: list[Any] = [slice(None)] * self.ranks.ndim
        for axes, index in zip(self.spec, chunk, strict=False):
            if axes:
                dimensions = [self.names.index(axis) for axis in axes]
                places = np.unravel_index(index, [self.ranks.shape[d] for d in dimensions])
                for dimension, place in zip(dimensions, places, strict=True):
                    position[dimension] = place
        return frozenset(np.unique(self.ranks[tuple(position)]).tolist())


def _axes(part: Any) -> tuple[str, ...]:
    if part is None:
        return ()
    return (part,) if isinstance(part, str) else tuple(part)


def _flat(mesh: Any) -> list[int]:
    """Device ids of nested lists of ``{"id": n}``, or of plain numbers."""
    if isinstance(mesh, int):
        return [mesh]
    if isinstance(mesh, Mapping):
        return [int(mesh["id"])]
    return [device for part in mesh for device in _flat(part)]
