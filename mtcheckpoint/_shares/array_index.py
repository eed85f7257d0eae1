"""Reads the index of a share's arrays: how each is stored, and where each chunk lies.

One read of the index tells of all arrays; opening them one by one would take a read for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import tensorstore as ts

from mtcheckpoint._clock import Deadline
from mtcheckpoint._ocdbt_index import Stored, index_entries, result_within
from mtcheckpoint._restore import Chunk, chunk_at
from mtcheckpoint._shares.identity import STATE_ITEM
from mtcheckpoint._shares.places import Place

__all__ = ["ArrayIndex", "read_index", "state_files"]

_METADATA = "/zarr.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArrayIndex:
    """What an index says.

    Attributes:
        metadata: the text of zarr's description of each array, by leaf name.
        chunks: where each chunk lies, or what it is, by leaf name.
    """

    metadata: Mapping[str, bytes]
    chunks: Mapping[str, Mapping[Chunk, Stored | bytes]]


def state_files(place: Place, context: ts.Context) -> Any:
    """The files of a share's arrays, as a TensorStore key-value store; a future."""
    return ts.KvStore.open(place.kvstore(STATE_ITEM), context=context)


def read_index(place: Place, context: ts.Context, deadline: Deadline) -> ArrayIndex:
    """Reads the index.

    Raises:
        TimeoutError: the deadline passed.
        ValueError, LookupError, TypeError, RecursionError: it is damaged, or cannot be read.
    """
    files = result_within(state_files(place, context), deadline)
    texts: dict[str, Stored | bytes] = {}
    chunks: dict[str, dict[Chunk, Stored | bytes]] = {}
    for raw_key, value in index_entries(files, context, deadline):
        key = raw_key.decode()
        name, chunk_separator, position = key.rpartition("/c")
        if key.endswith(_METADATA):
            texts[key.removesuffix(_METADATA)] = value
        elif chunk_separator and position[:1] in ("", "/"):
            chunks.setdefault(name, {})[chunk_at(position)] = value
    return ArrayIndex(
        metadata=dict(_texts(files, texts, deadline)),
        chunks={name: chunks.get(name, {}) for name in texts},
    )


def _texts(
    files: Any, found: Mapping[str, Stored | bytes], deadline: Deadline
) -> Iterator[tuple[str, bytes]]:
    """Small values: those that do not lie in the index are all asked for at once."""
    reads = {
        name: files.read(value.file, byte_range=slice(value.offset, value.offset + value.length))
        for name, value in found.items()
        if isinstance(value, Stored)
    }
    for name, value in found.items():
        text = value if isinstance(value, bytes) else result_within(reads[name], deadline).value
        yield name, text
