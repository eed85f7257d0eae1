"""Writes the arrays of a share: each byte is hashed and written in one pass over memory.

What comes out is what Orbax's handlers write, zarr3 arrays in an OCDBT database, so TensorStore and
Orbax read it. They are not asked to write it: they take a call, a lock and an index for each leaf,
and the checksum would be a second pass.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from mtcheckpoint._host_array import HostArray
from mtcheckpoint._restore import Chunk
from mtcheckpoint._shares.ocdbt import MANIFEST_FILE
from mtcheckpoint._shares.write_plan import DATA_FOLDER, DataFile, PlannedChunk, WritePlan

__all__ = ["OpenFile", "WrittenArrays", "new_file", "write_arrays"]

# What is hashed is written while it is in the cache.
_BLOCK_BYTES = 1 << 20
_MOST_BUFFERS = 512  # Linux takes 1,024 in one call

# A contiguous array, which is a buffer: before Python 3.12 there is no type for that.
_Contiguous = Any

# Opens a file for writing that is not there yet.
OpenFile = Callable[[Path], int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WrittenArrays:
    """What was written: the checksums of the plan's chunks, in their order."""

    plan: WritePlan
    checksums: Sequence[str]

    @property
    def chunks(self) -> dict[str, dict[Chunk, tuple[int, str]]]:
        """Bytes and checksum of each chunk, by leaf name."""
        found: dict[str, dict[Chunk, tuple[int, str]]] = {name: {} for name in self.plan.forms}
        for chunk, checksum in zip(self.plan.chunks, self.checksums, strict=True):
            found[chunk.name][chunk.chunk] = (chunk.sealed_bytes, checksum)
        return found


def new_file(path: Path) -> int:
    """A file with memory of its own."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def write_arrays(
    folder: Path, plan: WritePlan, arrays: Mapping[str, HostArray], open_file: OpenFile = new_file
) -> WrittenArrays:
    """Writes arrays below `folder`, where no database is yet. The manifest comes last.

    Args:
        folder: the share's folder of arrays, which exists.
        plan: made for arrays of these forms.
        arrays: by leaf name.
        open_file: opens the data files. What they hold is written over.

    Raises:
        OSError: it could not be written.
    """
    (folder / DATA_FOLDER).mkdir(exist_ok=True)
    parts = {name: array.parts() for name, array in arrays.items()}

    def write(files: Sequence[DataFile]) -> list[str]:
        return [
            checksum for file in files for checksum in _write_file(folder, file, parts, open_file)
        ]

    checksums = _in_threads(write, plan.files)
    if plan.index.nodes:
        (folder / plan.index.node_file).write_bytes(plan.index.nodes)
    (folder / MANIFEST_FILE).write_bytes(plan.index.manifest(time.time_ns()))
    return WrittenArrays(plan=plan, checksums=checksums)


def _in_threads(
    write: Callable[[Sequence[DataFile]], list[str]], shares: Sequence[Sequence[DataFile]]
) -> list[str]:
    if len(shares) <= 1:
        return [checksum for share in shares for checksum in write(share)]
    with concurrent.futures.ThreadPoolExecutor(len(shares), "mtcheckpoint-writer") as pool:
        return list(itertools.chain.from_iterable(pool.map(write, shares)))


def _write_file(
    folder: Path,
    file: DataFile,
    parts: Mapping[str, Sequence[np.ndarray[Any, Any]]],
    open_file: OpenFile,
) -> list[str]:
    """Writes one data file; the checksums of its chunks."""
    opened = open_file(folder / file.name)
    try:
        checksums = list(_write_chunks(opened, file.chunks, parts))
        os.ftruncate(opened, file.size_bytes)
    finally:
        os.close(opened)
    return checksums


def _write_chunks(
    file: int,
    chunks: Sequence[PlannedChunk],
    parts: Mapping[str, Sequence[np.ndarray[Any, Any]]],
) -> Iterator[str]:
    """Writes chunks one behind the other, small ones together; their checksums."""
    waiting: list[_Contiguous] = []
    waiting_bytes = 0
    for chunk in chunks:
        sealed = _elements(chunk, parts[chunk.name][chunk.piece])
        stored = sealed if chunk.shape is None else _filled_up(sealed, chunk.shape)
        is_large = sealed.nbytes > _BLOCK_BYTES
        if is_large or waiting_bytes > _BLOCK_BYTES or len(waiting) == _MOST_BUFFERS:
            _write(file, waiting)
            waiting, waiting_bytes = [], 0
        if is_large and stored is sealed:
            yield _hash_and_write(file, sealed)
        else:
            waiting.append(stored)
            waiting_bytes += chunk.stored_bytes
            yield xxhash.xxh3_128_hexdigest(sealed)
    _write(file, waiting)


def _elements(chunk: PlannedChunk, piece: np.ndarray[Any, Any]) -> _Contiguous:
    return np.ascontiguousarray(piece if chunk.within is None else piece[chunk.within])


def _filled_up(part: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    whole = np.zeros(shape, part.dtype)
    whole[tuple(slice(size) for size in part.shape)] = part
    return whole


def _hash_and_write(file: int, array: np.ndarray[Any, Any]) -> str:
    data, checksum = _bytes_of(array), xxhash.xxh3_128()
    for start in range(0, data.nbytes, _BLOCK_BYTES):
        block: _Contiguous = data[start : start + _BLOCK_BYTES]
        checksum.update(block)
        _write(file, [block])
    return checksum.hexdigest()


def _bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.reshape(-1).view(np.uint8)


def _write(file: int, arrays: Sequence[_Contiguous]) -> None:
    left = sum(array.nbytes for array in arrays)
    while left:
        count = os.writev(file, arrays)
        left -= count
        if left:
            arrays = _after(arrays, count)


def _after(arrays: Sequence[_Contiguous], count: int) -> list[_Contiguous]:
    """What is left of arrays when so many bytes of them were written."""
    rest = []
    for array in arrays:
        data = _bytes_of(array)
        rest.append(data[min(count, data.nbytes) :])
        count = max(count - data.nbytes, 0)
    return [data for data in rest if data.nbytes]
