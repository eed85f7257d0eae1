"""How the arrays of a share are laid out in its data files: the same for each save of a state.

So it is made once. Nothing here touches a disk.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from mtcheckpoint._host_array import ArrayForm
from mtcheckpoint._ocdbt_index import Stored
from mtcheckpoint._restore import Chunk, box_shape, chunk_key, chunks_touching
from mtcheckpoint._shares.ocdbt import Index, index_of

__all__ = ["DATA_FOLDER", "DataFile", "PlannedChunk", "WritePlan", "plan_writes"]

DATA_FOLDER = "d"

_METADATA_KEY = "zarr.json"
_MEMORY_SECONDS = 30.0  # no such wait is ever long
# Chunks are read and checked whole, so they should not be too large for those who need a part.
_CHUNK_BYTES = 64 << 20
# A thread is worth its start from here on.
_BYTES_PER_THREAD = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedChunk:
    """One chunk to store.

    Attributes:
        name: of the leaf.
        chunk: its position.
        piece: which of the pieces that this process holds of the leaf has it.
        within: its place in that piece; None: it is all of it.
        shape: of the chunk as it is stored; None: as it lies there. A chunk at the end of an array
            is stored whole; what is beyond the end is not sealed.
        sealed_bytes: of its elements.
        stored_bytes: of the chunk.
    """

    name: str
    chunk: Chunk
    piece: int
    within: tuple[slice, ...] | None
    shape: tuple[int, ...] | None
    sealed_bytes: int
    stored_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class DataFile:
    """Chunks that lie side by side in one file.

    Attributes:
        name: of the file, relative to the folder of arrays.
        chunks: from its beginning to its end.
        size_bytes: of the file.
    """

    name: str
    chunks: tuple[PlannedChunk, ...]
    size_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WritePlan:
    """How arrays of these forms are written.

    Attributes:
        forms: of the arrays, by leaf name.
        leaves: shape, zarr's name of the element type and chunk shape of each, by leaf name.
        files: for each thread those that it writes.
        index: of all chunks.
    """

    forms: Mapping[str, ArrayForm]
    leaves: Mapping[str, tuple[tuple[int, ...], str, tuple[int, ...]]]
    files: tuple[tuple[DataFile, ...], ...]
    index: Index

    @property
    def chunks(self) -> Iterator[PlannedChunk]:
        """All chunks, in the order of the files."""
        return (chunk for files in self.files for file in files for chunk in file.chunks)


def plan_writes(forms: Mapping[str, ArrayForm], *, threads: int, file_bytes: int) -> WritePlan:
    """Plans how arrays are written.

    Args:
        forms: by leaf name.
        threads: that hash and write.
        file_bytes: a data file that has become this large is followed by another.
    """
    limit = min(_CHUNK_BYTES, file_bytes)
    shapes = {
        name: _chunk_shape(form.piece_shape, form.dtype.itemsize, limit)
        for name, form in forms.items()
    }
    chunks = [c for name, form in forms.items() for c in _chunks_of(name, form, shapes[name])]
    files = tuple(
        tuple(_data_files(share, file_bytes)) for share in _shared_out(chunks, threads) if share
    )
    return WritePlan(
        forms=dict(forms),
        leaves={
            n: (form.shape, _described(form.dtype)["data_type"], shapes[n])
            for n, form in forms.items()
        },
        files=files,
        index=_index(files, {n: _metadata(form, shapes[n]) for n, form in forms.items()}),
    )


# Arrays.


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


def _metadata(form: ArrayForm, chunk_shape: tuple[int, ...]) -> bytes:
    description = {
        **_described(form.dtype),
        "shape": form.shape,
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


def _chunks_of(name: str, form: ArrayForm, chunk_shape: tuple[int, ...]) -> Iterator[PlannedChunk]:
    stored_bytes = math.prod(chunk_shape) * form.dtype.itemsize
    for piece, box in enumerate(form.boxes):
        shape = box_shape(box)
        for chunk in chunks_touching(box, chunk_shape):
            within = tuple(
                slice(position * size - start, min((position + 1) * size, stop) - start)
                for position, size, (start, stop) in zip(chunk, chunk_shape, box, strict=True)
            )
            extent = tuple(part.stop - part.start for part in within)
            yield PlannedChunk(
                name,
                chunk,
                piece,
                within if extent != shape else None,
                chunk_shape if extent != chunk_shape else None,
                math.prod(extent) * form.dtype.itemsize,
                stored_bytes,
            )


# Files.


def _shared_out(chunks: Sequence[PlannedChunk], threads: int) -> list[list[PlannedChunk]]:
    """About the same number of bytes for each thread, and enough to be worth one."""
    total = sum(chunk.stored_bytes for chunk in chunks)
    threads = max(1, min(threads, total // _BYTES_PER_THREAD))
    shares: list[list[PlannedChunk]] = [[] for _ in range(threads)]
    seen = 0
    for chunk in chunks:
        shares[min(seen * threads // max(total, 1), threads - 1)].append(chunk)
        seen += chunk.stored_bytes
    return shares


def _data_files(chunks: Sequence[PlannedChunk], file_bytes: int) -> Iterator[DataFile]:
    held: list[PlannedChunk] = []
    size = 0
    for chunk in chunks:
        if size >= file_bytes:
            yield DataFile(_new_name(), tuple(held), size)
            held, size = [], 0
        held.append(chunk)
        size += chunk.stored_bytes
    yield DataFile(_new_name(), tuple(held), size)


def _new_name() -> str:
    return f"{DATA_FOLDER}/{uuid.uuid4().hex}"


def _index(files: Sequence[Sequence[DataFile]], metadata: Mapping[str, bytes]) -> Index:
    values: dict[str, bytes | Stored] = {
        f"{name}/{_METADATA_KEY}": text for name, text in metadata.items()
    }
    for file in (file for share in files for file in share):
        offset = 0
        for chunk in file.chunks:
            values[f"{chunk.name}/{chunk_key(chunk.chunk)}"] = Stored(
                file=file.name, offset=offset, length=chunk.stored_bytes
            )
            offset += chunk.stored_bytes
    return index_of(values, node_file=_new_name(), database_id=uuid.uuid4().hex)
