"""Reads chunks that are stored as they lie in memory: straight into buffers, checked on the way.

Chunks that lie side by side come in one read. Each block is hashed while it is in the cache.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import tensorstore as ts
import xxhash

from mtcheckpoint._clock import Deadline
from mtcheckpoint._ocdbt_index import Stored
from mtcheckpoint._restore import Box, Chunk, box_shape
from mtcheckpoint._shares.array_index import state_files
from mtcheckpoint._shares.contents import ShareContents, is_unreadable
from mtcheckpoint._shares.identity import STATE_ITEM
from mtcheckpoint._shares.peer_stream import PeerStream
from mtcheckpoint._shares.places import LocalPlace, PeerPlace, open_regular
from mtcheckpoint._shares.seal import digest_of
from mtcheckpoint.errors import ShareError, TierUnreadableError, WaitTimeoutError

__all__ = ["ChunkRead", "DecodedRead", "ReadPool", "ReadTask", "Run", "StateFiles", "runs_of"]

# Small chunks are read together up to so many bytes.
_RUN_BYTES = 8 << 20
# What is read is hashed while it is in the cache.
_BLOCK_BYTES = 1 << 20
_MOST_BUFFERS = 512  # Linux takes 1,024 in one call
# Of what lies elsewhere, one request, and how many are on their way for one run.
_FETCH_BYTES, _FETCHED_AHEAD = 8 << 20, 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRead:
    """One chunk that is wanted, and where it goes.

    Attributes:
        owner: of the buffers: a number of the caller's.
        name: of the leaf.
        chunk: its position.
        box: its elements of the leaf.
        share: where it is read from; what is sealed there is compared.
        whole: a contiguous buffer for it; None: it is only needed for the copies.
        copies: buffers for parts of it, and the parts.
        dtype: of the elements.
        nbytes: of all of it.
    """

    owner: int
    name: str
    chunk: Chunk
    box: Box
    share: ShareContents
    dtype: np.dtype[Any]
    whole: np.ndarray[Any, Any] | None = None
    copies: tuple[tuple[np.ndarray[Any, Any], tuple[slice, ...]], ...] = ()
    nbytes: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        size = math.prod(box_shape(self.box)) * self.dtype.itemsize
        object.__setattr__(self, "nbytes", size)

    @property
    def is_plain(self) -> bool:
        """Whether it is stored as it lies in memory."""
        return self.share.leaves[self.name].is_plain

    @property
    def stored(self) -> Stored | bytes:
        return self.share.chunks[self.name][self.chunk]

    def fault(self, text: str) -> ShareError:
        place = self.share.place.name
        return ShareError(f"{place}: leaf {self.name!r}: {text}", place=place)

    def buffer(self) -> np.ndarray[Any, Any]:
        """Contiguous memory for all of it."""
        return self.whole if self.whole is not None else np.empty(box_shape(self.box), self.dtype)

    def finish(self, array: np.ndarray[Any, Any], checksum: str | None) -> None:
        """Compares what has come with the seal, before anything else sees it."""
        if checksum is not None and self.share.seal is not None:
            fault = self.share.seal.fault_of_checksum(self.name, self.chunk, array.nbytes, checksum)
            if fault is not None:
                raise ShareError(f"{self.share.place.name}: {fault}", place=self.share.place.name)
        for target, part in self.copies:
            within: Any = (*part, ...)
            target[...] = array[within]


def _read_large(read: ChunkRead, source: Source) -> None:
    """Block by block, each hashed while it is in the cache."""
    array, checksum = read.buffer(), xxhash.xxh3_128()
    flat = array.reshape(-1).view(np.uint8)
    sealed = read.share.seal is not None
    for start in range(0, flat.nbytes, _BLOCK_BYTES):
        block = flat[start : start + _BLOCK_BYTES]
        source.fill([block])
        if sealed:
            checksum.update(block.data)
    read.finish(array, checksum.hexdigest() if sealed else None)


def _read_small(reads: Sequence[ChunkRead], source: Source) -> None:
    """All at once, then one after the other."""
    arrays = [read.buffer() for read in reads]
    source.fill([array.reshape(-1).view(np.uint8) for array in arrays])
    for read, array in zip(reads, arrays, strict=True):
        read.finish(array, digest_of(array) if read.share.seal is not None else None)


def _batches(reads: Sequence[ChunkRead]) -> Iterator[list[ChunkRead]]:
    """As many as fill a block; larger ones alone."""
    batch: list[ChunkRead] = []
    size = 0
    for read in reads:
        if batch and (size + read.nbytes > _BLOCK_BYTES or len(batch) == _MOST_BUFFERS):
            yield batch
            batch, size = [], 0
        batch.append(read)
        size += read.nbytes
    yield batch


class Source(Protocol):
    """Bytes, one behind the other."""

    def fill(self, blocks: Sequence[np.ndarray[Any, Any]]) -> None:
        """Fills flat buffers of bytes, one after the other, with the next ones.

        Raises:
            EOFError: there are not so many.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Chunks that lie side by side in one file."""

    reads: tuple[ChunkRead, ...]
    stored: Stored | bytes
    files: StateFiles

    @property
    def nbytes(self) -> int:
        return sum(read.nbytes for read in self.reads)

    def read(self) -> None:
        """Reads all of them.

        Raises:
            ShareError: one could not be read, or is not what was sealed; names the copy.
            TierUnreadableError: its place could not be read.
            WaitTimeoutError: the deadline passed; names a leaf.
        """
        first = self.reads[0]
        try:
            with self.files.opened(first.share, self.stored) as source:
                for batch in _batches(self.reads):
                    if len(batch) > 1 or batch[0].nbytes <= _BLOCK_BYTES:
                        _read_small(batch, source)
                    else:
                        _read_large(batch[0], source)
        except (OSError, EOFError, ValueError) as error:
            raise _translated(error, first, self.files.deadline) from error


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedRead:
    """A chunk that TensorStore has to decode, out of the array that it lies in."""

    chunk: ChunkRead
    store: Any
    deadline: Deadline

    @property
    def reads(self) -> tuple[ChunkRead, ...]:
        return (self.chunk,)

    @property
    def nbytes(self) -> int:
        return self.chunk.nbytes

    def read(self) -> None:
        """Reads it. Raises as `Run.read` does."""
        array, part = self.chunk.buffer(), self.store
        if self.chunk.box:
            part = part[tuple(slice(*ends) for ends in self.chunk.box)]
            part = part.translate_to[(0,) * len(self.chunk.box)]
        try:
            ts.array(array).write(part).result(timeout=max(self.deadline.remaining(), 0.001))
        except (OSError, ValueError) as error:
            raise _translated(error, self.chunk, self.deadline) from error
        sealed = self.chunk.share.seal is not None
        self.chunk.finish(array, digest_of(array) if sealed else None)


ReadTask = Run | DecodedRead


def _translated(error: Exception, read: ChunkRead, deadline: Deadline) -> Exception:
    if isinstance(error, TimeoutError):
        what = f"the data of leaf {read.name!r}"
        return WaitTimeoutError(what, seconds=deadline.seconds, missing=[read.name])
    if isinstance(error, ValueError) and is_unreadable(error):
        place = read.share.place.name
        return TierUnreadableError(f"leaf {read.name!r} cannot be read: {error}", place=place)
    return read.fault(f"cannot be read: {error}")


class ReadPool:
    """Threads that read; not more than so many bytes are on the way at once."""

    def __init__(self, threads: int, concurrent_bytes: int) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "mtcheckpoint-reader")
        self._concurrent_bytes = concurrent_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error nobody waits for what is on its way: each read has a deadline.
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def done(self, tasks: Iterable[ReadTask]) -> Iterator[ReadTask]:
        """Runs the tasks; yields each when it is done, in order."""
        waiting: collections.deque[tuple[ReadTask, concurrent.futures.Future[None]]]
        waiting = collections.deque()
        ahead = 0
        for task in tasks:
            ahead += task.nbytes
            while waiting and ahead > self._concurrent_bytes:
                ahead -= waiting[0][0].nbytes
                yield _finished(*waiting.popleft())
            waiting.append((task, self._pool.submit(task.read)))
        while waiting:
            yield _finished(*waiting.popleft())


def _finished(task: ReadTask, future: concurrent.futures.Future[None]) -> ReadTask:
    future.result()
    return task


def runs_of(reads: Iterable[ChunkRead], files: StateFiles) -> Iterator[Run]:
    """Puts reads together that are side by side.

    A leaf's chunks may lie in several shares, so what is side by side in one share need not follow
    each other here.

    Raises:
        ShareError: a chunk is stored with another size than it has.
    """
    begun: dict[int, tuple[list[ChunkRead], Stored | bytes]] = {}
    for read in reads:
        stored = _checked(read)
        run, where = begun.get(id(read.share), ([], b""))
        joined = _joined(where, stored) if run else None
        if joined is None and run:
            yield Run(reads=tuple(run), stored=where, files=files)
            run = []
        run.append(read)
        begun[id(read.share)] = run, stored if joined is None else joined
    for run, where in begun.values():
        yield Run(reads=tuple(run), stored=where, files=files)


def _checked(read: ChunkRead) -> Stored | bytes:
    """Where it lies; it has the size that it should have."""
    stored = read.stored
    length = stored.length if isinstance(stored, Stored) else len(stored)
    if length != read.nbytes:
        raise read.fault(f"chunk {read.chunk} has {length} bytes, expected {read.nbytes}")
    return stored


def _joined(one: Stored | bytes, other: Stored | bytes) -> Stored | None:
    """Both as one, where they lie side by side and are not too much together."""
    if not isinstance(one, Stored) or not isinstance(other, Stored) or one.file != other.file:
        return None
    if one.offset + one.length != other.offset or one.length + other.length > _RUN_BYTES:
        return None
    return Stored(file=one.file, offset=one.offset, length=one.length + other.length)


class StateFiles:
    """Opens the data files of shares."""

    def __init__(
        self, shares: Iterable[ShareContents], *, context: ts.Context, deadline: Deadline
    ) -> None:
        self.deadline = deadline
        # Opening one takes no request.
        self._stores: Mapping[str, Any] = {
            share.place.name: state_files(share.place, context).result(self._seconds())
            for share in shares
            if not isinstance(share.place, LocalPlace | PeerPlace)
        }

    @contextlib.contextmanager
    def opened(self, share: ShareContents, stored: Stored | bytes) -> Iterator[Source]:
        """A source of the bytes that lie there."""
        if isinstance(stored, bytes):
            yield _Bytes(stored)
        elif isinstance(share.place, LocalPlace):
            file = open_regular(share.place.path / STATE_ITEM / stored.file)
            try:
                yield _File(file, stored.offset)
            finally:
                os.close(file)
        elif isinstance(share.place, PeerPlace):
            file_name = f"{STATE_ITEM}/{stored.file}"
            with contextlib.closing(
                PeerStream(
                    share.place,
                    file_name,
                    offset=stored.offset,
                    length=stored.length,
                    deadline=self.deadline,
                )
            ) as stream:
                yield stream
        else:
            yield _Fetched(self._stores[share.place.name], stored, self._seconds)

    def _seconds(self) -> float:
        return max(self.deadline.remaining(), 0.001)


class _File:
    def __init__(self, file: int, offset: int) -> None:
        self._file = file
        self._offset = offset

    def fill(self, blocks: Sequence[np.ndarray[Any, Any]]) -> None:
        views = collections.deque(block.data for block in blocks)
        while views:
            count = os.preadv(self._file, [*views], self._offset)
            if count == 0:
                raise EOFError("its file is too short")
            self._offset += count
            while views and count >= views[0].nbytes:
                count -= views.popleft().nbytes
            if views:
                views[0] = views[0][count:]


class _Bytes:
    def __init__(self, content: bytes) -> None:
        self._content = np.frombuffer(content, np.uint8)
        self._offset = 0

    def fill(self, blocks: Sequence[np.ndarray[Any, Any]]) -> None:
        for block in blocks:
            part = self._content[self._offset : self._offset + block.nbytes]
            if part.nbytes != block.nbytes:
                raise EOFError("there are fewer bytes than there should be")
            block[...] = part
            self._offset += part.nbytes


class _Fetched:
    """Bytes of a file elsewhere; the next ranges are on their way while one is looked at."""

    def __init__(self, store: Any, stored: Stored, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        end = stored.offset + stored.length
        self._ranges = iter(
            (store, stored.file, slice(start, min(start + _FETCH_BYTES, end)))
            for start in range(stored.offset, end, _FETCH_BYTES)
        )
        self._ahead: collections.deque[Any] = collections.deque()
        for _ in range(_FETCHED_AHEAD):
            self._ask()
        self._content = np.empty(0, np.uint8)

    def fill(self, blocks: Sequence[np.ndarray[Any, Any]]) -> None:
        for block in blocks:
            self._fill(block)

    def _fill(self, block: np.ndarray[Any, Any]) -> None:
        while block.nbytes:
            if not self._content.nbytes:
                self._content = self._next()
            count = min(block.nbytes, self._content.nbytes)
            block[:count] = self._content[:count]
            block, self._content = block[count:], self._content[count:]

    def _ask(self) -> None:
        for store, file, wanted in itertools.islice(self._ranges, 1):
            self._ahead.append(store.read(file, byte_range=wanted))

    def _next(self) -> np.ndarray[Any, Any]:
        if not self._ahead:
            raise EOFError("there are fewer bytes than there should be")
        found = self._ahead.popleft().result(timeout=self._seconds())
        self._ask()
        content = found.value  # each time a new copy
        if found.state != "value" or not content:
            raise EOFError("its file is gone, or too short")
        return np.frombuffer(content, np.uint8)
