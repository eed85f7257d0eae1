"""Reads the index of a share's arrays: how each is stored, and where each chunk lies.

One read of the index tells of all arrays; opening them one by one would take a read for each.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import tensorstore as ts

from mtcheckpoint._clock import Deadline
from mtcheckpoint._restore import Chunk
from mtcheckpoint._shares.identity import STATE_ITEM
from mtcheckpoint._shares.ocdbt import Stored
from mtcheckpoint._shares.places import Place

__all__ = ["ArrayIndex", "read_index", "state_files"]

_METADATA = "/zarr.json"
# Far more than any index has: OCDBT fills nodes of megabytes.
_MOST_LEVELS, _MOST_NODES = 8, 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArrayIndex:
    """What an index says.

    Attributes:
        metadata: zarr's description of each array, by leaf name.
        chunks: where each chunk lies, or what it is, by leaf name.
    """

    metadata: Mapping[str, Mapping[str, Any]]
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
    files = _result(state_files(place, context), deadline)
    values = dict(_entries(files, context, deadline))
    texts = {key: value for key, value in values.items() if key.endswith(_METADATA)}
    reads = {
        key: files.read(value.file, byte_range=slice(value.offset, value.offset + value.length))
        for key, value in texts.items()
        if isinstance(value, Stored)
    }
    metadata = {
        key.removesuffix(_METADATA): json.loads(
            text if isinstance(text, bytes) else _result(reads[key], deadline).value
        )
        for key, text in texts.items()
    }
    return ArrayIndex(metadata=metadata, chunks=_chunks(values, metadata))


def _entries(
    files: Any, context: ts.Context, deadline: Deadline
) -> Iterator[tuple[str, Stored | bytes]]:
    """All keys of the newest version and their values."""
    manifest = _result(ts.ocdbt.dump(files, context=context), deadline)
    root = manifest["versions"][-1]["root"].get("location")
    level = [root] if root is not None else []
    for _ in range(_MOST_LEVELS):
        nodes = [ts.ocdbt.dump(files, location, context=context) for location in level]
        level = []
        for node in nodes:
            for entry in _result(node, deadline)["entries"]:
                if "location" in entry:
                    level.append(entry["location"])
                else:
                    yield entry["key"].decode(), _value(entry)
        if len(level) > _MOST_NODES:
            break
    if level:
        raise ValueError("its index of arrays has more levels or nodes than any has")


def _value(entry: Mapping[str, Any]) -> Stored | bytes:
    inline = entry.get("inline_value")
    if inline is not None:
        return bytes(inline)
    # kind:base path:path:offset:length, the paths percent-encoded
    _, base, path, offset, length = entry["indirect_value"].split(":")
    return Stored(file=_file(base, path), offset=int(offset), length=int(length))


@functools.lru_cache(maxsize=64)
def _file(base: str, path: str) -> str:
    file = urllib.parse.unquote(base) + urllib.parse.unquote(path)
    if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\0" in file:
        raise ValueError(f"its index of arrays points out of it: {file[:200]!r}")
    return file


def _chunks(
    values: Mapping[str, Stored | bytes], arrays: Mapping[str, Any]
) -> dict[str, dict[Chunk, Stored | bytes]]:
    chunks: dict[str, dict[Chunk, Stored | bytes]] = {name: {} for name in arrays}
    for key, value in values.items():
        name, separator, position = key.rpartition("/c")
        if separator and name in chunks:
            chunks[name][tuple(int(part) for part in position.split("/") if part)] = value
    return chunks


def _result(future: Any, deadline: Deadline) -> Any:
    return future.result(timeout=max(deadline.remaining(), 0.001))
