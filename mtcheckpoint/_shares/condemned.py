"""Shares of this volume that turned out to be bad: set aside, never deleted, and not tried again.

Without a replicator a bad step directory is renamed to ``<step>.condemned``. With one, its volume
is left alone while it works: what is bad goes on a note, and the next start renames the data before
its handshake.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path

from mtcheckpoint._handshake import files
from mtcheckpoint._shares.inventory import HeldShare, Volume, take_inventory
from mtcheckpoint._shares.volume import SET_ASIDE_SUFFIX

__all__ = ["NOTE_FILE", "set_aside", "take_note", "usable_shares"]

NOTE_FILE = "mtcheckpoint.condemned.json"


def set_aside(path: Path) -> Path:
    """Gives a share a name by which nobody takes it for one; returns the new path."""
    target = path.with_name(path.name + SET_ASIDE_SUFFIX)
    number = 2
    while target.exists():
        target = path.with_name(f"{path.name}.{number}{SET_ASIDE_SUFFIX}")
        number += 1
    os.rename(path, target)
    return target


def take_note(volume: Path, job: str, shares: Iterable[HeldShare]) -> None:
    """Notes shares as bad, beside those that are noted already."""
    keys = _noted(volume, job) | {key for share in shares for key in _keys(share)}
    note = volume / NOTE_FILE
    unfinished = note.with_name(note.name + ".tmp")
    unfinished.write_text(json.dumps({"job": job, "shares": sorted(keys)}))
    unfinished.rename(note)


def usable_shares(
    volume: Path, job: str, *, before_handshake: bool = False
) -> tuple[Volume, tuple[str, ...]]:
    """The inventory without the shares that are known to be bad; and these, as texts.

    Args:
        volume: of this node.
        job: of which job.
        before_handshake: rename the data that is noted. A replicator rests between two runs, or
            still takes the last step, which it does not under this name; so nothing is taken from
            it. It misses the data at the handshake, and brings a copy from a peer, or offers
            another step. After the handshake it may be reading the data, to copy it.
    """
    found = take_inventory(volume, job)
    noted = _noted(volume, job)
    bad = [share for share in found.shares if noted.intersection(_keys(share))]
    if before_handshake and any(_set_data_aside(share) for share in bad):
        found = take_inventory(volume, job)
        bad = [share for share in found.shares if noted.intersection(_keys(share))]
    told = [f"{share.path} was found bad by an earlier run" for share in bad]
    told += [
        f"{path} was found bad and set aside"
        for path in sorted(volume.glob(f"*{SET_ASIDE_SUFFIX}"))
    ]
    good = tuple(share for share in found.shares if share not in bad)
    return dataclasses.replace(found, shares=good), tuple(told)


def _set_data_aside(share: HeldShare) -> bool:
    if share.digest is None or share.path.name != files.data_name(share.digest):
        return False
    try:
        set_aside(share.path)
    except FileNotFoundError:
        return False
    return True


def _keys(share: HeldShare) -> set[str]:
    """What a share is known by: its hash, and, before a replicator took it, what it says."""
    keys = {share.digest} if share.digest is not None else set()
    if share.save_id:
        keys.add(f"{share.step}/{share.save_id}/{share.node_rank}")
    return keys


def _noted(volume: Path, job: str) -> set[str]:
    try:
        note = json.loads((volume / NOTE_FILE).read_text())
        return {str(key) for key in note["shares"]} if note["job"] == job else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()
