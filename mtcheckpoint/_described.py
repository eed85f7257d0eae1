"""What a save says of itself without its arrays, for `metadata`; the same on all processes."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tensorstore as ts

from mtcheckpoint._backup_list import BackupList
from mtcheckpoint._clock import Deadline, run_within
from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._shares.backups import Backup
from mtcheckpoint._shares.contents import Leaf, read_contents
from mtcheckpoint._shares.places import Place
from mtcheckpoint.errors import ShareError, TierUnreadableError, WaitTimeoutError

__all__ = ["Description", "describe_step"]

_LOG = logging.getLogger("mtcheckpoint.restore")

_CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What one share tells of its save.

    Attributes:
        place: the share.
        checkpoint: the content of Orbax's file about the step.
        leaves: in the order of the save.
        empty: paths of empty parts of the tree and what they were.
    """

    place: str
    checkpoint: Mapping[str, Any]
    leaves: tuple[Leaf, ...]
    empty: Mapping[tuple[str | int, ...], str]

    def to_json(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "checkpoint": self.checkpoint,
            "leaves": [dataclasses.asdict(leaf) for leaf in self.leaves],
            "empty": [[path, kind] for path, kind in self.empty.items()],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Description:
        return cls(
            place=value["place"],
            checkpoint=value["checkpoint"],
            leaves=tuple(_leaf(fields) for fields in value["leaves"]),
            empty={tuple(path): kind for path, kind in value["empty"]},
        )


def _leaf(fields: Mapping[str, Any]) -> Leaf:
    tuples = {name: tuple(fields[name]) for name in ("path", "shape", "chunk_shape")}
    return Leaf(**{**fields, **tuples})


def describe_step(
    step: int,
    own: Sequence[Place],
    backups: BackupList,
    coordinator: Coordinator,
    *,
    timeout_secs: float,
) -> Description | None:
    """What a share of `step` tells of its save, the nearest one; None when there is none.

    Call on every process; the answer is the same on all, whoever holds the step.

    Args:
        step: the step.
        own: this process's shares of it.
        backups: where to look when no process has one.
        coordinator: agreement with the other processes.
        timeout_secs: limit of each look into a share.

    Raises:
        TierUnreadableError: no process has a share, and the backup could not be read.
    """
    found = _first(own, timeout_secs)
    holders = coordinator.gather("metadata/held", found is not None)
    if any(holders):
        tells = holders.index(True) == coordinator.process
        told = found.to_json() if found is not None and tells else None
        return _agreed(coordinator.decide("metadata", told, _first_told))
    while (listed := backups.newer_than(-1)) is not None:
        backup, its_step = listed
        if its_step != step:
            continue

        def look(_: Any, backup: Backup = backup) -> Any:
            told = _in_backup(backups, backup, step, timeout_secs)
            return told.to_json() if told is not None else None

        in_backup = _agreed(backups.decide("metadata/backup", look))
        if in_backup is not None:
            return in_backup
    backups.raise_if_unreadable()
    return None


def _first(places: Sequence[Place], timeout_secs: float) -> Description | None:
    for place in places:
        try:
            return _describe(place, timeout_secs)
        except (ShareError, TierUnreadableError, WaitTimeoutError) as error:
            _LOG.warning("no metadata from %s: %s", place.name, error)
    return None


def _in_backup(
    backups: BackupList, backup: Backup, step: int, timeout_secs: float
) -> Description | None:
    try:
        places = backups.places(backup, step)
        return _describe(places[min(places)], timeout_secs)
    except ShareError as error:
        _LOG.warning("no metadata from a backup: %s", error)
        return None


def _first_told(told: Sequence[Any]) -> Any:
    return next(value for value in told if value is not None)


def _agreed(told: Any) -> Description | None:
    return Description.from_json(told) if told is not None else None


def _describe(place: Place, timeout_secs: float) -> Description:
    """Looks into a share; compares nothing with its seal."""
    return run_within(lambda: _described(place), Deadline.after(timeout_secs), place.name)


def _described(place: Place) -> Description:
    share = read_contents(place, ts.Context(), verify="off")
    try:
        checkpoint = json.loads(place.read(_CHECKPOINT_METADATA) or b"{}")
    except (ValueError, RecursionError) as error:
        raise ShareError(
            f"{place.name}/{_CHECKPOINT_METADATA} is not JSON: {error}", place=place.name
        ) from error
    return Description(
        place=place.name,
        checkpoint=checkpoint if isinstance(checkpoint, dict) else {},
        leaves=tuple(share.leaves.values()),
        empty=share.empty,
    )
