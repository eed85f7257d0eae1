"""When to save: pure decisions over plain values. No clock, no disk, no processes.

One process decides for all, from the reports of all. A policy says what is wished for;
`back_pressure` says what the slowest host allows; `decide` puts the two together.

A step that is due but not allowed is made up for at the next step that is allowed: after a busy
spell the newest checkpoint is then as fresh as the hosts can make it, not a whole period old.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = [
    "NEVER",
    "SPACE_MARGIN",
    "AnyOf",
    "ClusterState",
    "Continuous",
    "EveryNSeconds",
    "FixedInterval",
    "HostReport",
    "Policy",
    "SpecificSteps",
    "Verdict",
    "back_pressure",
    "decide",
    "held_up",
]

# `Verdict.ask_again_at` of a policy that will not wish for a save any more.
NEVER = 2**63 - 1

# A share is this much larger on disk than its arrays: manifests, metadata, directories, extras.
SPACE_MARGIN = 1.05


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """What one process last said about itself.

    Attributes:
        process: its index.
        host: name of its machine, for messages.
        finished_step: the last save that it is done with, whether that succeeded or failed; None
            before the first one.
        taken_step: the newest step up to which nothing of it waits for the replicator; the same as
            `finished_step` where there is no replicator or where nothing came to be taken.
        free_bytes: free space of its volume; None when unknown, which forbids nothing.
        share_bytes: size of its next share; None when unknown, which forbids nothing.
        preempted: True when the machine was told that it will be taken away.
    """

    process: int
    host: str
    finished_step: int | None = None
    taken_step: int | None = None
    free_bytes: int | None = None
    share_bytes: int | None = None
    preempted: bool = False

    @property
    def name(self) -> str:
        return f"{self.host} (process {self.process})"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClusterState:
    """What is known when a step asks whether to save it.

    After a roll-back every host reports anew before the first question, and `saved` and
    `started_step` no longer hold what was undone.

    Attributes:
        step: the step that asks.
        now_seconds: the deciding process' time, on the same clock as the times in `saved`.
        processes: number of processes of the job.
        reports: the newest report of each process that has made one.
        saved: (step, time at which the save was started), newest last; this run's saves.
        started_step: the last step for which a save was started, None before the first one.
        first_step: the first step of this run: 0, or the one after the restored step.
    """

    step: int
    now_seconds: float
    processes: int
    reports: tuple[HostReport, ...] = ()
    saved: tuple[tuple[int, float], ...] = ()
    started_step: int | None = None
    first_step: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The answer to "save this step?".

    Attributes:
        save: True to save it.
        reason: why, or why not; for people.
        ask_again_at: the first step at which the answer could be yes, as long as no report
            changes. No process needs to ask before.
        seconds_left: the seconds from now on in which it cannot be yes either.
    """

    save: bool
    reason: str
    ask_again_at: int
    seconds_left: float = 0.0


class Policy(Protocol):
    """A wish to save. Pure: the same state always gives the same verdict."""

    def wants(self, state: ClusterState) -> Verdict:
        """Whether a save of `state.step` is wished for, whatever the hosts allow."""


@dataclasses.dataclass(frozen=True, slots=True)
class Continuous:
    """Every step, so that in effect the next save starts when the hosts are free again.

    Args:
        minimum_interval_secs: seconds from the start of one save to the start of the next at
            least; None for no such limit.
    """

    minimum_interval_secs: float | None = None

    def wants(self, state: ClusterState) -> Verdict:
        return _after_seconds(state, self.minimum_interval_secs or 0.0, "continuous checkpointing")


@dataclasses.dataclass(frozen=True, slots=True)
class EveryNSeconds:
    """The first step at once, then the first one that is `seconds` after the last save's start."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, found {self.seconds}")

    def wants(self, state: ClusterState) -> Verdict:
        return _after_seconds(state, self.seconds, f"every {self.seconds:g} s")


@dataclasses.dataclass(frozen=True, slots=True)
class FixedInterval:
    """The steps that `period` divides, from `period` on.

    Step 0 is the matter of ``save_on_start``.
    """

    period: int

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period must be 1 or more steps, found {self.period}")

    def wants(self, state: ClusterState) -> Verdict:
        following = (state.step // self.period + 1) * self.period
        due = following - self.period
        return _made_up_for(state, due if due > 0 else None, following)


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class SpecificSteps:
    """Just these steps, in any order."""

    steps: tuple[int, ...]

    def __init__(self, steps: Iterable[int]) -> None:
        object.__setattr__(self, "steps", tuple(sorted(set(steps))))

    def wants(self, state: ClusterState) -> Verdict:
        position = bisect.bisect_right(self.steps, state.step)
        due = self.steps[position - 1] if position else None
        following = self.steps[position] if position < len(self.steps) else NEVER
        return _made_up_for(state, due, following)


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class AnyOf:
    """A save is wished for when one of the policies wishes for it. The first gives the reason."""

    policies: tuple[Policy, ...]

    def __init__(self, policies: Sequence[Policy]) -> None:
        if not policies:
            raise ValueError("AnyOf needs at least one policy")
        object.__setattr__(self, "policies", tuple(policies))

    def wants(self, state: ClusterState) -> Verdict:
        verdicts = [policy.wants(state) for policy in self.policies]
        first = next((verdict for verdict in verdicts if verdict.save), verdicts[0])
        return dataclasses.replace(
            first,
            ask_again_at=min(verdict.ask_again_at for verdict in verdicts),
            seconds_left=min(verdict.seconds_left for verdict in verdicts),
        )


def decide(
    policy: Policy, state: ClusterState, *, save_on_start: bool, untaken_limit: int = 1
) -> Verdict:
    """Whether to save `state.step`.

    Args:
        policy: what is wished for.
        state: what is known about the job.
        save_on_start: wish for a save of step 0, whatever the policy says.
        untaken_limit: see `back_pressure`.
    """
    if state.saved and state.saved[-1][0] == state.step:
        return _no(state, f"step {state.step} is saved already")
    wish = _wish(policy, state, save_on_start)
    if not wish.save:
        return wish
    forbidden = back_pressure(state, untaken_limit=untaken_limit)
    return _no(state, forbidden) if forbidden else wish


def back_pressure(state: ClusterState, *, untaken_limit: int = 1) -> str | None:
    """Why no save may start now; None when one may.

    Args:
        state: what is known about the job.
        untaken_limit: a host with this many finished steps that the replicator has not taken holds
            up the next save. 1: the newest step must have been taken everywhere, because only a
            replicated step counts.
    """
    if state.started_step is not None:
        waiting = _unfinished(state, state.started_step) or _untaken(state, untaken_limit)
        if waiting:
            return waiting
    return _full(state)


def held_up(state: ClusterState) -> str | None:
    """What the replicator or a full volume holds up, while no save is in progress; None: nothing.

    Args:
        state: what is known about the job.
    """
    if state.started_step is not None:
        if _unfinished(state, state.started_step):
            return None
        untaken = _untaken(state, 1)
        if untaken:
            return untaken
    return _full(state)


# What is wished for.


def _wish(policy: Policy, state: ClusterState, save_on_start: bool) -> Verdict:
    wish = policy.wants(state)
    if wish.save:
        return wish
    if save_on_start and state.step == 0:
        return dataclasses.replace(wish, save=True, reason="the first step is saved on start")
    for report in state.reports:
        if report.preempted:
            return _yes(state, f"{report.name} is being preempted", state.step + 1)
    return wish


def _after_seconds(state: ClusterState, seconds: float, what: str) -> Verdict:
    if not state.saved:
        return _yes(state, f"{what}: the first save", state.step + 1)
    passed = state.now_seconds - state.saved[-1][1]
    # Below zero: the times come from another clock, so nothing is known about the interval.
    if 0 <= passed < seconds:
        return Verdict(
            save=False,
            reason=f"{what}: {passed:.1f} of {seconds:g} s since the last save have passed",
            ask_again_at=state.step + 1,
            seconds_left=seconds - passed,
        )
    return _yes(state, f"{what}: {passed:.1f} s since the last save", state.step + 1)


def _made_up_for(state: ClusterState, due: int | None, following: int) -> Verdict:
    """A wish for step `due`, the last one that was due, unless a save since has met it."""
    if due is None or due <= _last_saved(state):
        return Verdict(
            save=False, reason=f"the next one due is {following}", ask_again_at=following
        )
    late = "" if due == state.step else f", {state.step - due} steps ago"
    return _yes(state, f"step {due} was due{late}", following)


def _last_saved(state: ClusterState) -> int:
    """The newest saved step before the present one; later ones belong to an undone future."""
    for step, _ in reversed(state.saved):
        if step < state.step:
            return max(step, state.first_step - 1)
    return state.first_step - 1


def _yes(state: ClusterState, reason: str, ask_again_at: int) -> Verdict:
    return Verdict(save=True, reason=reason, ask_again_at=ask_again_at)


def _no(state: ClusterState, reason: str) -> Verdict:
    return Verdict(save=False, reason=reason, ask_again_at=state.step + 1)


# What the hosts allow.


def _unfinished(state: ClusterState, started_step: int) -> str | None:
    reports = {report.process: report for report in state.reports}
    for process in range(state.processes):
        report = reports.get(process)
        if report is None:
            return f"process {process} has not reported on the save of step {started_step}"
        # Not `<`: after a roll-back a report from before it may name a later step.
        if report.finished_step != started_step:
            return f"{report.name} has not finished the save of step {started_step}"
    return None


def _untaken(state: ClusterState, limit: int) -> str | None:
    history = [step for step, _ in state.saved]
    if state.started_step is not None and state.started_step not in history[-1:]:
        history.append(state.started_step)
    for report in state.reports:
        behind = _steps_after(history, report.taken_step)
        if len(behind) >= limit:
            listed = ", ".join(str(step) for step in behind)
            return f"{report.name}: the replicator has not taken step {listed}"
    return None


def _steps_after(history: Sequence[int], taken_step: int | None) -> Sequence[int]:
    for position in reversed(range(len(history))):
        if history[position] == taken_step:
            return history[position + 1 :]
    return history


def _full(state: ClusterState) -> str | None:
    for report in state.reports:
        if report.free_bytes is None or report.share_bytes is None:
            continue
        needed = math.ceil(report.share_bytes * SPACE_MARGIN)
        if needed > report.free_bytes:
            return (
                f"{report.name}: the next share needs {needed} bytes,"
                f" {report.free_bytes} bytes are free"
            )
    return None
