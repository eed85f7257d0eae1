"""Orbax's policies of when to save and what to keep."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

from orbax.checkpoint import options as ocp_options
from orbax.checkpoint._src.checkpoint_managers import save_decision_policy

__all__ = [
    "OrbaxPolicy",
    "is_continuous",
    "is_preservation_policy",
    "is_save_decision_policy",
    "split_policy",
]


def is_save_decision_policy(policy: object) -> bool:
    """True for any object with Orbax's `should_save(step, previous_steps, *, context)`."""
    return isinstance(policy, save_decision_policy.SaveDecisionPolicy)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _PolicyStep:
    """Orbax's PolicyCheckpointInfo."""

    step: int
    time: datetime.datetime
    metrics: dict[str, Any] | None = None


def is_continuous(policy: object) -> bool:
    """True for Orbax's `ContinuousCheckpointingPolicy`."""
    return type(policy) is save_decision_policy.ContinuousCheckpointingPolicy


class OrbaxPolicy:
    """Asks one of Orbax's `SaveDecisionPolicy` objects, on the deciding process only."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def should_save(
        self,
        step: int,
        *,
        now_seconds: float,
        saved: Sequence[tuple[int, float]],
        saving: bool,
        preempted: bool,
    ) -> bool:
        """The policy's answer; `saved` are pairs of step and time, oldest first."""
        context = save_decision_policy.DecisionContext(
            is_saving_in_progress=saving,
            reached_preemption=preempted,
            multiprocessing_options=ocp_options.MultiprocessingOptions(primary_host=0),
        )
        return bool(
            self._policy.should_save(
                _policy_step(step, now_seconds),
                [_policy_step(*pair) for pair in saved],
                context=context,
            )
        )


def _policy_step(step: int, seconds: float) -> _PolicyStep:
    return _PolicyStep(step=step, time=datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC))


def is_preservation_policy(policy: object) -> bool:
    """True for any object with Orbax's `should_preserve(checkpoints, *, context)`."""
    return callable(getattr(policy, "should_preserve", None))


def split_policy(policy: Any) -> tuple[list[Any], list[Any]]:
    """The parts of a save policy that answer alike on all processes by themselves, and the others.

    Alike are Orbax's own that look at nothing but the step, the steps saved and the preemption,
    which Orbax agrees on. A subclass may look at anything.
    """
    if type(policy) is save_decision_policy.AnySavePolicy:
        pairs = [split_policy(part) for part in policy.policies]
        return [p for alike, _ in pairs for p in alike], [p for _, asked in pairs for p in asked]
    return ([policy], []) if type(policy) in _ALIKE_POLICIES else ([], [policy])


_ALIKE_POLICIES = (
    save_decision_policy.FixedIntervalPolicy,
    save_decision_policy.SpecificStepsPolicy,
    save_decision_policy.InitialSavePolicy,
    save_decision_policy.PreemptionCheckpointingPolicy,
)
