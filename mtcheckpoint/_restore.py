"""What to read from where: plans over plain values. Pure: no disk, clock, thread or device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

__all__ = [
    "Box",
    "Chunk",
    "Cut",
    "Fill",
    "LeafPlan",
    "box_of",
    "box_shape",
    "chunk_at",
    "chunk_key",
    "chunks_touching",
    "cut",
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """What one chunk gives to the buffers of a leaf.

    Attributes:
        chunk: its position.
        box: its elements of the leaf.
        targets: for each box that it touches: the box's position, the part of the buffer of that
            box, and the part of the chunk that goes there.
        is_straight: there is one target, which takes all of it as it lies in memory.
    """

    chunk: Chunk
    box: Box
    targets: tuple[tuple[int, tuple[slice, ...], tuple[slice, ...]], ...]
    is_straight: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How buffers for some boxes of an array are filled with its chunks.

    The same for all leaves of one shape that are stored alike and go to the same devices.

    Attributes:
        boxes: what each buffer holds.
        shapes: of the buffers.
        fills: one for each chunk that the boxes touch.
        chunks: all of these chunks.
    """

    boxes: tuple[Box, ...]
    shapes: tuple[tuple[int, ...], ...]
    fills: tuple[Fill, ...]
    chunks: frozenset[Chunk]


def box_of(index: Iterable[slice], shape: Sequence[int]) -> Box:
    """The box that an index of slices cuts out of an array of this shape."""
    return tuple([part.indices(size)[:2] for part, size in zip(index, shape, strict=True)])


def box_shape(box: Box) -> tuple[int, ...]:
    """The extent of a box."""
    return tuple([stop - start for start, stop in box])


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


def plan_leaf(needed: Set[Chunk], holders: Sequence[Set[Chunk]]) -> LeafPlan:
    """Picks a share for every chunk that is needed: the first that holds it.

    Args:
        needed: chunks of the leaf.
        holders: the chunks of each share, the preferred share first.
    """
    if holders and holders[0] >= needed:
        return LeafPlan(sources=dict.fromkeys(needed, 0), missing=())
    sources: dict[Chunk, int] = {}
    for position, held in enumerate(holders):
        for chunk in needed & held:
            sources.setdefault(chunk, position)
    return LeafPlan(sources=sources, missing=tuple(sorted(needed - sources.keys())))


def cut(boxes: Sequence[Box], shape: Sequence[int], chunk_shape: Sequence[int]) -> Cut:
    """How buffers for these boxes of an array are filled with its chunks."""
    touching: dict[Chunk, list[int]] = {}
    for position, box in enumerate(boxes):
        for chunk in chunks_touching(box, chunk_shape):
            touching.setdefault(chunk, []).append(position)
    return Cut(
        boxes=tuple(boxes),
        shapes=tuple(box_shape(box) for box in boxes),
        fills=tuple(
            _fill(chunk, _chunk_box(chunk, shape, chunk_shape), positions, boxes)
            for chunk, positions in touching.items()
        ),
        chunks=frozenset(touching),
    )


def _fill(chunk: Chunk, whole: Box, positions: Sequence[int], boxes: Sequence[Box]) -> Fill:
    parts = [_overlap(boxes[position], whole) for position in positions]
    return Fill(
        chunk=chunk,
        box=whole,
        targets=tuple(
            (position, _within(part, boxes[position]), _within(part, whole))
            for position, part in zip(positions, parts, strict=True)
        ),
        is_straight=parts == [whole] and _is_one_stretch(whole, boxes[positions[0]]),
    )


def _chunk_box(chunk: Chunk, shape: Sequence[int], chunk_shape: Sequence[int]) -> Box:
    """The elements of a chunk; the last one along a dimension may be cut by the array's end."""
    return tuple(
        (index * size, min((index + 1) * size, end))
        for index, size, end in zip(chunk, chunk_shape, shape, strict=True)
    )


def _overlap(one: Box, other: Box) -> Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Where `part` lies in a buffer that holds `whole`."""
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(part, whole, strict=True)
    )


def _is_one_stretch(part: Box, whole: Box) -> bool:
    """Whether the elements of `part` follow each other in a buffer that holds `whole`."""
    below_all = itertools.dropwhile(
        lambda ends: ends[0][1] - ends[0][0] == 1, zip(part, whole, strict=True)
    )
    return all(one == other for one, other in itertools.islice(below_all, 1, None))
