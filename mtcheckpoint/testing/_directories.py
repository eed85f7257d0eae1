"""Folders in memory that stand for the RAM disks of nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["NodeDirectories", "ram_disk"]

_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def ram_disk(prefix: str = "mtcheckpoint-") -> Iterator[Path]:
    """A fresh folder in memory, removed afterwards; an ordinary one where there is no tmpfs.

    Example:
        >>> with ram_disk() as folder:
        ...     nodes = NodeDirectories(folder, 2)
        ...     [path.name for path in nodes]
        ['node-0', 'node-1']
    """
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class NodeDirectories:
    """One folder for each of `n` nodes: what a RAM disk is to the processes on a node.

    Args:
        root: where they are made, best in memory (see `ram_disk`).
        n: number of nodes.
    """

    def __init__(self, root: str | os.PathLike[str], n: int) -> None:
        self.paths = tuple(Path(root) / f"node-{rank}" for rank in range(n))
        for path in self.paths:
            path.mkdir(parents=True, exist_ok=True)

    def __getitem__(self, rank: int) -> Path:
        return self.paths[rank]

    def __iter__(self) -> Iterator[Path]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def wipe(self, rank: int) -> None:
        """The node's memory is lost: the folder is there again, and empty."""
        for entry in self[rank].iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def size_bytes(self, rank: int) -> int:
        """Bytes in the files of a node; links count nothing."""
        return sum(
            path.stat().st_size
            for path in self[rank].rglob("*")
            if path.is_file() and not path.is_symlink()
        )

    def entries(self, rank: int) -> list[str]:
        """The names in a node's folder, sorted."""
        return sorted(os.listdir(self[rank]))
