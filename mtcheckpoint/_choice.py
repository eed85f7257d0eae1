"""Which saves the cluster's memory holds, and what the replicator will make of them. Pure.

Steps alone do not tell: a step can be saved twice under two topologies, and a node that sat out a
run keeps shares of an older one. So shares are put together by the id of their save, and each save
is judged by its own topology.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtcheckpoint._handshake.offers import Holdings, MetaEntry, merge, newest_complete

__all__ = ["Choice", "Save", "VolumeSummary", "choose", "saves_of"]

# Saves that are offered to the reader; the replicator keeps one or two.
_OFFERED_SAVES = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One save, as far as the cluster's memory holds it.

    Attributes:
        step: the step.
        save_id: of the save; those of our own saves sort by time.
        nodes: ranks it was written by; 0 when its shares do not say.
        held: ranks whose shares are somewhere in memory.
    """

    step: int
    save_id: str
    nodes: int
    held: tuple[int, ...]

    @property
    def gone(self) -> tuple[int, ...]:
        """Ranks whose shares are nowhere in memory."""
        return tuple(sorted(set(range(self.nodes)) - set(self.held)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VolumeSummary:
    """One process's inventory as it goes to the others.

    Attributes:
        node_rank: of the process now.
        shares: step, save id, rank, nodes and hash of each share.
        metas: step, rank and hash of each ``.meta``.
        digests: the hashes whose data is there.
    """

    node_rank: int
    shares: tuple[tuple[int, str, int, int, str | None], ...]
    metas: tuple[tuple[int, int, str], ...]
    digests: tuple[str, ...]

    def to_json(self) -> list[Any]:
        return [self.node_rank, self.shares, self.metas, self.digests]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> VolumeSummary:
        rank, shares, metas, digests = value
        return cls(
            node_rank=rank,
            shares=tuple(tuple(share) for share in shares),
            metas=tuple(tuple(meta) for meta in metas),
            digests=tuple(digests),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What is in memory, the newest first.

    Attributes:
        saves: the newest saves.
        offered: position of the save that the replicator will offer to this run; None when it will
            offer none of them, or a mixture, or would clear what is needed if that save is bad.
    """

    saves: tuple[Save, ...]
    offered: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "saves": [dataclasses.asdict(save) for save in self.saves],
            "offered": self.offered,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Choice:
        saves = tuple(Save(**{**save, "held": tuple(save["held"])}) for save in value["saves"])
        return cls(saves=saves, offered=value["offered"])


def choose(
    volumes: Sequence[VolumeSummary], *, nodes: int, replicas: int | None, offers: bool = True
) -> Choice:
    """Puts the inventories of all processes together.

    Args:
        volumes: of all processes.
        nodes: nodes of this run.
        replicas: data-parallel replicas that the replicator is told of; None for copies.
        offers: whether there is a replicator, which offers a save after the handshake.
    """
    saves = sorted(saves_of(volumes), key=lambda save: (save.step, save.save_id), reverse=True)
    digests = _offered_digests(volumes, nodes=nodes, replicas=replicas) if offers else None
    if digests is not None and _is_contested(volumes, digests[0]):
        digests = None
    known = {
        digest: save_id
        for volume in volumes
        for step, save_id, digest in _resolved(volume.shares, saves)
        if digest is not None and digests is not None and step == digests[0]
    }
    offered = None
    if digests is not None:
        step, by_rank = digests
        ids = {known.get(digest) for digest in by_rank.values()}
        offered = next(
            (
                position
                for position, save in enumerate(saves)
                if save.step == step and save.nodes in (0, nodes) and ids == {save.save_id}
            ),
            None,
        )
    if offered is not None and _clears_a_spare(volumes, saves, offered):
        offered = None
    kept = tuple(saves[:_OFFERED_SAVES])
    return Choice(saves=kept, offered=offered if offered in range(len(kept)) else None)


def _clears_a_spare(volumes: Iterable[VolumeSummary], saves: Sequence[Save], offered: int) -> bool:
    """Whether an older whole save lies there, or a copy of a share that no ``.meta`` names."""
    if any(not save.gone for save in saves[offered + 1 :]):
        return True
    save = saves[offered]
    return any(
        (step, save_id) == (save.step, save.save_id)
        and digest not in {named for _, _, named in volume.metas}
        for volume in volumes
        for step, save_id, _, _, digest in volume.shares
    )


def _is_contested(volumes: Iterable[VolumeSummary], step: int) -> bool:
    """Whether nodes name different data for one share: which it will take, nobody can foresee."""
    named: dict[int, set[str]] = {}
    for volume in volumes:
        for meta_step, rank, digest in volume.metas:
            if meta_step == step:
                named.setdefault(rank, set()).add(digest)
    return any(len(digests) > 1 for digests in named.values())


def saves_of(volumes: Iterable[VolumeSummary]) -> list[Save]:
    """Shares grouped by save."""
    found: dict[tuple[int, str], list[tuple[int, int]]] = {}
    stale: list[tuple[int, int, int]] = []
    for volume in volumes:
        for step, save_id, rank, nodes, _ in volume.shares:
            if save_id:
                found.setdefault((step, save_id), []).append((rank, nodes))
            else:
                stale.append((step, rank, nodes))
    for step, rank, nodes in stale:
        same = [key for key, shares in found.items() if key[0] == step and shares[0][1] == nodes]
        key = same[0] if len(same) == 1 else (step, _unchanged(nodes))
        found.setdefault(key, []).append((rank, nodes))
    return [
        Save(
            step=step,
            save_id=save_id,
            nodes=max(nodes for _, nodes in shares),
            held=tuple(sorted({rank for rank, _ in shares})),
        )
        for (step, save_id), shares in found.items()
    ]


def _unchanged(nodes: int) -> str:
    """The id of a save all of whose known shares have the content of an earlier step."""
    return f"unchanged:{nodes}"


def _resolved(shares: Any, saves: Sequence[Save]) -> Any:
    """Shares with the ids of the saves that they count to."""
    for step, save_id, rank, nodes, digest in shares:
        if not save_id:
            fitting = [
                s.save_id for s in saves if s.step == step and s.nodes == nodes and rank in s.held
            ]
            save_id = fitting[0] if len(fitting) == 1 else ""
        yield step, save_id, digest


def _offered_digests(
    volumes: Sequence[VolumeSummary], *, nodes: int, replicas: int | None
) -> tuple[int, Mapping[int, str]] | None:
    """The step that the replicator will choose, and the hash that each rank will get."""
    holdings = {
        volume.node_rank: Holdings(
            metas=tuple(
                MetaEntry(step=step, node_rank=rank, digest=digest)
                for step, rank, digest in volume.metas
            ),
            digests=frozenset(volume.digests),
        )
        for volume in volumes
    }
    found = newest_complete(merge(holdings), nodes=nodes, replicas=replicas)
    return (found.step, found.digests) if found is not None else None
