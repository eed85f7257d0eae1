"""Where the values of an OCDBT database lie, as TensorStore reads its index."""

from __future__ import annotations

import dataclasses
import functools
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import tensorstore as ts

from mtcheckpoint._clock import Deadline

__all__ = ["Stored", "index_entries", "result_within"]

# Far more than any index has: OCDBT fills nodes of megabytes.
_MOST_LEVELS, _MOST_NODES = 8, 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Where a value lies.

    Attributes:
        file: data file, relative to the database.
        offset: of its first byte.
        length: in bytes.
    """

    file: str
    offset: int
    length: int


def index_entries(
    files: Any, context: ts.Context, deadline: Deadline
) -> Iterator[tuple[bytes, Stored | bytes]]:
    """All keys of the newest version of a database, and where each value lies, or what it is.

    Args:
        files: those of the database, as a TensorStore key-value store.
        context: TensorStore's pools and limits.
        deadline: for all of it.

    Raises:
        TimeoutError: the deadline passed.
        ValueError, LookupError, TypeError: it is damaged, or cannot be read.
    """
    manifest = result_within(ts.ocdbt.dump(files, context=context), deadline)
    root = manifest["versions"][-1]["root"].get("location")
    # Nodes, and what all keys below each begin with, which it leaves out.
    level = [(root, b"")] if root is not None else []
    for _ in range(_MOST_LEVELS):
        nodes = [
            (ts.ocdbt.dump(files, location, context=context), prefix) for location, prefix in level
        ]
        level = []
        for node, prefix in nodes:
            for entry in result_within(node, deadline)["entries"]:
                if "location" in entry:
                    below = prefix + entry["subtree_common_prefix"]
                    level.append((entry["location"], below))
                else:
                    yield prefix + entry["key"], _value(entry)
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


def result_within(future: Any, deadline: Deadline) -> Any:
    """The result of one of TensorStore's futures.

    Raises:
        TimeoutError: the deadline passed.
    """
    return future.result(timeout=max(deadline.remaining(), 0.001))
