"""Reads a state out of a set of shares, wherever they lie: the one reader for all tiers.

A leaf is one TensorStore over the shares: each chunk comes from the share that the plan names. Only
what this process's devices need is read, straight into the buffers that go to the devices.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from mtcheckpoint._clock import Deadline
from mtcheckpoint._restore import Box, Chunk, LeafPlan, box_shape, chunks_touching, plan_leaf
from mtcheckpoint._shares.contents import Leaf, ShareContents, state_kvstore
from mtcheckpoint._target import Target, TargetLeaf
from mtcheckpoint.errors import ShareError, WaitTimeoutError

__all__ = ["ReadPlan", "plan_reads", "read_state", "tensorstore_context"]


def tensorstore_context() -> ts.Context:
    """A context whose requests are retried, briefly, and bounded in number."""
    retries = {"max_retries": 5, "initial_delay": "50ms", "max_delay": "2s"}
    return ts.Context(
        {
            "gcs_request_retries": retries,
            "http_request_retries": retries,
            "gcs_request_concurrency": {"limit": 32},
            "http_request_concurrency": {"limit": 32},
        }
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadPlan:
    """Where this process reads every chunk that it needs.

    Attributes:
        target: what is brought back.
        shares: in order of preference.
        boxes: the distinct parts to read of each leaf, in the target's order, and the devices that
            each part goes to.
        leaves: the sources of each leaf, in the target's order.
    """

    target: Target
    shares: tuple[ShareContents, ...]
    boxes: tuple[Mapping[Box, list[jax.Device | None]], ...]
    leaves: tuple[LeafPlan, ...]

    @property
    def missing(self) -> dict[str, tuple[Chunk, ...]]:
        """Chunks that no share holds, by leaf name."""
        named = zip(self.target.leaves, self.leaves, strict=True)
        return {leaf.leaf.name: plan.missing for leaf, plan in named if plan.missing}

    @property
    def used(self) -> frozenset[int]:
        """Positions of the shares that something is read from."""
        return frozenset(share for plan in self.leaves for share in plan.sources.values())


def plan_reads(target: Target, shares: Sequence[ShareContents]) -> ReadPlan:
    """Plans what this process reads; chunks that nobody has are in the plan's `missing`."""
    boxes = tuple(_distinct(leaf) for leaf in target.leaves)
    return ReadPlan(
        target=target,
        shares=tuple(shares),
        boxes=boxes,
        leaves=tuple(
            _plan_of(leaf, parts, shares) for leaf, parts in zip(target.leaves, boxes, strict=True)
        ),
    )


def _distinct(leaf: TargetLeaf) -> dict[Box, list[jax.Device | None]]:
    parts: dict[Box, list[jax.Device | None]] = {}
    if leaf.make != "string":
        for device, box in leaf.boxes().items():
            parts.setdefault(box, []).append(device)
    return parts


def _plan_of(leaf: TargetLeaf, parts: Any, shares: Sequence[ShareContents]) -> LeafPlan:
    holders = [share.chunks.get(leaf.leaf.name, frozenset()) for share in shares]
    return plan_leaf(parts, leaf.leaf.chunk_shape, holders)


def read_state(
    plan: ReadPlan, *, context: ts.Context, concurrent_bytes: int, deadline: Deadline
) -> Any:
    """Reads what was planned, checks it against the seals, and puts it on the devices.

    A chunk of a sealed share is read whole and checked in host memory; where only a part of it is
    wanted, the rest is read for the checksum and thrown away.

    Args:
        plan: a plan that misses nothing.
        context: TensorStore's pools and limits.
        concurrent_bytes: bytes on the way at once; a single larger part still goes alone.
        deadline: for all of it.

    Raises:
        ShareError: a chunk could not be read, is missing after all, or is not what was saved;
            names the copy.
        WaitTimeoutError: the deadline passed; names the leaf that was waited for.
    """
    stores = _open_stores(plan, context, deadline)
    window = _Window(concurrent_bytes, deadline)
    values: list[Any] = []

    def place(leaf: TargetLeaf, boxes: Any, parts: Any) -> None:
        values.append(_value(plan, leaf, boxes, parts))

    for index, (leaf, boxes) in enumerate(zip(plan.target.leaves, plan.boxes, strict=True)):
        parts = {box: np.empty(box_shape(box), dtype=leaf.dtype) for box in boxes}
        for read in _reads_of(plan, index, parts):
            window.add(read, read.start(stores[index]))
        # At once, so that buffers and devices never hold the whole state at the same time.
        window.then(functools.partial(place, leaf, boxes, parts))
    window.finish()
    return plan.target.build(values)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """One chunk, or a part of one, on its way into a buffer.

    Attributes:
        name: of the leaf.
        chunk: the chunk.
        box: what is read, in elements of the leaf.
        buffer: where it is read to.
        share: where it is read from. If it is sealed, the whole chunk is read.
        copies: where parts of the buffer go afterwards.
    """

    name: str
    chunk: Chunk
    box: Box
    buffer: np.ndarray[Any, Any]
    share: ShareContents
    copies: tuple[tuple[np.ndarray[Any, Any], tuple[slice, ...]], ...] = ()

    def start(self, store: Any) -> Any:
        part = store[tuple(slice(start, stop) for start, stop in self.box)] if self.box else store
        if self.box:
            part = part.translate_to[(0,) * len(self.box)]
        return ts.array(self.buffer).write(part)

    def finish(self) -> None:
        """Checks what has come, before anything else sees it."""
        if self.share.seal is not None:
            fault = self.share.seal.fault_of_chunk(self.name, self.chunk, self.buffer)
            if fault is not None:
                raise ShareError(f"{self.share.place.name}: {fault}", place=self.share.place.name)
        for target, part in self.copies:
            target[...] = _view(self.buffer, part)


def _reads_of(
    plan: ReadPlan, index: int, parts: Mapping[Box, np.ndarray[Any, Any]]
) -> Iterator[_Read]:
    """The reads that fill the buffers of one leaf."""
    leaf, sources = plan.target.leaves[index].leaf, plan.leaves[index].sources
    wanted: dict[Chunk, list[tuple[Box, np.ndarray[Any, Any]]]] = {}
    for box, buffer in parts.items():
        for chunk in chunks_touching(box, leaf.chunk_shape):
            part = _overlap(box, _chunk_box(leaf, chunk))
            wanted.setdefault(chunk, []).append((part, _view(buffer, _within(part, box))))
    for chunk, targets in wanted.items():
        share = plan.shares[sources[chunk]]
        reads = _sealed_read if share.seal is not None else _unsealed_reads
        yield from reads(leaf, chunk, share, targets)


def _unsealed_reads(
    leaf: Leaf,
    chunk: Chunk,
    share: ShareContents,
    targets: Sequence[tuple[Box, np.ndarray[Any, Any]]],
) -> Iterator[_Read]:
    for part, view in targets:
        yield _Read(name=leaf.name, chunk=chunk, share=share, box=part, buffer=view)


def _sealed_read(
    leaf: Leaf,
    chunk: Chunk,
    share: ShareContents,
    targets: Sequence[tuple[Box, np.ndarray[Any, Any]]],
) -> Iterator[_Read]:
    whole = _chunk_box(leaf, chunk)
    part, view = targets[0]
    if len(targets) == 1 and part == whole and view.flags.c_contiguous:
        yield _Read(name=leaf.name, chunk=chunk, share=share, box=whole, buffer=view)
        return
    yield _Read(
        name=leaf.name,
        chunk=chunk,
        share=share,
        box=whole,
        buffer=np.empty(box_shape(whole), dtype=view.dtype),
        copies=tuple((view, _within(part, whole)) for part, view in targets),
    )


def _view(buffer: np.ndarray[Any, Any], part: tuple[slice, ...]) -> Any:
    """A part of a buffer, without copying; also of one without dimensions."""
    index: Any = (*part, ...)
    return buffer[index]


def _chunk_box(leaf: Leaf, chunk: Chunk) -> Box:
    """The elements of a chunk; the last one along a dimension may be cut by the array's end."""
    return tuple(
        (index * size, min((index + 1) * size, end))
        for index, size, end in zip(chunk, leaf.chunk_shape, leaf.shape, strict=True)
    )


def _overlap(one: Box, other: Box) -> Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Where `part` lies in a buffer that holds `whole`."""
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(part, whole, strict=True)
    )


def _open_stores(plan: ReadPlan, context: ts.Context, deadline: Deadline) -> list[Any]:
    """One TensorStore for each leaf that has something to read; all are opened at once."""
    opening = [
        ts.open(_spec(leaf, sources, plan.shares), context=context, read=True, open=True)
        if sources.sources
        else None
        for leaf, sources in zip(plan.target.leaves, plan.leaves, strict=True)
    ]
    return [
        future and _result(future, leaf.leaf.name, deadline)
        for leaf, future in zip(plan.target.leaves, opening, strict=True)
    ]


def _spec(leaf: TargetLeaf, plan: LeafPlan, shares: Sequence[ShareContents]) -> dict[str, Any]:
    """The leaf's array: the share that gives most chunks below, other chunks laid over it."""
    count = collections.Counter(plan.sources.values())
    base = count.most_common(1)[0][0]
    folder = f"{leaf.leaf.name}/"
    layers: list[dict[str, Any]] = [{"base": state_kvstore(shares[base].place, folder)}]
    for chunk, share in plan.sources.items():
        if share != base:
            key = "/".join(["c", *map(str, chunk)])
            layers.append({"base": state_kvstore(shares[share].place, folder + key), "exact": key})
    kvstore = layers[0]["base"] if len(layers) == 1 else {"driver": "kvstack", "layers": layers}
    # Without the last line a chunk that is not there reads as zeros.
    return {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}


class _Window:
    """Reads on the way, in order, no more than so many bytes at once."""

    def __init__(self, limit_bytes: int, deadline: Deadline) -> None:
        self._limit_bytes = limit_bytes
        self._deadline = deadline
        # Between the reads, what is done when those before are in.
        self._queue: collections.deque[tuple[_Read, Any] | Callable[[], None]] = collections.deque()
        self._bytes = 0

    def add(self, read: _Read, future: Any) -> None:
        self._queue.append((read, future))
        self._bytes += read.buffer.nbytes
        while self._bytes > max(self._limit_bytes, read.buffer.nbytes):
            self._take()

    def then(self, action: Callable[[], None]) -> None:
        """Calls `action` when all reads that were added before are in."""
        self._queue.append(action)

    def finish(self) -> None:
        while self._queue:
            self._take()

    def _take(self) -> None:
        first = self._queue.popleft()
        if not isinstance(first, tuple):
            first()
            return
        read, future = first
        _result(future, read.name, self._deadline)
        read.finish()
        self._bytes -= read.buffer.nbytes


def _result(future: Any, name: str, deadline: Deadline) -> Any:
    try:
        return future.result(timeout=max(deadline.remaining(), 0.001))
    except TimeoutError as error:
        raise WaitTimeoutError(
            f"the data of leaf {name!r}", seconds=deadline.seconds, missing=[name]
        ) from error
    except ValueError as error:
        raise ShareError(f"leaf {name!r} cannot be read: {error}", place=name) from error


def _value(
    plan: ReadPlan,
    leaf: TargetLeaf,
    boxes: Mapping[Box, list[jax.Device | None]],
    parts: Mapping[Box, np.ndarray[Any, Any]],
) -> Any:
    if leaf.make == "string":
        return plan.shares[0].strings[leaf.leaf.name]
    if leaf.make in ("array", "key"):
        return _on_devices(leaf, boxes, parts)
    (whole,) = parts.values()
    if leaf.cast_to is not None:
        whole = whole.astype(leaf.cast_to)
    if leaf.make == "numpy":
        return whole
    return whole[()] if leaf.make == "numpy_scalar" else whole.item()


def _on_devices(leaf: TargetLeaf, boxes: Any, parts: Any) -> jax.Array:
    assert leaf.sharding is not None
    if leaf.cast_to is not None:
        parts = {box: part.astype(leaf.cast_to) for box, part in parts.items()}
    pieces = [
        jax.device_put(parts[box], device) for box, devices in boxes.items() for device in devices
    ]
    array: jax.Array = jax.make_array_from_single_device_arrays(
        leaf.leaf.shape, leaf.sharding, pieces, dtype=leaf.cast_to or leaf.dtype
    )
    if leaf.make == "key":
        array = jax.random.wrap_key_data(array, impl=leaf.key_implementation)
    return array
