"""Reads the index of a share's arrays: how each is stored, and where each chunk lies.

One read of the index tells of all arrays; opening them one by one would take a read for each.
"""

from __future__ import annotations

import dataclasses
import functools
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import tensorstore as ts

from mtcheckpoint._clock import Deadline
from mtcheckpoint._restore import Chunk, chunk_at
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
    files = _result(state_files(place, context), deadline)
    texts: dict[str, Stored | bytes] = {}
    chunks: dict[str, dict[Chunk, Stored | bytes]] = {}
    for key, value in _entries(files, context, deadline):
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
        text = value if isinstance(value, bytes) else _result(reads[name], deadline).value
        yield name, text


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


def _result(future: Any, deadline: Deadline) -> Any:
    return future.result(timeout=max(deadline.remaining(), 0.001))
