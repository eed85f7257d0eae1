"""The name of a node's share: a hash of its content, equal to the public replicator's.

Equal names let the two replicators read each other's volumes and backups.
"""

from __future__ import annotations

import operator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tensorstore as ts
from blake3 import blake3

from mtcheckpoint._clock import Deadline
from mtcheckpoint._ocdbt_index import Stored, index_entries

__all__ = ["MANIFEST", "directory_digest", "hashed_item", "share_digest"]

MANIFEST = "manifest.ocdbt"

# Hashing competes with training for the processor.
_HASH_THREADS = 4
_BLOCK_BYTES = 1 << 20
# Of reading where values lie, in memory.
_INDEX_SECONDS = 60.0


def share_digest(directory: Path, framework: str) -> str:
    """``D`` and 64 hex digits for the share in `directory`.

    For Orbax it covers the keys and values of the first child that is an OCDBT store, however they
    are laid out in files; for anything else every file's content.
    """
    item = hashed_item(directory) if framework == "orbax" else None
    return directory_digest(directory) if item is None else _store_digest(item)


def hashed_item(directory: Path) -> Path | None:
    """The first child directory, in the order of the listing, that holds an OCDBT manifest."""
    for child in directory.iterdir():
        if child.is_dir() and (child / MANIFEST).is_file():
            return child
    return None


def directory_digest(directory: Path) -> str:
    """A hash of all file contents below `directory`; names and order do not count."""
    children = sorted(
        directory_digest(child) if child.is_dir() else _file_digest(child)
        for child in directory.iterdir()
    )
    return "D" + str(blake3("\n".join(children).encode()).hexdigest())


def _file_digest(path: Path) -> str:
    return str(blake3(max_threads=_HASH_THREADS).update_mmap(path).hexdigest())


def _store_digest(item: Path) -> str:
    context = ts.Context()
    opening = ts.KvStore.open({"driver": "file", "path": f"{item}/"}, context=context)
    files = opening.result(timeout=_INDEX_SECONDS)
    deadline = Deadline.after(_INDEX_SECONDS)
    entries = sorted(index_entries(files, context, deadline), key=operator.itemgetter(0))

    def key_line(entry: tuple[bytes, Stored | bytes]) -> str:
        key, value = entry
        # The public replicator formats the key as Python shows bytes: b'...'.
        return f"{key!r}\t{_value_digest(item, value)}\n"

    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as pool:
        lines = "".join(pool.map(key_line, entries))
    return "D" + str(blake3(lines.encode()).hexdigest())


def _value_digest(item: Path, value: Stored | bytes) -> str:
    if isinstance(value, bytes):
        return str(blake3(value).hexdigest())
    hashed = blake3()
    # Over and over into the same memory: entering fresh pages would take four times as long.
    block = memoryview(bytearray(min(_BLOCK_BYTES, value.length)))
    with open(item / value.file, "rb", buffering=0) as file:
        file.seek(value.offset)
        left = value.length
        while left:
            read = file.readinto(block[: min(left, len(block))])
            if not read:
                raise ValueError(
                    f"{item / value.file} ends {left} bytes before the end of a value at"
                    f" {value.offset}"
                )
            hashed.update(block[:read])
            left -= read
    return str(hashed.hexdigest())
