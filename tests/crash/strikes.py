"""How runs are struck: what there is to draw from, and what was struck how often."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

from tests.crash import points

# How far the passes at a point go; one where training or the replicator comes by once in a run.
_MANY = 6
_FEW = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """How a run ends.

    Attributes:
        kind: ``kill``, ``point``, ``full`` (the victim's disk, and killed later), ``replicator``
            (killed first), ``replicator point``, or ``end``.
        die: the point, for processes that die at one: its name, before or after, which pass.
        victim: the rank that is struck.
        commits: committed steps to wait for.
        delay: seconds after them.
    """

    kind: str
    die: list[Any] | None
    victim: int
    commits: int
    delay: float


QUIET_END = Strike(kind="end", die=None, victim=0, commits=3, delay=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prospects:
    """What the next run could be like, so that only points are armed that it comes by.

    Attributes:
        replicated: there is a replicator.
        mounted: disks can be filled.
        restores: there is something whole to restore.
        offered: the replicator will offer something, if the number of nodes stays.
        nodes: the number of nodes, if it stays.
        salvages: the numbers of nodes with a whole save in memory that the replicator will not
            offer to them, each with the ranks that hold a share of it.
    """

    replicated: bool
    mounted: bool
    restores: bool
    offered: bool
    nodes: int
    salvages: dict[int, list[int]]


def new_strike(rng: random.Random, ahead: Prospects) -> tuple[Strike, int]:
    """A strike, and the number of nodes of the run that is struck."""
    kinds = ["kill", "kill", "point", "point", "point", "end"]
    if ahead.replicated:
        kinds += ["replicator", "replicator point", "replicator point"]
    if ahead.mounted:
        kinds += ["full", "full"]
    kind = rng.choice(kinds)
    nodes, die = ahead.nodes, None
    victims = list(range(nodes))
    if kind == "point":
        name = rng.choice(_points_of_training(ahead))
        if name in points.SALVAGING:
            nodes = rng.choice(sorted(ahead.salvages))
            victims = ahead.salvages[nodes] if name == "pin" else list(range(nodes))
        die = _a_pass(rng, name, _MANY if name in points.TRAINING else points.PASSES[name])
    elif kind == "replicator point":
        name = rng.choice(_points_of_the_replicator(ahead))
        die = _a_pass(rng, name, nodes if name in points.ONCE_PER_NODE else _FEW)
    strike = Strike(
        kind=kind,
        die=die,
        victim=rng.choice(victims),
        commits=rng.randint(1, 5),
        delay=rng.choice([0.0, rng.random() * 0.3]),
    )
    return strike, nodes


def _a_pass(rng: random.Random, name: str, most: int) -> list[Any]:
    return [name, rng.choice(["before", "after"]), rng.randint(1, most)]


def _points_of_training(ahead: Prospects) -> list[str]:
    return [
        *points.TRAINING,
        *(["handshake"] if ahead.replicated else []),
        *(["read"] if ahead.restores else []),
        *(points.SALVAGING if ahead.salvages else []),
    ]


def _points_of_the_replicator(ahead: Prospects) -> list[str]:
    away = set()
    if ahead.nodes == 1:
        away |= {"receive", "copy"}
    if not ahead.offered:
        away |= {"link"}
    return [name for name in points.REPLICATOR if name not in away]


class Tally:
    """How often each point was armed, and how often a process ended there."""

    def __init__(self) -> None:
        self.armed: collections.Counter[tuple[str, str]] = collections.Counter()
        self.struck: collections.Counter[tuple[str, str]] = collections.Counter()
        self.others: collections.Counter[str] = collections.Counter()

    def note(self, strike: Strike, struck: bool) -> None:
        if strike.die is None:
            self.others[strike.kind] += 1
            return
        name, when, _ = strike.die
        self.armed[name, when] += 1
        self.struck[name, when] += struck

    def add(self, other: Tally) -> None:
        self.armed.update(other.armed)
        self.struck.update(other.struck)
        self.others.update(other.others)

    def table(self) -> Iterator[str]:
        """Lines for people."""
        row = "{:14}{:>10}{:>10}{:>10}{:>10}"
        yield row.format("point", "before:", "", "after:", "")
        yield row.format("", "armed", "died", "armed", "died")
        for name in points.ALL:
            yield row.format(name, *self._counts(name))
        for kind, count in sorted(self.others.items()):
            yield f"{kind}: {count}"

    def never_struck(self) -> list[str]:
        return [
            f"{when} {name}"
            for name in points.ALL
            for when in ("before", "after")
            if not self.struck[name, when]
        ]

    def _counts(self, name: str) -> Sequence[int]:
        return [
            counter[name, when]
            for when in ("before", "after")
            for counter in (self.armed, self.struck)
        ]
