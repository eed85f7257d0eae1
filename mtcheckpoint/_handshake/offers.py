"""Which step a replicator offers, given what lies where. Pure.

The embedded replicator chooses by this. The client foresees by it what a replicator will choose,
and so what its clean-up will destroy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

__all__ = ["Candidate", "Holdings", "MetaEntry", "infer_missing", "merge", "newest_complete"]


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
