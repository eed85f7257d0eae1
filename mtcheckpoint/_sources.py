"""The shares of one save that a process can reach, opened as they are needed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import tensorstore as ts

from mtcheckpoint._clock import Deadline, run_within
from mtcheckpoint._reader import ReadPlan, plan_reads
from mtcheckpoint._shares.contents import ShareContents, read_contents
from mtcheckpoint._shares.layout import Layout, ranks_to_open
from mtcheckpoint._shares.places import Place
from mtcheckpoint._shares.seal import Seal, Summary, Verify
from mtcheckpoint._target import Target, resolve_target
from mtcheckpoint.errors import ShareError, TierUnreadableError, WaitTimeoutError

__all__ = ["SaveSummary", "Sources"]

_LOG = logging.getLogger("mtcheckpoint.restore")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SaveSummary:
    """What one share of a save tells of all.

    Attributes:
        step: of the save.
        save_id: of the save.
        ranks: what each rank holds, in short; () when the share does not say.
    """

    step: int
    save_id: str
    ranks: tuple[Summary, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SaveSummary:
        ranks = tuple((str(which), str(what)) for which, what in value["ranks"])
        return cls(step=value["step"], save_id=value["save_id"], ranks=ranks)

    def fault_of(self, share: ShareContents, rank: int) -> str | None:
        """Why a share cannot be the one of `rank`; None when it can.

        A share whose content has not changed since an earlier step names that step. It is right
        when it was then what it is said to be now: otherwise two steps would be mixed.
        """
        identity = share.identity
        if identity is None:
            return None
        if identity.step == self.step:
            other = identity.save_id != self.save_id
            return f"is of another save of step {self.step}, {identity.save_id}" if other else None
        if share.seal is None or not share.seal.ranks or not self.ranks:
            return None
        if rank < len(self.ranks) and _summary(share) == self.ranks[rank]:
            return None
        return f"is of step {identity.step}, and not what rank {rank} held at step {self.step}"


def _summary(share: ShareContents) -> Summary | None:
    assert share.identity is not None and share.seal is not None
    rank, ranks = share.identity.node_rank, share.seal.ranks
    return ranks[rank] if rank < len(ranks) else None


class Sources:
    """Where the chunks of one save can be read from, by the rank that wrote them.

    Any one share tells the layout of the whole save, so only those shares are opened that hold what
    this process needs: nearer ones before farther ones, and equal ones in turns.
    """

    def __init__(
        self,
        places: Mapping[int, Sequence[Place]],
        *,
        preferred_ranks: Sequence[int],
        turn: int,
        context: ts.Context,
        verify: Verify = "full",
        timeout_secs: float = 120.0,
        step: int | None = None,
        save: SaveSummary | None = None,
        bad_places: list[Place] | None = None,
        known: Iterable[ShareContents] = (),
    ) -> None:
        """
        Args:
            places: copies of each rank's share, the nearest first.
            preferred_ranks: ranks to open first.
            turn: a number that differs between processes, to spread the load over equal shares.
            context: TensorStore's pools and limits.
            verify: how much is compared with the seals.
            timeout_secs: limit for all that one call opens. A copy that does not answer takes half
                of what is left of it, if there is another copy.
            step: of the save.
            save: what is known of the save, from another process; None: the first share that names
                the step tells it when reads are planned.
            bad_places: takes the places whose content is not what was saved.
            known: shares that were looked into already; not looked into again.
        """
        self._step = step
        self._save = save
        self._bad_places = bad_places if bad_places is not None else []
        self._verify = verify
        self._timeout_secs = timeout_secs
        self._places = {rank: list(copies) for rank, copies in places.items()}
        self._preferred = [rank for rank in preferred_ranks if rank in self._places]
        self._turn = turn
        self._context = context
        self._opened: dict[int, ShareContents] = {}
        self._faults: list[str] = []
        self._known = {share.place.name: share for share in known}

    @property
    def faults(self) -> tuple[str, ...]:
        """What was wrong with shares that were left out."""
        return tuple(self._faults)

    @property
    def opened(self) -> tuple[ShareContents, ...]:
        """The shares that were opened, the preferred ones first."""
        return tuple(self._opened.values())

    def summary(self, step: int) -> SaveSummary | None:
        """What an opened share that names `step` tells of the whole save."""
        for share in self._opened.values():
            if share.identity is not None and share.identity.step == step:
                return SaveSummary(
                    step=step,
                    save_id=share.identity.save_id,
                    ranks=share.seal.ranks if share.seal is not None else (),
                )
        return None

    def seals(self, step: int) -> dict[int, Seal]:
        """The seals of the opened shares of `step`, by rank."""
        return {
            rank: share.seal
            for rank, share in self._opened.items()
            if share.seal is not None and share.seal.step == step
        }

    def keep_only(self, save: SaveSummary) -> None:
        """Leaves out the opened shares that are not of this save, and those opened later."""
        self._save = save
        for rank, share in list(self._opened.items()):
            fault = save.fault_of(share, rank)
            if fault is not None:
                self._leave_out(rank, f"{share.place.name} {fault}")

    def _learn(self) -> None:
        if self._save is None and self._step is not None:
            found = self.summary(self._step)
            if found is not None:
                self.keep_only(found)

    def _leave_out(self, rank: int, fault: str) -> None:
        _LOG.warning("left out: %s", fault)
        self._faults.append(fault)
        self._places[rank].remove(self._opened.pop(rank).place)

    def _open_any(self, deadline: Deadline) -> ShareContents:
        """One share of the save, whichever is nearest.

        Raises:
            ShareError: none can be read.
        """
        for share in self._opened.values():
            return share
        for rank in [*self._preferred, *self._in_turn(self._places)]:
            found = self._open(rank, deadline)
            if found is not None:
                return found
        raise ShareError(
            "no share can be read" + "".join(f"; {fault}" for fault in self._faults[:3]),
            place="; ".join(place.name for copies in self._places.values() for place in copies),
        )

    def open_preferred(self) -> None:
        """Opens the preferred shares, as far as they can be read."""
        deadline = Deadline.after(self._timeout_secs)
        for rank in self._preferred:
            self._open(rank, deadline)

    def plan(self, request: Any, mesh: jax.sharding.Mesh, **options: Any) -> ReadPlan:
        """Plans this process's reads, opening what is needed for it.

        The plan's `missing` names chunks that no reachable share holds.

        Raises:
            ShareError: no share can be read.
            StructureMismatchError: the request does not fit what was saved.
        """
        deadline = Deadline.after(self._timeout_secs)
        first = self._open_any(deadline)
        target = resolve_target(request, first, mesh, **options)
        layout = Layout(first.process_devices, ranks=sorted(self._places))
        while True:
            self._learn()
            plan = plan_reads(target, self.opened)
            if not plan.missing or not self._open_for(plan, target, layout, deadline):
                return plan

    def drop(self, text: str) -> bool:
        """Leaves out the copies that `text`, an error, names; all but local ones if it names none.

        Returns:
            True when another copy of a dropped share is left.
        """
        named = {r for r, share in self._opened.items() if share.place.name in text}
        if not named:
            named = {r for r, share in self._opened.items() if share.place.tier != "local"}
        for rank in named:
            place = self._opened.pop(rank).place
            self._faults.append(f"{place.name}: {text}")
            self._places[rank].remove(place)
            if place.name in text:
                self._bad_places.append(place)
        return bool(named)

    def _open_for(self, plan: ReadPlan, target: Target, layout: Layout, deadline: Deadline) -> bool:
        """Opens shares that should hold what a plan misses; False when there are none left."""
        shardings = {leaf.leaf.name: leaf.leaf.sharding for leaf in target.leaves}
        missing = [(shardings[name], chunks) for name, chunks in plan.missing.items()]
        chosen = ranks_to_open(missing, layout, closed=self._closed(), turn=self._turn)
        for rank in sorted(chosen):
            self._open(rank, deadline)
        return bool(chosen)

    def _closed(self) -> set[int]:
        """Ranks that have a copy left that was not opened yet."""
        return {rank for rank, copies in self._places.items() if copies} - self._opened.keys()

    def _in_turn(self, ranks: Any) -> list[int]:
        ordered = sorted(ranks)
        start = self._turn % len(ordered) if ordered else 0
        return ordered[start:] + ordered[:start]

    def _open(self, rank: int, deadline: Deadline) -> ShareContents | None:
        """Opens the nearest readable copy of a rank's share; forgets the copies that are not."""
        if rank in self._opened:
            return self._opened[rank]
        while self._places[rank]:
            place = self._places[rank][0]
            try:
                share = self._look_into(place, deadline, has_twin=len(self._places[rank]) > 1)
            except ShareError as error:
                fault = str(error)
                self._bad_places.append(place)
            except TierUnreadableError as error:
                if place.tier == "backup":
                    raise  # whether the backup is whole cannot be told
                fault = str(error)
            else:
                foreign = self._save.fault_of(share, rank) if self._save is not None else None
                if foreign is None:
                    self._opened[rank] = share
                    return share
                fault = f"{place.name} {foreign}"
            _LOG.warning("left out: %s", fault)
            self._faults.append(fault)
            del self._places[rank][0]
        return None

    def _look_into(self, place: Place, deadline: Deadline, *, has_twin: bool) -> ShareContents:
        """`read_contents`, with a limit for all of it."""
        if place.name in self._known:
            return self._known[place.name]
        limit = Deadline.after(deadline.remaining() / (2 if has_twin else 1))
        try:
            return run_within(
                lambda: read_contents(
                    place, self._context, verify=self._verify, timeout_secs=limit.seconds
                ),
                limit,
                place.name,
            )
        except WaitTimeoutError as error:
            raise TierUnreadableError(
                f"{place.name} cannot be read: no answer in {limit.seconds:.0f} s of the"
                f" {deadline.seconds:.0f} s for all shares that are opened together",
                place=place.name,
            ) from error
