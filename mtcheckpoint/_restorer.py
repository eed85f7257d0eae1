"""Restores one candidate after another until one is whole, the same one on all processes."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from mtcheckpoint import _events
from mtcheckpoint._clock import Deadline
from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._reader import ReadPlan, plan_reads, read_state, tensorstore_context
from mtcheckpoint._restore import box_shape
from mtcheckpoint._shares.contents import ShareContents, read_contents, read_extras
from mtcheckpoint._shares.identity import decode_extras
from mtcheckpoint._shares.peers import ShareServer
from mtcheckpoint._shares.places import LocalPlace, PeerPlace, Place, Tier, farthest
from mtcheckpoint._target import resolve_target
from mtcheckpoint.errors import (
    MtCheckpointError,
    RestoreError,
    ShareError,
    StructureMismatchError,
)

__all__ = ["Candidate", "PassedOver", "RestoreReport", "RestoredState", "Restorer"]

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PassedOver:
    """A candidate that was not restored.

    Attributes:
        step: its step.
        source: where it lies.
        reason: what is wrong with it, by process.
    """

    step: int
    source: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestoreReport:
    """How a restore went.

    Attributes:
        seconds: by phase, on this process.
        bytes_by_tier: bytes that this process read, by tier.
        passed_over: newer candidates that could not be restored, and why.
    """

    seconds: Mapping[str, float]
    bytes_by_tier: Mapping[Tier, int]
    passed_over: tuple[PassedOver, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestoredState:
    """A state that came back.

    Attributes:
        step: the step it is of.
        state: the tree that was asked for.
        tier: the farthest place that a part of it came from on any process: ``"local"`` memory,
            a ``"peer"``'s, or the ``"backup"``.
        extras: the extras of every process of the run that saved it, in rank order.
        report: how it went.
    """

    step: int
    state: Any
    tier: Tier
    extras: tuple[Mapping[str, Any], ...]
    report: RestoreReport


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A step that may be whole somewhere.

    Attributes:
        step: its step.
        source: where it lies, for people.
        arrived_from: the tier that this process's share came from before this restore.
        own: this process's share: the one to look at first; None when there is none, or `fault`
            says why it cannot be read.
        others: further shares that every process can reach.
        served: shares in this process's volume that peers may read, by name.
        fault: why this process's share is known to be bad.
    """

    step: int
    source: str
    arrived_from: Tier
    own: Place | None
    others: tuple[Place, ...] = ()
    served: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    fault: str | None = None


class Restorer:
    """Reads candidates. Every method is called on all processes with the same candidate."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        mesh: jax.sharding.Mesh,
        address: str,
        concurrent_bytes: int,
        timeout_secs: float,
    ) -> None:
        """
        Args:
            coordinator: agreement with the other processes.
            mesh: the mesh of the job.
            address: where the other hosts reach this one.
            concurrent_bytes: bytes on the way at once.
            timeout_secs: limit of each wait, and of reading a whole state.
        """
        self._coordinator = coordinator
        self._mesh = mesh
        self._address = address
        self._concurrent_bytes = concurrent_bytes
        self._timeout_secs = timeout_secs
        self._context = tensorstore_context()

    def restore(
        self,
        candidates: Iterator[Candidate | PassedOver],
        request: Any,
        seconds: Mapping[str, float],
    ) -> RestoredState | None:
        """Restores the first candidate that is whole; None when there is no candidate at all.

        Raises:
            RestoreError: there were candidates, and none of them is whole.
            StructureMismatchError: the request does not fit what was saved.
            TierUnreadableError: a place could not be read, so it is not known what it holds.
        """
        passed_over: list[PassedOver] = []
        for candidate in candidates:
            if isinstance(candidate, PassedOver):
                passed_over.append(candidate)
                continue
            attempt = _Attempt(self, candidate, request, dict(seconds))
            restored = attempt.run(tuple(passed_over))
            if restored is not None:
                return restored
            passed_over.append(attempt.passed_over())
        if passed_over:
            listed = "\n  ".join(f"step {p.step} ({p.source}): {p.reason}" for p in passed_over)
            raise RestoreError(
                f"none of {len(passed_over)} candidates could be restored:\n  {listed}\nNothing was"
                " deleted. To start anew, use another run_name or an empty backup_root"
            )
        return None


class _Attempt:
    """One candidate, looked at, planned and read."""

    def __init__(
        self, restorer: Restorer, candidate: Candidate, request: Any, seconds: dict[str, float]
    ) -> None:
        self._r = restorer
        self._candidate = candidate
        self._request = request
        self._seconds = seconds
        self._faults: Mapping[int, str] = {}
        self._own_faults: Mapping[int, str] = {}

    def run(self, passed_over: tuple[PassedOver, ...]) -> RestoredState | None:
        """The restored state, or None when the candidate is not whole on some process."""
        with self._timed("open"):
            own = self._together("open", self._open_own)
        # A share that cannot be read need not be the end: others may hold the same chunks.
        self._own_faults, self._faults = self._faults, {}
        if not self._agreed_on_save(own):
            return None
        with self._timed("plan"):
            plan = self._together("plan", lambda: self._plan([own] if own else []))
        if self._incomplete(plan):
            return self._run_with_others(own, passed_over)
        return self._read(plan, passed_over)

    def passed_over(self) -> PassedOver:
        faults = {**self._own_faults, **self._faults}
        names = self._r._coordinator.names(faults)
        reasons = [f"{n}: {text}" for n, text in zip(names, faults.values(), strict=True)]
        entry = PassedOver(
            step=self._candidate.step, source=self._candidate.source, reason="; ".join(reasons)
        )
        _events.happened("restore/passed_over", step=entry.step, reason=entry.reason)
        return entry

    # The own share first: on an unchanged topology it holds all that this process needs.

    def _open_own(self) -> ShareContents | None:
        if self._candidate.fault is not None:
            raise ShareError(self._candidate.fault, place=self._candidate.source)
        if self._candidate.own is None:
            return None
        return read_contents(self._candidate.own, self._r._context)

    def _agreed_on_save(self, own: ShareContents | None) -> bool:
        """True when the shares that could be opened are of one save, and there is one at all."""
        identity = own.identity if own else None
        stale = identity is not None and identity.step != self._candidate.step
        told = self._r._coordinator.gather(
            "restore/save",
            # A share of an earlier step with the same content names that step: not a fault.
            {"save_id": identity.save_id if identity and not stale else None},
        )
        ids = {t["save_id"] for t in told if t["save_id"] is not None}
        if len(ids) > 1:
            self._faults = {
                process: f"its share is of the save {t['save_id']}"
                for process, t in enumerate(told)
                if t["save_id"] is not None
            }
            return False
        return True

    def _plan(self, shares: Sequence[ShareContents]) -> ReadPlan | None:
        if not shares:
            return None
        target = resolve_target(self._request, shares[0], self._r._mesh)
        return plan_reads(target, shares)

    def _incomplete(self, plan: ReadPlan | None) -> bool:
        """True when some process needs more than its own share."""
        short = plan is None or bool(plan.missing)
        return any(self._r._coordinator.gather("restore/short", short))

    # All shares, wherever they lie.

    def _run_with_others(
        self, own: ShareContents | None, passed_over: tuple[PassedOver, ...]
    ) -> RestoredState | None:
        with self._serving() as peers, self._timed("open_others"):
            opened = self._together("open others", lambda: self._open_others(own, peers))
            if self._faults or opened is None:
                return None
            plan = self._together("plan all", lambda: self._plan(opened))
            if self._missing_anywhere(plan):
                return None
            return self._read(plan, passed_over)

    @contextlib.contextmanager
    def _serving(self) -> Iterator[list[PeerPlace]]:
        """Serves this process's shares to the others; yields theirs. Stops when all are done."""
        token = self._r._coordinator.decide(
            "restore/token", None, lambda _: secrets.token_urlsafe(32)
        )
        with ShareServer(self._candidate.served, token=token, host=self._r._address) as server:
            told = self._r._coordinator.gather(
                "restore/servers", {"url": server.url, "shares": sorted(self._candidate.served)}
            )
            here = self._r._coordinator.process
            yield [
                PeerPlace(f"{t['url']}/{share}", token, self._r._timeout_secs)
                for process, t in enumerate(told)
                if process != here
                for share in t["shares"]
            ]
            self._r._coordinator.gather("restore/served", None)

    def _open_others(
        self, own: ShareContents | None, peers: Sequence[PeerPlace]
    ) -> list[ShareContents]:
        opened = [own] if own is not None else []
        here = [LocalPlace(path) for path in self._candidate.served.values()]
        places: list[Place] = [*here, *peers, *self._candidate.others]
        for place in places:
            if own is not None and place == own.place:
                continue
            with contextlib.suppress(ShareError):  # the union may be whole without it
                opened.append(read_contents(place, self._r._context))
        if not opened:
            raise ShareError(
                f"step {self._candidate.step}: no share can be read", place=self._candidate.source
            )
        newest = [c for c in opened if c.identity and c.identity.step == self._candidate.step]
        ids = {c.identity.save_id for c in newest if c.identity}
        if len(ids) > 1:
            raise ShareError(
                f"step {self._candidate.step}: shares of {len(ids)} different saves",
                place=self._candidate.source,
            )
        return opened

    def _missing_anywhere(self, plan: ReadPlan | None) -> bool:
        missing = plan.missing if plan is not None else {"": ()}
        text = ""
        if missing:
            name, chunks = next(iter(missing.items()))
            text = (
                f"nobody has chunk {chunks[0] if chunks else '?'} of leaf {name!r}"
                f" ({len(missing)} leaves are incomplete)"
            )
        told = self._r._coordinator.gather("restore/missing", text)
        self._faults = {process: text for process, text in enumerate(told) if text}
        return bool(self._faults)

    # Reading.

    def _read(
        self, plan: ReadPlan | None, passed_over: tuple[PassedOver, ...]
    ) -> RestoredState | None:
        assert plan is not None
        with self._timed("read"):
            state = self._together(
                "read",
                lambda: (
                    read_state(
                        plan,
                        context=self._r._context,
                        concurrent_bytes=self._r._concurrent_bytes,
                        deadline=Deadline.after(self._r._timeout_secs),
                    ),
                    self._extras(plan),
                ),
            )
        if self._faults or state is None:
            return None
        amounts = _bytes_by_tier(plan)
        here = farthest([self._candidate.arrived_from, *amounts])
        tiers: list[Tier] = list(self._r._coordinator.gather("restore/tier", here))
        restored = RestoredState(
            step=self._candidate.step,
            state=state[0],
            tier=farthest(tiers),
            extras=state[1],
            report=RestoreReport(
                seconds=self._seconds, bytes_by_tier=amounts, passed_over=passed_over
            ),
        )
        _events.happened(
            "restore/done",
            step=restored.step,
            tier=restored.tier,
            source=self._candidate.source,
            seconds=sum(self._seconds.values()),
        )
        return restored

    def _extras(self, plan: ReadPlan) -> tuple[Mapping[str, Any], ...]:
        """The extras of this step; a share with the content of an earlier step has older ones."""
        fitting = [
            share
            for share in plan.shares
            if share.identity is not None and share.identity.step == self._candidate.step
        ]
        return tuple(decode_extras(e) for e in read_extras((fitting or plan.shares)[0].place))

    # Acting together.

    def _together(self, topic: str, attempt: Callable[[], _T]) -> _T | None:
        """Runs `attempt` on all processes; None, and `_faults` set, when the candidate is bad.

        What is not the candidate's fault is raised on all: a request that does not fit, a place
        that cannot be read.
        """
        result, fault = None, None
        raised: MtCheckpointError | None = None
        try:
            result = attempt()
        except ShareError as error:
            fault = str(error)
        except MtCheckpointError as error:
            raised = error
        kind = type(raised).__name__ if raised else ""
        told = self._r._coordinator.gather(
            f"restore/{topic}", [fault, kind, str(raised) if raised else ""]
        )
        if raised is not None:
            raise raised
        self._raise_alike(topic, told)
        faults = {process: text for process, (text, _, _) in enumerate(told) if text}
        if faults:
            self._faults = {**self._faults, **faults}
        return result

    def _raise_alike(self, topic: str, told: Sequence[Sequence[Any]]) -> None:
        failed = [process for process, (_, kind, _) in enumerate(told) if kind]
        if not failed:
            return
        first = failed[0]
        names = self._r._coordinator.names(failed)
        message = f"{', '.join(names)}: {told[first][2]}"
        if told[first][1] == "StructureMismatchError":
            raise StructureMismatchError(message, paths=[])
        raise RestoreError(f"restore of step {self._candidate.step}, {topic}: {message}")

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - begun


def _bytes_by_tier(plan: ReadPlan) -> dict[Tier, int]:
    """Bytes that a plan reads, whole chunks counted by their tier."""
    amounts: dict[Tier, int] = {}
    for leaf, sources in zip(plan.target.leaves, plan.leaves, strict=True):
        if leaf.dtype is None:
            continue
        box = tuple((0, size) for size in leaf.leaf.chunk_shape)
        chunk_bytes = int(leaf.dtype.itemsize)
        for extent in box_shape(box):
            chunk_bytes *= extent
        for share in sources.sources.values():
            tier = plan.shares[share].place.tier
            amounts[tier] = amounts.get(tier, 0) + chunk_bytes
    return amounts
