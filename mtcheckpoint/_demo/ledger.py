"""What was saved, element for element: digests that are kept apart from the checkpoints.

A process writes down what it hands to `save`; when a state comes back, it is compared with that.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

__all__ = ["Ledger", "shard_digests"]


def shard_digests(state: Any) -> dict[str, str]:
    """A digest of every shard on this process's devices, by leaf, box and device."""
    return {
        f"{jax.tree_util.keystr(path)} {shard.index} on {shard.device}": _digest(shard.data)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        for shard in leaf.addressable_shards
    }


def _digest(data: jax.Array) -> str:
    values = np.asarray(data)
    described = f"{values.dtype} {values.shape} ".encode()
    return hashlib.blake2b(described + values.tobytes(), digest_size=16).hexdigest()


class Ledger:
    """The digests of one process, in a folder that outlives it.

    Args:
        folder: the same for all runs of the job.
        process: index of the process.
    """

    def __init__(self, folder: Path, process: int) -> None:
        self._folder = folder
        self._process = process

    def write(self, run: int, step: int, state: Any) -> None:
        """Notes what `run` is about to save as `step`."""
        target = self._page(run, step)
        unfinished = target.with_suffix(".tmp")
        unfinished.write_text(json.dumps(shard_digests(state)))
        os.rename(unfinished, target)

    def differences(self, run: int, step: int, state: Any) -> list[str]:
        """The shards of `state` that are not as `run` saved them in `step`."""
        saved: dict[str, str] = json.loads(self._page(run, step).read_text())
        found = shard_digests(state)
        return sorted(n for n in saved.keys() | found.keys() if saved.get(n) != found.get(n))

    def _page(self, run: int, step: int) -> Path:
        return self._folder / f"run{run}-step{step}-process{self._process}.json"
