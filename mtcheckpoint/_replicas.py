"""Replicas that should be equal and are not, told from the seals of their shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mtcheckpoint._restore import Chunk
from mtcheckpoint._shares.seal import Seal, Summary, digest_of

__all__ = ["leaf_digests", "uneven_groups", "unequal_leaves", "unequal_twins"]


def unequal_leaves(seals: Mapping[int, Seal]) -> set[tuple[str, tuple[int, ...]]]:
    """Leaves of which several ranks hold the same chunk, and not the same content; those ranks.

    Args:
        seals: of one save, by rank.
    """
    first: dict[str, dict[Chunk, str]] = {}
    unequal: set[tuple[str, Chunk]] = set()
    # A rank's own chunks are all different ones: one alone has nothing to be compared with.
    for seal in seals.values() if len(seals) > 1 else ():
        for name, chunks in seal.chunks.items():
            known = first.setdefault(name, {})
            for chunk, (_, checksum) in chunks.items():
                if known.setdefault(chunk, checksum) != checksum:
                    unequal.add((name, chunk))
    return {
        (name, tuple(sorted(r for r, s in seals.items() if chunk in s.chunks.get(name, ()))))
        for name, chunk in unequal
    }


def uneven_groups(ranks: Sequence[Summary]) -> list[tuple[int, ...]]:
    """Groups of ranks that hold the same parts of the state, and not the same content."""
    groups: dict[str, dict[str, list[int]]] = {}
    for rank, (which, what) in enumerate(ranks):
        groups.setdefault(which, {}).setdefault(what, []).append(rank)
    return [
        tuple(sorted(rank for ranks in found.values() for rank in ranks))
        for found in groups.values()
        if len(found) > 1
    ]


def leaf_digests(seal: Seal) -> dict[str, str]:
    """One checksum a leaf, for twins to compare."""
    return {
        name: digest_of(repr(sorted(chunks.items())).encode())[:16]
        for name, chunks in seal.chunks.items()
    }


def unequal_twins(
    groups: Iterable[tuple[int, ...]], leaves: Mapping[int, Mapping[str, str]]
) -> set[tuple[str, tuple[int, ...]]]:
    """The leaves on which the ranks of each group differ, as far as their checksums are known."""
    found = set()
    for group in groups:
        known = {rank: leaves[rank] for rank in group if rank in leaves}
        names = sorted({name for digests in known.values() for name in digests})
        differing = [
            name for name in names if len({digests.get(name) for digests in known.values()}) > 1
        ]
        found |= {(name, group) for name in differing or ["?"]}
    return found
