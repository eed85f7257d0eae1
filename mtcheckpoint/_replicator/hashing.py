"""The name of a node's share: a hash of its content, equal to the public replicator's.

Equal names let the two replicators read each other's volumes and backups.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tensorstore as ts
from blake3 import blake3

__all__ = ["MANIFEST", "directory_digest", "hashed_item", "share_digest"]

MANIFEST = "manifest.ocdbt"

# Hashing competes with training for the processor.
_HASH_THREADS = 4


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
    # Mapped, as what is in memory need not be copied to be hashed.
    base = {"driver": "file", "path": f"{item}/", "file_io_mode": {"mode": "memmap"}}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()

    def key_line(key: bytes) -> str:
        value = store.read(key).result().value
        # The public replicator formats the key as Python shows bytes: b'...'.
        return f"{key!r}\t{blake3(value).hexdigest()}\n"

    keys = sorted(store.list().result())
    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as pool:
        lines = "".join(pool.map(key_line, keys))
    return "D" + str(blake3(lines.encode()).hexdigest())
