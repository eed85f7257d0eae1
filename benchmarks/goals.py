"""What each case compares, and what it should reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["GOALS", "GROUPS", "Goal", "goal_of"]

Sense = Literal["least", "most", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A case and its goal.

    Attributes:
        group: the part of the page it belongs to.
        title: what is compared, in a few words.
        bound: of the ratio; None without a goal.
        sense: whether the ratio should be at least or at most the bound.
        text: the goal as people say it, where that is not the bound.
    """

    group: str
    title: str
    bound: float | None = None
    sense: Sense = "least"
    text: str = ""

    def __str__(self) -> str:
        if self.bound is None:
            return "none"
        return self.text or f"{'≥' if self.sense == 'least' else '≤'} {self.bound:g}"

    def is_met(self, ratio: float) -> bool | None:
        """Whether a ratio reaches the goal; None without one."""
        if self.bound is None:
            return None
        return ratio >= self.bound if self.sense == "least" else ratio <= self.bound


OTHERS = "Against what people would use instead"
LIMITS = "The share of what is possible"
STEPS = "What training notices"
GROWTH = "Growth and memory"
GROUPS: Mapping[str, str] = {
    OTHERS: "Times faster: above 1, ours is faster.",
    LIMITS: "The share of the speed of the same bytes without a library: 1 is the limit.",
    STEPS: "Above 1 is better; a goal in seconds is met at 1 and above.",
    GROWTH: "How many times the time or the memory: less is better.",
}

GOALS: Mapping[str, Goal] = {
    "save_vs_orbax_replicator": Goal(
        group=OTHERS, title="save, vs Orbax's replicator manager", bound=8
    ),
    "restore_vs_orbax_replicator": Goal(
        group=OTHERS, title="restore, vs Orbax's replicator manager", bound=4
    ),
    "blocked_vs_orbax_replicator": Goal(
        group=OTHERS, title="blocked by a save, vs Orbax's", bound=20
    ),
    "blocked_queued_vs_orbax_replicator": Goal(
        group=OTHERS, title="blocked behind queued steps, vs Orbax's", bound=20
    ),
    "save_vs_torch_dcp": Goal(
        group=OTHERS, title="save, vs torch.distributed.checkpoint", bound=3.5
    ),
    "load_vs_torch_dcp": Goal(group=OTHERS, title="load, vs torch.distributed.checkpoint", bound=2),
    "handshake": Goal(group=OTHERS, title="handshake, vs Orbax's initialisation", bound=3),
    "handshake_google": Goal(group=OTHERS, title="handshake opposite Google's replicator", bound=3),
    "handshake_google_restart": Goal(group=OTHERS, title="handshake while Google's restarts"),
    "interval": Goal(group=OTHERS, title="distance of checkpoints, vs 100 steps", bound=5),
    "interval_lost_work": Goal(group=OTHERS, title="work lost by a kill, vs 100 steps"),
    "replicator_lag": Goal(group=OTHERS, title="commit to copies, vs Google's replicator", bound=1),
    "replicator_lag_small": Goal(group=OTHERS, title="commit to copies of 1 MiB, vs Google's"),
    "save_vs_raw_tmpfs": Goal(group=LIMITS, title="save, vs plain writes", bound=0.8),
    "save_vs_raw_over": Goal(group=LIMITS, title="save, vs plain writes over old files"),
    "restore_vs_raw_tmpfs": Goal(group=LIMITS, title="restore, vs plain reads", bound=0.6),
    "restore_other_mesh": Goal(group=LIMITS, title="restore on another mesh, vs same mesh"),
    "elastic_restore": Goal(
        group=LIMITS, title="restore 4 to 2 hosts, vs same topology", bound=0.5
    ),
    "backup_restore": Goal(group=LIMITS, title="restore from Cloud Storage, vs raw", bound=0.5),
    "step_slowdown": Goal(group=STEPS, title="steps with saves, vs steps without", bound=0.9),
    "step_slowdown_vs_orbax": Goal(
        group=STEPS, title="steps with saves, vs Orbax as often", bound=1
    ),
    "step_slowdown_shared_cores": Goal(group=STEPS, title="the same when steps need all cores"),
    "decision_us": Goal(
        group=STEPS, title="step that asks nothing, vs 50 µs", bound=1, text="≤ 50 µs"
    ),
    "decision_asked_us": Goal(group=STEPS, title="step that asks, vs 2 ms", bound=1, text="≤ 2 ms"),
    "plan_scale": Goal(group=STEPS, title="plan for 4,096 nodes, vs 5 s", bound=1, text="≤ 5 s"),
    "agreement_bytes": Goal(group=STEPS, title="bytes to agree, vs all told all"),
    "scale_leaves": Goal(
        group=GROWTH, title="time for 10 times the leaves", bound=12, sense="most"
    ),
    "scale_bytes": Goal(group=GROWTH, title="time for 10 times the bytes", bound=12, sense="most"),
    "scale_processes": Goal(
        group=GROWTH, title="time for 8 processes, vs 2", bound=4.5, sense="most"
    ),
    "memory_save": Goal(group=GROWTH, title="peak memory of a save", bound=1.2, sense="most"),
    "memory_restore": Goal(group=GROWTH, title="peak memory of a restore", bound=1.3, sense="most"),
}


def goal_of(result: Mapping[str, Any]) -> Goal:
    """The goal of a result, as JSON has it."""
    return GOALS[result["case"]]
