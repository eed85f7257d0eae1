"""What the demo shows, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

__all__ = ["Copies", "NodeState", "NodeView", "Recovery", "View"]

NodeState = Literal["starting", "compiling", "training", "gone"]

# By node rank: the newest step of that node's share.
Copies = Mapping[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    """One node.

    Attributes:
        rank: its rank.
        state: what its process is doing; ``"gone"`` when the job runs without the node.
        step: the last step it has trained; None before the first.
        saved_step: the newest step it has committed; None before the first.
        held: whose shares lie in its memory, and of which step.
    """

    rank: int
    state: NodeState
    step: int | None
    saved_step: int | None
    held: Copies


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The job at one moment.

    Attributes:
        act: what is going on, for people.
        seconds: since the demo began.
        nodes: in order of rank.
        losses: of all steps that still count, in nats per character.
        backup_step: the newest step in the backup.
    """

    act: str
    seconds: float
    nodes: Sequence[NodeView]
    losses: Sequence[float]
    backup_step: int | None

    @property
    def replicated_step(self) -> int | None:
        """The newest step of which every node holds its own share and a peer's."""
        nodes = [node for node in self.nodes if node.state != "gone"]
        if any(len(node.held) < 2 for node in nodes):
            return None
        # A node keeps the step before until all have the next one.
        return min(step for node in nodes for step in node.held.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """How the job came back from one loss.

    Attributes:
        scenario: which loss.
        reached_step: the last step that was trained before it.
        last_committed_step: the newest step that all processes had committed before it.
        restored_step: the step that came back.
        tier: where from.
        expected_tiers: where from it should have come: one of these.
        state_matches: every array on every process equals what was saved.
        recovery_seconds: from the kill to the state on all processes, their start included.
    """

    scenario: str
    reached_step: int
    last_committed_step: int
    restored_step: int
    tier: str
    expected_tiers: tuple[str, ...]
    state_matches: bool
    recovery_seconds: float

    @property
    def ok(self) -> bool:
        return self.state_matches and self.tier in self.expected_tiers

    @property
    def steps_lost(self) -> int:
        return self.reached_step - self.restored_step
