"""How the nodes of a run meet and agree: in memory, the coordinator's part of the protocol."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from mtcheckpoint._replicator.settings import RunSettings
from mtcheckpoint._replicator.volume import Volume

__all__ = [
    "Board",
    "Lobby",
    "Member",
    "Run",
    "RunEndedError",
    "RunFailedError",
    "RunSignal",
    "StoppedError",
]


class RunSignal(Exception):
    """Why a node leaves what it is doing; never an error of its own."""


class StoppedError(RunSignal):
    """The replicator is being stopped."""


class RunEndedError(RunSignal):
    """The run is over for this node; it waits for its next ``replicator.yaml``."""


class RunFailedError(RunSignal):
    """The run cannot go on; training is told by ``replicator.failed``."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A node in a run."""

    volume: Volume
    settings: RunSettings

    @property
    def rank(self) -> int:
        return self.settings.node_rank

    def __str__(self) -> str:
        return f"node rank {self.rank} ({self.volume})"


class Board:
    """One value from each rank of a run; a later value of a rank replaces its earlier one."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._values: dict[int, Any] = {}
        self._lock = threading.Lock()

    def post(self, rank: int, value: Any) -> None:
        with self._lock:
            self._values[rank] = value

    def values(self) -> Mapping[int, Any]:
        with self._lock:
            return dict(self._values)

    def all(self) -> Mapping[int, Any] | None:
        """The values by rank once every rank has posted, else None."""
        values = self.values()
        return values if len(values) == self._nodes else None


class Run:
    """The nodes that train one job together, from the first one that asks to the end.

    Boards carry what the nodes tell each other. A value that belongs to a step carries the step, so
    that nobody mistakes the previous round's for this one's.

    Attributes:
        inventories: `Holdings` of each rank.
        choice: rank 0's `RestoreChoice`.
        fetched: True from each rank that has what it restores, or gave up on it.
        taken: the step that each rank took last.
        copied: each rank's report on its copies of that step.
        decision: rank 0's answer to these.
        uploaded: each rank's part of a backup.
        backed_up: the folder of each rank's last finished backup.
        replicated_step: newest step that all nodes hold with their copies.
    """

    def __init__(self, job: str, nodes: int, replicas: int | None) -> None:
        self.job = job
        self.nodes = nodes
        self.replicas = replicas
        self.members: dict[int, Member] = {}
        self.inventories = Board(nodes)
        self.choice = Board(1)
        self.fetched = Board(nodes)
        self.taken = Board(nodes)
        self.copied = Board(nodes)
        self.decision = Board(1)
        self.uploaded = Board(nodes)
        self.backed_up = Board(nodes)
        self.replicated_step: int | None = None
        self.ended: str | None = None
        self.failed: str | None = None
        self.has_waited_in_vain = False
        self._writers = 0
        self._lock = threading.Lock()

    def missing_ranks(self) -> list[int]:
        return [rank for rank in range(self.nodes) if rank not in self.members]

    def is_complete(self) -> bool:
        return not self.missing_ranks()

    def is_over(self) -> bool:
        return self.ended is not None or self.failed is not None

    def end(self, reason: str) -> None:
        """Ends the run for all nodes; the first reason counts."""
        with self._lock:
            self.ended = self.ended or reason

    def fail(self, reason: str) -> None:
        """Ends the run for all nodes, each of which writes `reason` to ``replicator.failed``."""
        with self._lock:
            self.failed = self.failed or reason

    def check(self) -> None:
        """Raises when the run is over."""
        if self.failed is not None:
            raise RunFailedError(self.failed)
        if self.ended is not None:
            raise RunEndedError(self.ended)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around writes into other nodes' volumes: none begins after the end of the run."""
        with self._lock:
            self.check()
            self._writers += 1
        try:
            yield
        finally:
            with self._lock:
                self._writers -= 1

    def is_quiet(self) -> bool:
        """Whether nobody of this run writes into another node's volume any more."""
        with self._lock:
            return self.is_over() and not self._writers

    def join(self, member: Member) -> None:
        self.members[member.rank] = member

    def fault_of(self, member: Member) -> str | None:
        """Why `member` cannot be in one run with those who are in it."""
        for other in self.members.values():
            if other.rank == member.rank:
                what = f"both name node-rank {member.rank}"
            elif (mine := _shared(member.settings)) != (theirs := _shared(other.settings)):
                what = f"differ in nodes, assume-data-parallelism or framework: {mine} and {theirs}"
            else:
                continue
            return (
                f"job {self.job}: {member.volume} and {other.volume} {what}. Ranks are 0..nodes-1,"
                " each once, and the rest is equal on all nodes: correct replicator.yaml and"
                " restart all nodes"
            )
        return None


def _shared(settings: RunSettings) -> tuple[object, ...]:
    return settings.nodes, settings.replicas, settings.framework


class Lobby:
    """Where the nodes of the runs that are not complete yet wait for the others."""

    def __init__(self) -> None:
        self._forming: dict[str, Run] = {}
        self._lock = threading.Lock()

    def enter(self, member: Member, *, is_late: bool = True) -> Run | None:
        """Joins the run of the member's job, or begins it.

        Args:
            is_late: those who wait would have noticed by now if they had got another
                ``replicator.yaml`` than the one that `member` contradicts. False: None is returned
                for a contradiction.

        Raises:
            RunFailedError: the member contradicts those who wait; they are told too.
        """
        settings = member.settings
        with self._lock:
            run = self._forming.get(settings.job_name)
            if run is None or run.is_over():
                run = Run(settings.job_name, settings.nodes, settings.replicas)
                self._forming[run.job] = run
            if fault := run.fault_of(member):
                if not is_late:
                    return None
                run.fail(fault)
                del self._forming[run.job]
                raise RunFailedError(fault)
            run.join(member)
            if run.is_complete():
                del self._forming[run.job]
            return run

    def fail_mismatched(self, run: Run) -> None:
        """To be called when `run` has waited in vain for members, once.

        Two such runs that would be complete together are failed: their nodes belong together, and
        one of them names another job.
        """
        with self._lock:
            run.has_waited_in_vain = True
            for other in list(self._forming.values()):
                if not other.has_waited_in_vain or other.is_over() or not _complement(run, other):
                    continue
                text = _mismatch_text(run, other)
                for failed in (run, other):
                    failed.fail(text)
                    self._forming.pop(failed.job, None)


def _complement(one: Run, other: Run) -> bool:
    ranks = [*one.members, *other.members]
    return one.nodes == other.nodes and sorted(ranks) == list(range(one.nodes))


def _mismatch_text(one: Run, other: Run) -> str:
    names = [
        f"{member.volume} names job {run.job} (rank {rank} of {run.nodes})"
        for run in (one, other)
        for rank, member in sorted(run.members.items())
    ]
    return (
        f"job-name differs among the nodes of one run: {'; '.join(names)}. Give all nodes the same"
        " job-name and restart them"
    )
