"""One attempt to restore a candidate: looked at, planned and read, in step with the others."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import tensorstore as ts

from mtcheckpoint import _events
from mtcheckpoint._clock import Deadline, run_within
from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._reader import ReadPlan, read_state, tensorstore_context
from mtcheckpoint._replicas import leaf_digests, unequal_leaves, unequal_twins, uneven_groups
from mtcheckpoint._restored import Candidate, PassedOver, Request, RestoredState, RestoreReport
from mtcheckpoint._shares.contents import is_unreadable, read_extras
from mtcheckpoint._shares.identity import decode_extras
from mtcheckpoint._shares.peers import ShareServer
from mtcheckpoint._shares.places import LocalPlace, PeerPlace, Place, Tier, farthest
from mtcheckpoint._shares.seal import Verify
from mtcheckpoint._sources import SaveSummary, Sources
from mtcheckpoint.errors import (
    RestoreError,
    ShareError,
    StructureMismatchError,
    TierUnreadableError,
    WaitTimeoutError,
)

__all__ = ["Attempt", "Means", "bad_copy"]

_T = TypeVar("_T")

# A bad copy is found while reading; each round leaves out those that were found.
_READ_ROUNDS = 4

# A state, and the extras of all processes of the save.
_Found = tuple[Any, tuple[Mapping[str, Any], ...]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """What all attempts of a process are made with.

    Attributes:
        coordinator: agreement with the other processes.
        mesh: the mesh of the job.
        address: where the other hosts reach this one.
        concurrent_bytes: bytes on the way at once.
        timeout_secs: limit of each wait, and of reading a whole state.
        verify: how much is compared with the seals.
        context: TensorStore's pools and limits.
        bad_places: takes what was found bad: local ones until they are condemned, those in backups
            as long as this process lives.
    """

    coordinator: Coordinator
    mesh: jax.sharding.Mesh
    address: str
    concurrent_bytes: int
    timeout_secs: float
    verify: Verify = "full"
    context: ts.Context = dataclasses.field(default_factory=tensorstore_context)
    bad_places: list[Place] = dataclasses.field(default_factory=list)

    def is_known_to_be_bad(self, place: Place) -> bool:
        """Whether a copy in a backup was found bad before."""
        return place.tier == "backup" and any(place.name == bad.name for bad in self.bad_places)


class Attempt:
    """One candidate, looked at, planned and read. Every step is taken on all processes."""

    def __init__(
        self, means: Means, candidate: Candidate, request: Request, seconds: dict[str, float]
    ) -> None:
        self._means = means
        self._coordinator = means.coordinator
        self._candidate = candidate
        self._request = request
        self._seconds = seconds
        self._faults: Mapping[int, str] = {}
        # What each process has told of bad copies, in a strict restore.
        self._bad: Sequence[Sequence[str]] = ()
        self._notes: list[str] = []
        self._own: Mapping[int, LocalPlace] = {}
        self._save: SaveSummary | None = None
        self._sources = self._sources_of({})

    def run(self, passed_over: tuple[PassedOver, ...]) -> RestoredState | None:
        """The restored state, or None when the candidate is not whole on some process."""
        with self._timed("open"):
            _, opened = self._together("open", self._open_near, lambda _: self._told_of_opened())
        if self._faults:  # of any process: all go the same way
            self._raise_if_strict()
            return None
        token = opened[0][1]
        if not self._is_one_save([save_ids for save_ids, _ in opened]):
            return None
        with self._timed("plan"):
            plan, lacking = self._together("plan", self._plan_near, self._lacking)
        self._raise_if_strict()
        if not self._faults and not any(text is not None for text in lacking):
            restored = self._read(plan, passed_over)
            if restored is not None:
                return restored
        elif not self._candidate.served:
            self._add_faults(lacking)
            return None
        return self._run_with_others(token, passed_over) if self._candidate.served else None

    def _raise_if_strict(self) -> None:
        """Raises on all processes when one has told of a bad copy, if that is wished for."""
        if not self._request.strict:
            return
        bad = {process: "; ".join(texts) for process, texts in enumerate(self._bad) if texts}
        if bad:
            names = self._coordinator.names(bad)
            listed = "; ".join(f"{n}: {text}" for n, text in zip(names, bad.values(), strict=True))
            raise bad_copy(self._candidate.step, self._candidate.source, listed)

    def _own_bad(self, fault: str | None) -> list[str]:
        """What this process tells the others of bad copies; only a strict restore asks for it."""
        if not self._request.strict:
            return []
        own = [*self._notes, *self._sources.faults, *([fault] if fault else ())]
        return list(dict.fromkeys(own))

    def passed_over(self) -> PassedOver:
        names = self._coordinator.names(self._faults)
        reasons = [f"{n}: {text}" for n, text in zip(names, self._faults.values(), strict=True)]
        if self._candidate.gone:
            gone = ", ".join(map(str, self._candidate.gone))
            reasons.append(f"the shares of its ranks {gone} are gone")
        entry = PassedOver(
            step=self._candidate.step, source=self._candidate.source, reason="; ".join(reasons)
        )
        _events.happened(
            "restore/passed_over", level=logging.WARNING, step=entry.step, reason=entry.reason
        )
        return entry

    # What is near: the own volume, or the backup, which is the same for all. On an unchanged
    # topology the own share holds all that this process needs.

    def _open_near(self) -> None:
        self._own = self._candidate.own()
        if self._candidate.fault is not None:
            self._notes.append(self._candidate.fault)
        elif self._candidate.backup is not None:
            self._sources = self._sources_of(
                {rank: [place] for rank, place in self._candidate.backup().items()}
            )
        else:
            self._sources = self._sources_of({rank: [place] for rank, place in self._own.items()})
        self._sources.open_preferred()

    def _sources_of(self, places: Mapping[int, Sequence[Place]]) -> Sources:
        own = self._candidate.own_rank
        known = self._means.is_known_to_be_bad
        return Sources(
            {rank: [p for p in copies if not known(p)] for rank, copies in places.items()},
            preferred_ranks=[own] if own in places else sorted(self._own),
            turn=self._coordinator.process,
            context=self._means.context,
            verify=self._means.verify,
            timeout_secs=self._means.timeout_secs,
            step=self._candidate.step,
            save=self._save,
            bad_places=self._means.bad_places,
            known=self._sources.opened if self._own else (),
        )

    def _told_of_opened(self) -> tuple[list[str], str | None]:
        """The saves that the opened shares are of; from process 0, the token of this attempt."""
        # A share of an earlier step with the same content names that step: not a fault.
        ids = {
            share.identity.save_id
            for share in self._sources.opened
            if share.identity is not None and share.identity.step == self._candidate.step
        }
        return sorted(ids), secrets.token_urlsafe(32) if self._coordinator.is_leader else None

    def _is_one_save(self, told: Sequence[Sequence[str]]) -> bool:
        """True when the shares that could be opened are of one save."""
        if len({save_id for found in told for save_id in found}) <= 1:
            self._keep_only_its_shares(all(told))
            return True
        self._faults = {
            process: f"its share is of the save {', '.join(found)}"
            for process, found in enumerate(told)
            if found
        }
        return False

    def _keep_only_its_shares(self, all_know: bool) -> None:
        """From here on no share of another save is accepted."""
        own = self._sources.summary(self._candidate.step)
        if not all_know:
            # A share that is gone, or is of an earlier step: others tell what it should be.
            told = self._coordinator.decide(
                "restore/summary", dataclasses.asdict(own) if own else None, _first_known
            )
            own = own or (SaveSummary.from_json(told) if told is not None else None)
        if own is not None:
            self._save = own
            self._sources.keep_only(own)

    def _plan_near(self) -> ReadPlan | None:
        # In memory the own volume may hold nothing of it: then peers do, or nobody.
        if not self._sources.opened and self._candidate.backup is None:
            return None
        return self._plan()

    def _plan(self) -> ReadPlan:
        return self._sources.plan(
            self._request.tree,
            self._means.mesh,
            partial=self._request.partial,
            cast=self._request.cast,
        )

    # All shares in memory, wherever they lie.

    def _run_with_others(
        self, token: str, passed_over: tuple[PassedOver, ...]
    ) -> RestoredState | None:
        self._notes += self._sources.faults
        self._faults = {}
        with self._serving(token) as peers, self._timed("open_others"):
            self._sources = self._sources_of(self._with_peers(peers))
            plan, lacking = self._together("plan with others", self._plan, self._lacking)
            self._raise_if_strict()
            self._add_faults(lacking)
            return None if self._faults else self._read(plan, passed_over)

    @contextlib.contextmanager
    def _serving(self, token: str) -> Iterator[Mapping[int, Sequence[Place]]]:
        """Serves this process's shares to the others; yields theirs.

        What is done meanwhile must end with a round, so that nobody reads any more.
        """
        here, processes = self._coordinator.process, self._coordinator.processes
        shares = {str(rank): place.path for rank, place in self._own.items()}
        with ShareServer(shares, token=token, host=self._means.address) as server:
            told = self._coordinator.gather("restore/servers", [server.url, sorted(shares)])
            peers: dict[int, list[Place]] = {}
            for distance in range(1, processes):
                # Everybody begins with another peer, so that equal copies share the load.
                url, names = told[(here + distance) % processes]
                for name in names:
                    place = PeerPlace(f"{url}/{name}", token, self._means.timeout_secs)
                    peers.setdefault(int(name), []).append(place)
            yield peers

    def _with_peers(self, peers: Mapping[int, Sequence[Place]]) -> dict[int, list[Place]]:
        places: dict[int, list[Place]] = {}
        if self._candidate.fault is None:
            places = {rank: [place] for rank, place in self._own.items()}
        for rank, copies in peers.items():
            places.setdefault(rank, []).extend(copies)
        return places

    def _lacking(self, plan: ReadPlan | None) -> str | None:
        """None when a plan has all; otherwise what it lacks, empty when there is no plan."""
        if plan is None:
            return ""
        text = _missing_text(plan)
        notes = dict.fromkeys((*self._notes, *self._sources.faults))
        if text and notes:
            text += f" ({'; '.join(notes)})"
        return text or None

    def _add_faults(self, told: Sequence[str | None]) -> None:
        missing = {process: text for process, text in enumerate(told) if text}
        self._faults = {**self._faults, **missing}

    # Reading.

    def _read(
        self, plan: ReadPlan | None, passed_over: tuple[PassedOver, ...]
    ) -> RestoredState | None:
        """Reads; where a copy turns out to be bad, from another one, as long as there are any."""
        assert plan is not None
        found: _Found | None = None
        with self._timed("read"):
            for _ in range(_READ_ROUNDS):
                fault, unread = "", False
                if found is None:
                    found, fault, unread = self._try_to_read(plan)
                again = bool(fault) and self._sources.drop(fault)
                whole = self._told_of_whole(plan) if found is not None else None
                told = self._gather_slow(
                    "read", [fault, again, unread, self._own_bad(fault), whole]
                )
                faults = {p: text for p, (text, *_) in enumerate(told) if text}
                self._faults, self._bad = faults, [bad for *_, bad, _ in told]
                self._raise_if_unread([p for p, (_, _, unread, *_) in enumerate(told) if unread])
                self._raise_if_strict()
                if not faults or not all(again for text, again, *_ in told if text):
                    break
                plan = self._plan_again(plan, changed=bool(fault))
                if plan is None:
                    break
                self._faults = faults  # until all was read after all
        if self._faults or found is None or plan is None:
            return None
        return self._restored(plan, found, passed_over, [whole for *_, whole in told])

    def _plan_again(self, plan: ReadPlan, *, changed: bool) -> ReadPlan | None:
        """The plan without the copies that were dropped; None on all when one process has none."""
        self._faults = {}
        attempt = self._plan if changed else functools.partial(_same, plan)
        again, lacking = self._together("plan again", attempt, self._lacking)
        self._add_faults(lacking)
        return None if self._faults else again

    def _told_of_whole(self, plan: ReadPlan) -> tuple[Tier, list[Any], bool]:
        """What the others are told of a state that was read: the farthest tier that it came from,
        leaves that differ between the shares that were opened, and whether replicas do.
        """
        tier = farthest([self._candidate.arrived_from, *_bytes_by_tier(plan)])
        unequal = unequal_leaves(self._sources.seals(self._candidate.step))
        return tier, sorted(unequal), bool(self._uneven_groups())

    def _uneven_groups(self) -> list[tuple[int, ...]]:
        return uneven_groups(self._save.ranks) if self._save is not None else []

    def _try_to_read(self, plan: ReadPlan) -> tuple[_Found | None, str, bool]:
        """State and extras, or what is wrong, and whether that is only that nothing could be read.

        Memory that cannot be read is as good as lost. Of a backup it means that nobody knows
        whether it is whole, so that an older one is no answer.
        """
        deadline = Deadline.after(self._means.timeout_secs)
        try:
            state = read_state(
                plan,
                context=self._means.context,
                concurrent_bytes=self._means.concurrent_bytes,
                deadline=deadline,
            )
            extras = run_within(
                lambda: self._extras(plan), deadline, f"the extras of step {self._candidate.step}"
            )
            return (state, extras), "", False
        except (ShareError, TierUnreadableError, WaitTimeoutError) as error:
            in_backup = self._candidate.backup is not None
            return None, str(error), in_backup and _says_nothing(error)

    def _raise_if_unread(self, processes: Sequence[int]) -> None:
        """Raises, on all processes, when some could not read a backup."""
        if processes:
            names = self._coordinator.names(processes)
            listed = "; ".join(
                f"{name}: {self._faults[process]}"
                for name, process in zip(names, processes, strict=True)
            )
            raise TierUnreadableError(
                f"step {self._candidate.step} in {self._candidate.source} cannot be read: {listed}",
                place=self._candidate.source,
            )

    def _restored(
        self,
        plan: ReadPlan,
        found: _Found,
        passed_over: tuple[PassedOver, ...],
        told: Sequence[tuple[Tier, list[Any], bool]],
    ) -> RestoredState:
        state, extras = found
        restored = RestoredState(
            step=self._candidate.step,
            state=state,
            tier=farthest([tier for tier, *_ in told]),
            extras=extras,
            report=RestoreReport(
                seconds=self._seconds,
                bytes_by_tier=_bytes_by_tier(plan),
                passed_over=passed_over,
                left_out=(*self._notes, *self._sources.faults),
                unverified=tuple(
                    plan.shares[share].place.name
                    for share in sorted(plan.used)
                    if plan.shares[share].seal is None
                ),
                unequal_replicas=self._unequal_replicas(told),
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

    def _unequal_replicas(self, told: Sequence[tuple[Tier, list[Any], bool]]) -> tuple[str, ...]:
        """Compares what ranks have saved of the same parts; the same answer on all processes."""
        found = {(name, tuple(ranks)) for _, leaves, _ in told for name, ranks in leaves}
        if any(uneven for *_, uneven in told):
            found |= self._unequal_twins()
        texts = tuple(
            f"leaf {name!r}: ranks {', '.join(map(str, ranks))} differ"
            for name, ranks in sorted(found)
        )
        if texts:
            _events.happened("restore/unequal_replicas", level=logging.WARNING, leaves=texts)
        return texts

    def _unequal_twins(self) -> set[tuple[str, tuple[int, ...]]]:
        seals, groups = self._sources.seals(self._candidate.step), self._uneven_groups()
        concerned = {rank for group in groups for rank in group} & seals.keys()
        told = self._coordinator.gather(
            "restore/twins", [groups, {str(rank): leaf_digests(seals[rank]) for rank in concerned}]
        )
        leaves = {int(rank): known for _, by_rank in told for rank, known in by_rank.items()}
        return unequal_twins({tuple(group) for known, _ in told for group in known}, leaves)

    def _extras(self, plan: ReadPlan) -> tuple[Mapping[str, Any], ...]:
        """The extras of this step; a share with the content of an earlier step has older ones."""
        fitting = [
            share
            for share in plan.shares
            if share.identity is not None and share.identity.step == self._candidate.step
        ]
        return tuple(decode_extras(e) for e in read_extras((fitting or plan.shares)[0]))

    # Acting together.

    def _together(
        self, topic: str, attempt: Callable[[], _T], tell: Callable[[_T], Any]
    ) -> tuple[_T | None, list[Any]]:
        """Runs `attempt` on all processes.

        What is not the candidate's fault is raised on all: a request that does not fit, a place
        that cannot be read.

        Returns:
            The own result, and what each process tells of its own: None for those where the
            candidate is bad, which are in `_faults` then.
        """
        result, told, fault = None, None, None
        raised: Exception | None = None
        try:
            result = attempt()
            told = tell(result)
        except ShareError as error:
            fault = str(error)
        except Exception as error:  # the others must not wait for this process
            raised = error
        kind = type(raised).__name__ if raised else ""
        reports = self._gather_slow(
            topic, [fault, kind, str(raised) if raised else "", self._own_bad(fault), told]
        )
        if raised is not None:
            raise raised
        self._raise_alike(topic, reports)
        self._bad = [bad for *_, bad, _ in reports]
        self._add_faults([fault for fault, *_ in reports])
        return result, [told for *_, told in reports]

    def _gather_slow(self, topic: str, value: Any) -> tuple[Any, ...]:
        """Gathers after work that may have taken its whole limit on one process, and not on others.

        With the same limit, the others would give up just before they hear what went wrong.
        """
        limit = 2 * self._means.timeout_secs
        return self._coordinator.gather(f"restore/{topic}", value, timeout_secs=limit)

    def _raise_alike(self, topic: str, told: Sequence[Sequence[Any]]) -> None:
        failed = [process for process, (_, kind, *_) in enumerate(told) if kind]
        if not failed:
            return
        first = failed[0]
        names = self._coordinator.names(failed)
        message = f"{', '.join(names)}: {told[first][2]}"
        if told[first][1] == "StructureMismatchError":
            raise StructureMismatchError(message, paths=[])
        if told[first][1] == "TierUnreadableError":
            raise TierUnreadableError(message, place=self._candidate.source)
        raise RestoreError(f"restore of step {self._candidate.step}, {topic}: {message}")

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - begun


def bad_copy(step: int | None, source: str, reason: str) -> RestoreError:
    return RestoreError(
        f"a copy of step {step} ({source}) is bad: {reason}. Without strict, another copy or an"
        " older step is used"
    )


def _says_nothing(error: Exception) -> bool:
    """Whether a failed read leaves open what is there."""
    cause = error.__cause__
    return isinstance(error, TierUnreadableError | WaitTimeoutError) or (
        isinstance(cause, ValueError) and is_unreadable(cause)
    )


def _first_known(told: Sequence[Any]) -> Any:
    return next((value for value in told if value is not None), None)


def _same(plan: ReadPlan) -> ReadPlan:
    return plan


def _missing_text(plan: ReadPlan) -> str:
    if not plan.missing:
        return ""
    name, chunks = next(iter(plan.missing.items()))
    return (
        f"nobody has chunk {chunks[0]} of leaf {name!r} ({len(plan.missing)} leaves are incomplete)"
    )


def _bytes_by_tier(plan: ReadPlan) -> dict[Tier, int]:
    """Bytes that a plan reads, whole chunks counted by their tier."""
    amounts: dict[Tier, int] = {}
    for leaf, sources in zip(plan.target.leaves, plan.leaves, strict=True):
        if leaf.dtype is None:
            continue
        chunk_bytes = math.prod(leaf.leaf.chunk_shape) * leaf.dtype.itemsize
        for share, chunks in Counter(sources.sources.values()).items():
            tier = plan.shares[share].place.tier
            amounts[tier] = amounts.get(tier, 0) + chunks * chunk_bytes
    return amounts
