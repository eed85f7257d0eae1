"""Which step to restore, who gets copies, what to keep: decisions over plain values. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mtcheckpoint._handshake.offers import (
    Candidate,
    Holdings,
    MetaEntry,
    infer_missing,
    merge,
    newest_complete,
)
from mtcheckpoint._replicator.settings import RunSettings

__all__ = [
    "Candidate",
    "Holdings",
    "MetaEntry",
    "backup_due",
    "infer_missing",
    "merge",
    "newest_complete",
    "peers_of",
    "steps_to_keep",
    "uploads_data",
]


def peers_of(settings: RunSettings) -> tuple[int, ...]:
    """The ranks that get a copy of this node's share, lowest first; never the node itself."""
    if settings.peer_ranks is not None:
        return settings.peer_ranks
    count = settings.peers_per_node or 0
    offsets = _ring_offsets(settings, count)
    peers = {(settings.node_rank + offset) % settings.nodes for offset in offsets}
    if count and settings.replicas is None:
        peers.add((settings.node_rank ^ 1) % settings.nodes)
    return tuple(sorted(peers - {settings.node_rank}))


def _ring_offsets(settings: RunSettings, count: int) -> list[int]:
    if settings.replicas is None:
        return [settings.nodes // count * position for position in range(1, count)]
    size = settings.nodes // settings.replicas
    # -1, +1, -2, +2, ... replicas away.
    return [(position // 2 + 1) * size * (-1, 1)[position % 2] for position in range(count)]


def uploads_data(settings: RunSettings) -> bool:
    """Whether this node backs up its data: with data parallelism only the last replica does."""
    if settings.replicas is None:
        return True
    return settings.node_rank >= settings.nodes - settings.nodes // settings.replicas


def backup_due(settings: RunSettings, *, seconds_since: float, steps_since: int) -> bool:
    """Whether a completed step is to be backed up.

    Args:
        seconds_since: seconds since the last backup or the start of the run.
        steps_since: steps since the last backup or the start of the run.
    """
    if settings.backup_interval_steps is not None:
        return steps_since >= settings.backup_interval_steps
    assert settings.backup_interval_minutes is not None
    return seconds_since >= settings.backup_interval_minutes * 60


def steps_to_keep(
    settings: RunSettings, *, current: Iterable[int], backing_up: int | None
) -> frozenset[int]:
    """The steps that clean-up leaves in this node's volume.

    A node of the last replica that is uploading has room for one share only, so it keeps what it
    uploads: the other replicas hold the newest step.

    Args:
        current: the newest replicated step, and a newer one that could not be replicated.
        backing_up: the step being uploaded, if any.
    """
    if backing_up is None:
        return frozenset(current)
    if settings.replicas is not None and uploads_data(settings):
        return frozenset({backing_up})
    return frozenset({*current, backing_up})
