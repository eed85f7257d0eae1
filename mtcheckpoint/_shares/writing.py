"""Writes the arrays of a share: each byte is hashed and written in one pass over memory.

What comes out is what Orbax's handlers write, zarr3 arrays in an OCDBT database, so TensorStore and
Orbax read it. They are not asked to write it: they take a call, a lock and an index for each leaf,
and the checksum would be a second pass.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorstore as ts
import xxhash

from mtcheckpoint._host_array import HostArray
from mtcheckpoint._restore import Chunk, chunk_key, chunks_touching
from mtcheckpoint._shares.ocdbt import MANIFEST_FILE, Stored, index_files

__all__ = ["DATA_FOLDER", "WrittenArrays", "write_arrays"]

DATA_FOLDER = "d"

_METADATA_KEY = "zarr.json"
_MEMORY_SECONDS = 30.0  # no such wait is ever long
# Chunks are read and checked whole, so they should not be too large for those who need a part.
_CHUNK_BYTES = 64 << 20
# What is hashed is written while it is in the cache.
_BLOCK_BYTES = 1 << 20
_MOST_BUFFERS = 512  # Linux takes 1,024 in one call
# A thread is worth its start from here on.
_BYTES_PER_THREAD = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WrittenArrays:
    """What was written, as a seal tells it.

    Attributes:
        leaves: shape, zarr's name of the element type and chunk shape of each array, by leaf name.
        chunks: bytes and checksum of each chunk, by leaf name.
    """

    leaves: Mapping[str, tuple[tuple[int, ...], str, tuple[int, ...]]]
    chunks: Mapping[str, Mapping[Chunk, tuple[int, str]]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _ChunkData:
    """One chunk to write: its bytes as they are stored, and what is sealed of them."""

    name: str
    chunk: Chunk
    data: memoryview
    sealed: memoryview


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _WrittenChunk:
    name: str
    chunk: Chunk
    sealed_bytes: int
    checksum: str
    stored: Stored


def write_arrays(
    folder: Path, arrays: Mapping[str, HostArray], *, threads: int, file_bytes: int
) -> WrittenArrays:
    """Writes arrays below `folder`, where no database is yet. The manifest comes last.

    Args:
        folder: the share's folder of arrays, which exists.
        arrays: by leaf name.
        threads: that hash and write.
        file_bytes: a data file that has become this large is followed by another.

    Raises:
        OSError: it could not be written.
    """
    limit = min(_CHUNK_BYTES, file_bytes)
    shapes = {
        name: _chunk_shape(array.piece_shape, array.dtype.itemsize, limit)
        for name, array in arrays.items()
    }
    chunks = [c for name, array in arrays.items() for c in _chunks_of(name, array, shapes[name])]
    (folder / DATA_FOLDER).mkdir(exist_ok=True)
    written = _write_all(folder, chunks, threads, file_bytes)
    _write_index(folder, written, {n: _metadata(a, shapes[n]) for n, a in arrays.items()})
    found: dict[str, dict[Chunk, tuple[int, str]]] = {name: {} for name in arrays}
    for one in written:
        found[one.name][one.chunk] = (one.sealed_bytes, one.checksum)
    return WrittenArrays(
        leaves={
            n: (a.shape, _described(a.dtype)["data_type"], shapes[n]) for n, a in arrays.items()
        },
        chunks=found,
    )


# What is written.


@functools.cache
def _described(dtype: np.dtype[Any]) -> dict[str, Any]:
    """TensorStore's description of an array of this type, which says how elements are stored.

    Of all the types that it stores, as they lie in memory.
    """
    context = ts.Context()
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    ts.open(
        {"driver": "zarr3", "kvstore": "memory://", "metadata": {"codecs": codecs}},
        create=True,
        context=context,
        dtype=ts.dtype(dtype),
        shape=[1],
    ).result(_MEMORY_SECONDS)
    found = ts.KvStore.open("memory://", context=context).result(_MEMORY_SECONDS)[_METADATA_KEY]
    description: dict[str, Any] = json.loads(found)
    return description


def _metadata(array: HostArray, chunk_shape: tuple[int, ...]) -> bytes:
    description = {
        **_described(array.dtype),
        "shape": array.shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
    }
    return json.dumps(description, separators=(",", ":")).encode()


def _chunk_shape(piece: tuple[int, ...], item_bytes: int, limit_bytes: int) -> tuple[int, ...]:
    """The largest chunk within the limit that divides a piece and lies in it in one stretch."""
    shape = list(piece)
    for axis, extent in enumerate(piece):
        rest_bytes = math.prod(piece[axis + 1 :]) * item_bytes
        shape[axis] = _largest_divisor(extent, max(limit_bytes // rest_bytes, 1))
        if rest_bytes <= limit_bytes:
            break
    return tuple(shape)


@functools.lru_cache(maxsize=1024)
def _largest_divisor(number: int, limit: int) -> int:
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def _chunks_of(name: str, array: HostArray, chunk_shape: tuple[int, ...]) -> Iterator[_ChunkData]:
    for box, part in array.parts().items():
        if part.shape == chunk_shape:
            (chunk,) = chunks_touching(box, chunk_shape)
            yield _chunk_data(name, chunk, part, chunk_shape)
            continue
        for chunk in chunks_touching(box, chunk_shape):
            within = tuple(
                slice(position * size - start, (position + 1) * size - start)
                for position, size, (start, _) in zip(chunk, chunk_shape, box, strict=True)
            )
            yield _chunk_data(name, chunk, part[within], chunk_shape)


def _chunk_data(
    name: str, chunk: Chunk, part: np.ndarray[Any, Any], chunk_shape: tuple[int, ...]
) -> _ChunkData:
    sealed = data = _bytes_of(part)
    if part.shape != chunk_shape:
        # A chunk at the end of an array is stored whole; what is beyond the end is not sealed.
        whole = np.zeros(chunk_shape, part.dtype)
        whole[tuple(slice(size) for size in part.shape)] = part
        data = _bytes_of(whole)
    return _ChunkData(name=name, chunk=chunk, data=data, sealed=sealed)


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# Writing.


def _write_all(
    folder: Path, chunks: Sequence[_ChunkData], threads: int, file_bytes: int
) -> list[_WrittenChunk]:
    shares = _shared_out(chunks, threads)
    if len(shares) == 1:
        return _write_chunks(folder, shares[0], file_bytes)
    with concurrent.futures.ThreadPoolExecutor(len(shares), "mtcheckpoint-writer") as pool:
        tasks = [pool.submit(_write_chunks, folder, share, file_bytes) for share in shares]
        return [one for task in tasks for one in task.result()]


def _shared_out(chunks: Sequence[_ChunkData], threads: int) -> list[list[_ChunkData]]:
    """About the same number of bytes for each thread, and enough to be worth one."""
    total = sum(chunk.data.nbytes for chunk in chunks)
    threads = max(1, min(threads, total // _BYTES_PER_THREAD))
    shares: list[list[_ChunkData]] = [[] for _ in range(threads)]
    seen = 0
    for chunk in chunks:
        shares[min(seen * threads // max(total, 1), threads - 1)].append(chunk)
        seen += chunk.data.nbytes
    return shares


def _write_chunks(
    folder: Path, chunks: Sequence[_ChunkData], file_bytes: int
) -> list[_WrittenChunk]:
    written: list[_WrittenChunk] = []
    ahead = collections.deque(chunks)
    while ahead:
        with _DataFile(folder) as file:
            while ahead and file.size_bytes < file_bytes:
                written.append(file.append(ahead.popleft()))
    return written


class _DataFile:
    """A new data file, written from its beginning to its end."""

    def __init__(self, folder: Path) -> None:
        self._name = f"{DATA_FOLDER}/{uuid.uuid4().hex}"
        self._file = os.open(folder / self._name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self.size_bytes = 0
        self._waiting: collections.deque[memoryview] = collections.deque()
        self._waiting_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            os.close(self._file)

    def append(self, chunk: _ChunkData) -> _WrittenChunk:
        offset = self.size_bytes
        if chunk.sealed.nbytes == chunk.data.nbytes:
            checksum = self._hash_and_write(chunk.data)
        else:
            checksum = xxhash.xxh3_128_hexdigest(chunk.sealed)
            self._write(chunk.data)
        return _WrittenChunk(
            name=chunk.name,
            chunk=chunk.chunk,
            sealed_bytes=chunk.sealed.nbytes,
            checksum=checksum,
            stored=Stored(file=self._name, offset=offset, length=chunk.data.nbytes),
        )

    def _hash_and_write(self, data: memoryview) -> str:
        if data.nbytes <= _BLOCK_BYTES:
            self._write(data)
            return xxhash.xxh3_128_hexdigest(data)
        checksum = xxhash.xxh3_128()
        for start in range(0, data.nbytes, _BLOCK_BYTES):
            block = data[start : start + _BLOCK_BYTES]
            checksum.update(block)
            self._write(block)
        return checksum.hexdigest()

    def _write(self, data: memoryview) -> None:
        """Writes it now or, what is small, together with what follows."""
        self.size_bytes += data.nbytes
        self._waiting.append(data)
        self._waiting_bytes += data.nbytes
        if self._waiting_bytes >= _BLOCK_BYTES or len(self._waiting) >= _MOST_BUFFERS:
            self._flush()

    def _flush(self) -> None:
        while self._waiting:
            count = os.writev(self._file, [*self._waiting])
            while self._waiting and count >= self._waiting[0].nbytes:
                count -= self._waiting.popleft().nbytes
            if self._waiting:
                self._waiting[0] = self._waiting[0][count:]
        self._waiting_bytes = 0


def _write_index(
    folder: Path, written: Iterable[_WrittenChunk], metadata: Mapping[str, bytes]
) -> None:
    values: dict[str, bytes | Stored] = {
        f"{name}/{_METADATA_KEY}": text for name, text in metadata.items()
    }
    for one in written:
        values[f"{one.name}/{chunk_key(one.chunk)}"] = one.stored
    made = index_files(
        values,
        node_file=f"{DATA_FOLDER}/{uuid.uuid4().hex}",
        database_id=uuid.uuid4().hex,
        commit_time_ns=time.time_ns(),
    )
    # In this order: with its manifest the database is there.
    for name in sorted(made, key=lambda name: name == MANIFEST_FILE):
        (folder / name).write_bytes(made[name])
