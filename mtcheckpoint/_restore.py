"""What to read from where: plans over plain values. Pure: no disk, clock, thread or device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

__all__ = [
    "Box",
    "Chunk",
    "LeafPlan",
    "box_of",
    "box_shape",
    "chunk_at",
    "chunk_key",
    "chunks_touching",
    "plan_leaf",
]

Chunk = tuple[int, ...]
Box = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeafPlan:
    """Where the chunks of one leaf come from.

    Attributes:
        sources: position of the share that each chunk is read from, by chunk.
        missing: chunks that no share holds.
    """

    sources: Mapping[Chunk, int]
    missing: tuple[Chunk, ...]


def box_of(index: Iterable[slice], shape: Sequence[int]) -> Box:
    """The box that an index of slices cuts out of an array of this shape."""
    return tuple(
        (part.indices(size)[0], part.indices(size)[1])
        for part, size in zip(index, shape, strict=True)
    )


def box_shape(box: Box) -> tuple[int, ...]:
    """The extent of a box."""
    return tuple(stop - start for start, stop in box)


def chunks_touching(box: Box, chunk_shape: Sequence[int]) -> Iterator[Chunk]:
    """Positions of the chunks that a box needs; none for an empty box."""
    ranges = [
        range(start // size, -(-stop // size)) if stop > start and size else range(0)
        for (start, stop), size in zip(box, chunk_shape, strict=True)
    ]
    return itertools.product(*ranges)


def chunk_key(chunk: Chunk) -> str:
    """The key of a chunk in its array, as zarr spells it."""
    return "/".join(["c", *map(str, chunk)])


@functools.lru_cache(maxsize=1 << 14)
def chunk_at(key: str) -> Chunk:
    """The chunk of a key as zarr spells it, without the letter it begins with: ``/0/3``.

    Many leaves have chunks at the same position: they share it.

    Raises:
        ValueError: it is no position.
    """
    chunk = tuple([int(part) for part in key.split("/") if part])
    if min(chunk, default=0) < 0:
        raise ValueError(f"no chunk can be at {key[:200]!r}")
    return chunk


def plan_leaf(
    boxes: Iterable[Box], chunk_shape: Sequence[int], holders: Sequence[Set[Chunk]]
) -> LeafPlan:
    """Picks a share for every chunk that the boxes touch: the first that holds it.

    Args:
        boxes: what is needed, in elements.
        chunk_shape: elements of a chunk along each dimension.
        holders: the chunks of each share, the preferred share first.
    """
    needed = {chunk for box in boxes for chunk in chunks_touching(box, chunk_shape)}
    sources: dict[Chunk, int] = {}
    for position, held in enumerate(holders):
        for chunk in needed & held:
            sources.setdefault(chunk, position)
    return LeafPlan(sources=sources, missing=tuple(sorted(needed - sources.keys())))
