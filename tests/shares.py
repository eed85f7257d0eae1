"""Shares for tests: small step directories laid out as Orbax writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import tensorstore as ts


def write_share(
    directory: Path, content: str, *, item: str = "state", committed: bool = True
) -> Path:
    """Makes `directory` a finished share: an OCDBT item whose values depend on `content`.

    `committed` says whether the metadata holds a commit time, which a finished step has.
    """
    base = directory / item
    base.mkdir(parents=True)
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{base.as_posix()}"}).result()
    with ts.Transaction() as transaction:
        bound = store.with_transaction(transaction)
        bound["w/zarr.json"] = b'{"zarr_format": 3}'
        bound["w/c/0"] = content.encode() * 50
    write_commit_time(directory, 1 if committed else None)
    return directory


def write_commit_time(directory: Path, nanoseconds: int | None) -> None:
    """Writes the metadata file by which Orbax marks a finished step."""
    metadata = {"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": nanoseconds}
    (directory / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))


def commit_step(volume: Path, step: int, content: str) -> None:
    """Saves a step as training does: staged beside, then renamed to its digits-only name."""
    staging = write_share(volume / f".staging-{step}", content)
    os.rename(staging, volume / str(step))
