"""Which step to restore, who gets copies, what to keep: decisions over plain values. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MetaEntry:
    """A ``.meta`` file: the share of `node_rank` in `step` is the data named `digest`."""

    step: int
    node_rank: int
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Holdings:
    """What lies in one place, a volume or a backup, of one job."""

    metas: tuple[MetaEntry, ...] = ()
    digests: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A step of which every rank's share is known and exists somewhere."""

    step: int
    digests: Mapping[int, str]


def merge(volumes: Mapping[int, Holdings]) -> Holdings:
    """All that the nodes hold together, by the rank of the node.

    Two nodes that name different data for one share saw two saves of one step; the node whose share
    it is knows which came last.
    """
    named: dict[tuple[int, int], MetaEntry] = {}
    for holder in sorted(volumes):
        for entry in volumes[holder].metas:
            key = (entry.step, entry.node_rank)
            if key not in named or entry.node_rank == holder:
                named[key] = entry
    digests = frozenset().union(*(holdings.digests for holdings in volumes.values()))
    return Holdings(metas=tuple(named.values()), digests=digests)


def newest_complete(holdings: Holdings, *, nodes: int, replicas: int | None) -> Candidate | None:
    """The newest step for which ranks 0..nodes-1 have a ``.meta`` and every hash is there."""
    steps: dict[int, dict[int, str]] = {}
    for entry in holdings.metas:
        steps.setdefault(entry.step, {})[entry.node_rank] = entry.digest
    for step in sorted(steps, reverse=True):
        digests = infer_missing(steps[step], nodes=nodes, replicas=replicas)
        if all(digests.get(rank) in holdings.digests for rank in range(nodes)):
            return Candidate(step=step, digests={rank: digests[rank] for rank in range(nodes)})
    return None


def infer_missing(
    digests: Mapping[int, str], *, nodes: int, replicas: int | None
) -> dict[int, str]:
    """Adds the hashes that follow from another replica of the same column.

    With `replicas` identical replicas, ranks that are a replica's size apart hold the same data. A
    column that contradicts itself is left as it is.
    """
    known = dict(digests)
    if not replicas or replicas == 1:
        return known
    size = nodes // replicas
    for column in range(size):
        ranks = range(column, nodes, size)
        found = {known[rank] for rank in ranks if rank in known}
        if len(found) == 1:
            known.update(dict.fromkeys(ranks, found.pop()))
    return known


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
