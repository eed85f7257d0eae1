"""Reads a state out of a set of shares, wherever they lie: the one reader for all tiers.

Each chunk comes from the share that the plan names. Only what this process's devices need is read,
straight into the buffers that go to the devices.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from mtcheckpoint._chunk_reads import (
    ChunkRead,
    DecodedRead,
    ReadPool,
    ReadTask,
    StateFiles,
    runs_of,
)
from mtcheckpoint._clock import Deadline
from mtcheckpoint._restore import (
    Box,
    Chunk,
    Cut,
    LeafPlan,
    box_of,
    chunk_key,
    cut,
    plan_leaf,
)
from mtcheckpoint._shares.contents import ShareContents, state_kvstore
from mtcheckpoint._target import Target, TargetLeaf
from mtcheckpoint.errors import ShareError, WaitTimeoutError

__all__ = ["ReadPlan", "plan_reads", "read_state", "tensorstore_context"]

_NEAR_THREADS = 8  # at most
_FAR_THREADS = 8, 32  # at least, at most
_ALIGNMENT = 64  # bytes; what XLA asks for
_BLOCK_BYTES = 64 << 20


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
        cuts: the distinct parts to read of each leaf, in the target's order.
        leaves: the sources of each leaf, in the target's order.
    """

    target: Target
    shares: tuple[ShareContents, ...]
    cuts: tuple[Cut, ...]
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
    cuts = _cuts(target.leaves)
    return ReadPlan(
        target=target,
        shares=tuple(shares),
        cuts=cuts,
        leaves=tuple(
            plan_leaf(needed.chunks, _holders(leaf, shares))
            for leaf, needed in zip(target.leaves, cuts, strict=True)
        ),
    )


def _cuts(leaves: Iterable[TargetLeaf]) -> tuple[Cut, ...]:
    """How each leaf is cut; leaves that lie alike are cut once."""
    found: dict[Any, Cut] = {}
    cuts = []
    for one in leaves:
        leaf = one.leaf
        kind = (one.make == "string", one.sharding, leaf.shape, leaf.chunk_shape)
        if kind not in found:
            found[kind] = cut(one.boxes(), leaf.shape, leaf.chunk_shape)
        cuts.append(found[kind])
    return tuple(cuts)


def _holders(leaf: TargetLeaf, shares: Sequence[ShareContents]) -> list[Set[Chunk]]:
    nothing: Mapping[Chunk, Any] = {}
    return [share.chunks.get(leaf.leaf.name, nothing).keys() for share in shares]


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
        TierUnreadableError: a place could not be read.
        WaitTimeoutError: the deadline passed; names the leaf that was waited for.
    """
    reading = _Reading(plan)
    tasks = reading.tasks(context, deadline)
    with ReadPool(_threads(plan), concurrent_bytes) as pool:
        for task in pool.done(tasks):
            reading.note(task.reads)
    return plan.target.build(reading.values)


class _Reading:
    """The buffers of all leaves; each leaf goes to the devices as soon as it is complete.

    So buffers and devices never hold the whole state at the same time.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        self._memory = _Memory()
        self._buffers: list[tuple[np.ndarray[Any, Any], ...]] = [()] * len(plan.cuts)
        self._left = [len(cut.fills) for cut in plan.cuts]
        self.values: list[Any] = [None] * len(plan.cuts)

    def tasks(self, context: ts.Context, deadline: Deadline) -> Iterator[ReadTask]:
        """What is to be read, in the order of the leaves; those that are decoded come last."""
        for index, left in enumerate(self._left):
            if not left:
                self._buffers[index] = self._take(index)
                self._place(index)
        files = StateFiles(self._plan.shares, context=context, deadline=deadline)
        others = [index for index in range(len(self._left)) if not self._is_plain(index)]
        stores = _open_stores(self._plan, others, context, deadline)
        plain = (index for index in range(len(self._left)) if index not in stores)
        yield from runs_of((read for index in plain for read in self._reads_of(index)), files)
        for index, store in stores.items():
            for read in self._reads_of(index):
                yield DecodedRead(read, store, deadline)

    def note(self, reads: Iterable[ChunkRead]) -> None:
        """Notes that these are in."""
        for read in reads:
            self._left[read.owner] -= 1
            if not self._left[read.owner]:
                self._place(read.owner)

    def _place(self, index: int) -> None:
        buffers, self._buffers[index] = self._buffers[index], ()
        parts = dict(zip(self._plan.cuts[index].boxes, buffers, strict=True))
        self.values[index] = _value(self._plan, self._plan.target.leaves[index], parts)

    def _is_plain(self, index: int) -> bool:
        """Whether all that is read of a leaf is stored as it lies in memory."""
        name, shares = self._plan.target.leaves[index].leaf.name, self._plan.shares
        used = set(self._plan.leaves[index].sources.values())
        return all(shares[position].leaves[name].is_plain for position in used)

    def _take(self, index: int) -> tuple[np.ndarray[Any, Any], ...]:
        dtype = self._plan.target.leaves[index].dtype
        shapes = self._plan.cuts[index].shapes
        return tuple([self._memory.take(shape, dtype) for shape in shapes])

    def _reads_of(self, index: int) -> Iterator[ChunkRead]:
        """The reads that fill the buffers of one leaf."""
        leaf, sources = self._plan.target.leaves[index], self._plan.leaves[index].sources
        buffers = self._buffers[index] = self._take(index)
        for fill in self._plan.cuts[index].fills:
            views = [(_view(buffers[box], part), within) for box, part, within in fill.targets]
            yield ChunkRead(
                owner=index,
                name=leaf.leaf.name,
                chunk=fill.chunk,
                box=fill.box,
                share=self._plan.shares[sources[fill.chunk]],
                dtype=np.dtype(leaf.dtype),
                whole=views[0][0] if fill.is_straight else None,
                copies=() if fill.is_straight else tuple(views),
            )


def _threads(plan: ReadPlan) -> int:
    """What is near needs cores, what is far away needs patience."""
    far = any(plan.shares[share].place.tier != "local" for share in plan.used)
    cores = len(os.sched_getaffinity(0))
    least, most = _FAR_THREADS
    return min(max(cores, least), most) if far else min(cores, _NEAR_THREADS)


class _Memory:
    """Buffers that CPU devices take as they are: others are copied.

    Small ones share blocks that are large enough for huge pages, which are filled in half the time.
    """

    def __init__(self) -> None:
        self._block, self._used = np.empty(0, np.uint8), 0

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """An array whose memory is not there before something is written to it."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size > _BLOCK_BYTES // 4:
            return np.ndarray(shape, dtype, _aligned(size))
        if self._used + size > self._block.nbytes:
            self._block, self._used = _aligned(_BLOCK_BYTES), 0
        start, self._used = self._used, self._used + -(-size // _ALIGNMENT) * _ALIGNMENT
        return np.ndarray(shape, dtype, self._block, start)


def _aligned(size: int) -> np.ndarray[Any, Any]:
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]


def _view(buffer: np.ndarray[Any, Any], part: tuple[slice, ...]) -> Any:
    """A part of a buffer, without copying; also of one without dimensions."""
    index: Any = (*part, ...)
    return buffer[index]


def _open_stores(
    plan: ReadPlan, leaves: Iterable[int], context: ts.Context, deadline: Deadline
) -> dict[int, Any]:
    """One TensorStore for each of these leaves; all are opened at once."""
    targets = plan.target.leaves
    opening = {
        index: ts.open(
            _spec(targets[index], plan.leaves[index], plan.shares),
            context=context,
            read=True,
            open=True,
        )
        for index in sorted(leaves)
    }
    return {
        index: _result(future, targets[index].leaf.name, deadline)
        for index, future in opening.items()
    }


def _spec(leaf: TargetLeaf, plan: LeafPlan, shares: Sequence[ShareContents]) -> dict[str, Any]:
    """The leaf's array: the share that gives most chunks below, other chunks laid over it."""
    count = collections.Counter(plan.sources.values())
    base = count.most_common(1)[0][0]
    folder = f"{leaf.leaf.name}/"
    layers: list[dict[str, Any]] = [{"base": state_kvstore(shares[base].place, folder)}]
    for chunk, share in plan.sources.items():
        if share != base:
            key = chunk_key(chunk)
            layers.append({"base": state_kvstore(shares[share].place, folder + key), "exact": key})
    kvstore = layers[0]["base"] if len(layers) == 1 else {"driver": "kvstack", "layers": layers}
    # Without the last line a chunk that is not there reads as zeros.
    return {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}


def _result(future: Any, name: str, deadline: Deadline) -> Any:
    try:
        return future.result(timeout=max(deadline.remaining(), 0.001))
    except TimeoutError as error:
        raise WaitTimeoutError(
            f"the data of leaf {name!r}", seconds=deadline.seconds, missing=[name]
        ) from error
    except ValueError as error:
        raise ShareError(f"leaf {name!r} cannot be read: {error}", place=name) from error


def _value(plan: ReadPlan, leaf: TargetLeaf, parts: Mapping[Box, np.ndarray[Any, Any]]) -> Any:
    if leaf.make == "string":
        return plan.shares[0].strings[leaf.leaf.name]
    if leaf.make in ("array", "key"):
        return _on_devices(leaf, parts)
    (whole,) = parts.values()
    if leaf.cast_to is not None:
        whole = whole.astype(leaf.cast_to)
    if leaf.make == "numpy":
        return whole
    return whole[()] if leaf.make == "numpy_scalar" else whole.item()


def _on_devices(leaf: TargetLeaf, parts: Mapping[Box, np.ndarray[Any, Any]]) -> jax.Array:
    assert leaf.sharding is not None
    shape = leaf.leaf.shape
    if leaf.cast_to is not None:
        parts = {box: part.astype(leaf.cast_to) for box, part in parts.items()}
    # One call for all devices: one for each takes five times as long.
    array: jax.Array = jax.make_array_from_callback(
        shape, leaf.sharding, lambda index: parts[box_of(index or (), shape)]
    )
    if leaf.make == "key":
        array = jax.random.wrap_key_data(array, impl=leaf.key_implementation)
    return array
