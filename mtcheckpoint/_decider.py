"""Save decisions that are the same on all processes.

Process 0 decides, from what all have reported, and the others read its answer: nobody votes, nobody
waits for the slowest, and a policy that looks at its own host's clock or disk is asked on one host
only. An answer also says up to which step there is no need to ask again.

When all are free for the next save, the background thread of process 0 answers before anybody asks.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtcheckpoint import _policy
from mtcheckpoint._answers import Answers
from mtcheckpoint._backlog import Backlog
from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._orbax import OrbaxPolicy, is_continuous
from mtcheckpoint._pace import Pace
from mtcheckpoint._policy import ClusterState, HostReport, Policy, Verdict
from mtcheckpoint._reports import Reports
from mtcheckpoint.config import CheckpointConfig

__all__ = ["Decider", "Decision", "policy_of"]


def policy_of(config: CheckpointConfig, given: Any = None) -> Policy:
    """The policy that the flags describe, or the one given: ours, or Orbax's kind."""
    if given is not None and is_continuous(given):
        # Ours means the same; Orbax's leaves a key in the job's store each time it is asked.
        return _policy.Continuous(given.minimum_interval_secs)
    if given is not None:
        return given if hasattr(given, "wants") else _UserPolicy(given)
    policies: list[Policy] = []
    if config.enable_continuous_checkpointing:
        policies.append(_policy.Continuous(config.minimum_interval_secs))
    elif config.local_checkpoint_period > 0:
        policies.append(_policy.FixedInterval(config.local_checkpoint_period))
    if config.local_checkpoint_steps:
        policies.append(_policy.SpecificSteps(config.local_checkpoint_steps))
    return policies[0] if len(policies) == 1 else _policy.AnyOf(policies)


class _UserPolicy:
    """One of Orbax's `SaveDecisionPolicy` objects.

    What it wishes for and the hosts do not allow is made up for, as with our own policies.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = OrbaxPolicy(policy)
        self._name = type(policy).__name__
        self._due: int | None = None

    def wants(self, state: ClusterState) -> Verdict:
        newest = state.saved[-1][0] if state.saved else -1
        if self._due is not None and not newest < self._due <= state.step:
            self._due = None
        if self._asked(state):
            self._due = state.step
        save = self._due is not None
        return Verdict(
            save=save,
            reason=f"{self._name}: step {self._due}" if save else f"{self._name}: not now",
            ask_again_at=state.step + 1,
        )

    def _asked(self, state: ClusterState) -> bool:
        return self._policy.should_save(
            state.step,
            now_seconds=state.now_seconds,
            saved=state.saved,
            saving=any(report.finished_step != state.started_step for report in state.reports),
            preempted=any(report.preempted for report in state.reports),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Process 0's answer, the same on all processes.

    Attributes:
        save: save this step.
        reason: why, or why not.
        ask_again_at: no process needs to ask before this step.
        failed_saves: how many saves of this run have failed.
        commits: how many were committed on all processes.
        faults: what stops the run, by process; empty while all is well.
        step: the step it was given for; one that was given ahead holds for later ones, too.
        turn: how many saves and restores had begun; it holds until the next one begins.
    """

    save: bool
    reason: str
    ask_again_at: int
    failed_saves: int = 0
    commits: int = 0
    faults: Mapping[str, str] = dataclasses.field(default_factory=dict)
    step: int = -1
    turn: int = 0


class Decider:
    """Answers "save this step?" on every process, with process 0's answer.

    Call every method but `look_ahead` on all processes, in the same order; what changes the next
    answer or the next question must change on all at once.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        policy: Policy,
        reports: Reports,
        *,
        save_on_start: bool,
        ask_every: int = _policy.NEVER,
        now: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            coordinator: agreement with the other processes.
            policy: what is wished for; asked on process 0 only.
            reports: what the processes say of themselves, as process 0 has heard it.
            save_on_start: save step 0.
            ask_every: ask again after this many steps at the latest, so that a replicator which
                has stopped is heard of.
            now: seconds since the epoch.
        """
        self._coordinator = coordinator
        self._answers = Answers(coordinator, "decision")
        self._policy = policy
        self._reports = reports
        self._save_on_start = save_on_start
        self._ask_every = ask_every
        self._now = now
        self._backlog = Backlog()
        self._pace = Pace()
        self._first_step = 0
        self._saved: list[tuple[int, float]] = []
        self._started: int | None = None
        self._begun = 0  # saves of this run
        self._turn = 0
        self._answered: tuple[int, Decision] | None = None
        self._unasked = Decision(save=False, reason="not due", ask_again_at=0)
        self._last_step = -1
        self._lock = threading.Lock()

    @property
    def asked(self) -> int:
        """How many questions process 0 has answered for this process; the same on all."""
        return self._answers.asked

    def decide(
        self, step: int, *, failed: Sequence[int] = (), commits: int | None = None
    ) -> Decision:
        """The answer for `step`; asked again for the same step, the same answer.

        Args:
            step: the step.
            failed: the steps whose saves came to nothing, as process 0 knows them.
            commits: how many saves were committed on all processes, as process 0 knows; None when
                it does not: then that of earlier answers is not told anew.
        """
        with self._lock:
            return self._decide(step, failed, commits)

    def _decide(self, step: int, failed: Sequence[int], commits: int | None) -> Decision:
        if self._answered is not None and self._answered[0] == step:
            return self._answered[1]
        if step >= self._unasked.ask_again_at or step < self._last_step:
            decision = self._ask(step, failed, commits)
            self._answered = (step, decision)
            self._unasked = dataclasses.replace(decision, save=False, reason="not due")
        self._last_step = step
        answered = self._answered
        return answered[1] if answered is not None and answered[0] == step else self._unasked

    def look_ahead(self, *, failed: Sequence[int], commits: int) -> bool:
        """For a background thread: answers the next question, or fetches the answer.

        Args:
            failed: as for `decide`.
            commits: as for `decide`.

        Returns:
            True to look again in a moment.
        """
        if not self._lock.acquire(blocking=False):
            return False  # asked at this very moment
        try:
            about_to_save = self._answered is not None and self._answered[1].save
            if self._started is None or about_to_save or self._answers.is_ahead:
                return False
            if not self._coordinator.is_leader:
                return self._answers.fetch_ahead()
            decision = self._foreseen(failed, commits)
            if decision is not None:
                self._answers.give_ahead(dataclasses.asdict(decision))
            return False
        finally:
            self._lock.release()

    def started(self, step: int) -> None:
        """Notes that a save of `step` was started."""
        with self._lock:
            self._saved = [pair for pair in self._saved if pair[0] < step]
            self._saved.append((step, self._now()))
            self._pace.started(step, self._saved[-1][1])
            self._started = step
            self._begun += 1
            self._turn += 1
            self._answered = None
            # Asked again at the next step, whatever the policy said: the save may fail.
            self._unasked = dataclasses.replace(self._unasked, ask_again_at=step + 1)

    def resume_after(self, step: int) -> None:
        """Notes that the run goes on from a restored step."""
        with self._lock:
            self._first_step = step + 1
            self._saved = []
            self._pace = Pace()
            self._started = None
            self._turn += 1
            self._answered = None
            self._last_step = step
            self._unasked = dataclasses.replace(self._unasked, ask_again_at=0)

    def _ask(self, step: int, failed: Sequence[int], commits: int | None) -> Decision:
        while True:
            answer = self._answers.take(
                lambda: dataclasses.asdict(self._judge(step, failed, commits))
            )
            decision = Decision(**answer)
            # One that was given ahead, and then something else came in between.
            if decision.turn == self._turn and decision.step <= step:
                return decision

    def _judge(self, step: int, failed: Sequence[int], commits: int | None) -> Decision:
        state, faults = self._state(step, failed)
        self._backlog.look(state)
        verdict = _policy.decide(self._policy, state, save_on_start=self._save_on_start)
        # All have reported before all know how it ended.
        unsettled = commits is not None and commits + len(failed) < self._begun
        return Decision(
            save=verdict.save and not faults,
            reason=verdict.reason,
            ask_again_at=min(self._ask_again_at(state, verdict, unsettled), step + self._ask_every),
            failed_saves=len(failed),
            commits=commits or 0,
            faults=faults,
            step=step,
            turn=self._turn,
        )

    def _foreseen(self, failed: Sequence[int], commits: int) -> Decision | None:
        """A yes to the next question, which time alone does not make a no; None else."""
        step = max(self._unasked.ask_again_at, self._last_step + 1)
        state, faults = self._state(step, failed)
        unsettled = commits + len(failed) < self._begun
        if faults or unsettled or isinstance(self._policy, _UserPolicy):
            return None
        verdict = _policy.decide(self._policy, state, save_on_start=self._save_on_start)
        if not verdict.save:
            return None
        self._backlog.look(state)  # nobody judges at the step itself
        return Decision(
            save=True,
            reason=verdict.reason,
            ask_again_at=min(verdict.ask_again_at, step + self._ask_every),
            failed_saves=len(failed),
            commits=commits,
            step=step,
            turn=self._turn,
        )

    def _state(self, step: int, failed: Sequence[int]) -> tuple[ClusterState, dict[str, str]]:
        """What is known when `step` asks, and what stops the run, by process."""
        told = self._reports.known
        state = ClusterState(
            step=step,
            now_seconds=self._now(),
            processes=self._coordinator.processes,
            reports=tuple(_report(process, fields) for process, fields in told.items()),
            saved=tuple(pair for pair in self._saved if pair[0] not in failed),
            started_step=self._started,
            first_step=self._first_step,
        )
        return state, {str(p): fields["fault"] for p, fields in told.items() if fields.get("fault")}

    def _ask_again_at(self, state: ClusterState, verdict: Verdict, unsettled: bool) -> int:
        step, now = state.step, state.now_seconds
        soon = step + 1
        if state.started_step is not None and _policy.back_pressure(state) is not None:
            soon = self._pace.busy(step, now)
        elif not verdict.save:
            soon = self._pace.after(verdict.seconds_left, step, now)
        if verdict.ask_again_at == step + 1:
            return soon
        # A save in progress can fail, whatever is due: that is heard when it should be over.
        saving = unsettled or _is_saving(state)
        return min(soon, verdict.ask_again_at) if saving else verdict.ask_again_at


def _is_saving(state: ClusterState) -> bool:
    finished = {report.finished_step for report in state.reports}
    return state.started_step is not None and (
        len(state.reports) < state.processes or finished != {state.started_step}
    )


def _report(process: int, fields: Mapping[str, Any]) -> HostReport:
    return HostReport(
        process=process, **{name: value for name, value in fields.items() if name != "fault"}
    )
