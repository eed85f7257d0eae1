"""The losses, and how the job comes back from each."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from mtcheckpoint._demo.job import NODES, Job
from mtcheckpoint._demo.stage import Stage
from mtcheckpoint._demo.view import Recovery

__all__ = ["SCENARIOS", "Scenario", "play"]

# A loss comes after so many steps; on a busy machine after so many seconds, and fewer steps.
_STEPS_BETWEEN_LOSSES = 30
_SECONDS_BETWEEN_LOSSES = 8.0
_LEAST_STEPS_BETWEEN_LOSSES = 10
_SAVES_BETWEEN_LOSSES = 3
_TRAINING_LIMIT_SECONDS = 90.0
_RECOVERY_LIMIT_SECONDS = 90.0
_STRUCK_RANK = 1
_SURVIVORS = NODES // 2

_MEMORY = ("local", "peer")
_PLACES = {"local": "local memory", "peer": "peer memory", "backup": "the backup"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One way to lose a running job, and how it comes back.

    Attributes:
        name: as in the JSON file.
        title: what is about to happen, for people.
        told: what has happened, for people.
        strike: does it; no process runs afterwards.
        expected_tiers: where the state should come from: one of these.
        processes: how many the job comes back with, one a node.
        plan: what the job comes back on, for people, when that is not what it ran on.
    """

    name: str
    title: str
    told: str
    strike: Callable[[Job], None]
    expected_tiers: tuple[str, ...]
    processes: int = NODES
    plan: str = ""


def _kill_process(job: Job) -> None:
    job.kill(_STRUCK_RANK)
    job.end()


def _lose_node(job: Job) -> None:
    _lose(job, [_STRUCK_RANK])


def _lose_half(job: Job) -> None:
    _lose(job, range(_SURVIVORS, NODES))


def _get_new_nodes(job: Job) -> None:
    job.end()
    for rank in range(_SURVIVORS, NODES):
        job.wipe(rank)


def _lose_all_memory(job: Job) -> None:
    _lose(job, range(NODES))


def _lose(job: Job, ranks: Sequence[int]) -> None:
    """These nodes end, and their memory with them; the others' processes follow."""
    for rank in ranks:
        job.kill(rank)
    for rank in ranks:
        job.wipe(rank)
    job.end()


SCENARIOS = (
    Scenario(
        name="process-killed",
        title="training, until a process is killed",
        told=f"killed process {_STRUCK_RANK}",
        strike=_kill_process,
        expected_tiers=("local",),
    ),
    Scenario(
        name="node-lost",
        title="training, until a node is lost with its memory",
        told=f"lost node {_STRUCK_RANK} and its memory",
        strike=_lose_node,
        expected_tiers=("peer",),
    ),
    Scenario(
        name="cluster-shrunk",
        title="training, until half of the nodes are lost",
        told="lost nodes 2 and 3 and their memory",
        strike=_lose_half,
        expected_tiers=_MEMORY,
        processes=_SURVIVORS,
        plan=f"going on with {_SURVIVORS} nodes",
    ),
    Scenario(
        name="cluster-grown",
        title="training on half of the nodes, until there are new ones",
        told="stopped for new nodes 2 and 3",
        strike=_get_new_nodes,
        expected_tiers=_MEMORY,
        plan=f"going on with {NODES} nodes",
    ),
    Scenario(
        name="all-memory-lost",
        title="training, until all nodes are lost",
        told="lost all nodes and all memory",
        strike=_lose_all_memory,
        expected_tiers=("backup",),
    ),
)


def play(scenario: Scenario, stage: Stage) -> Recovery:
    """Lets the running job train for a while, strikes it, and brings it back.

    Raises:
        WaitTimeoutError: it did not train, or did not come back.
        ProcessFailedError: a process failed that was not struck.
    """
    job = stage.job
    stage.act = scenario.title
    _wait_until_worth_losing(scenario, stage)
    begun = time.monotonic()
    scenario.strike(job)
    reached, committed = job.step, job.last_committed_step
    assert committed is not None
    plan = f", {scenario.plan}" if scenario.plan else ""
    stage.say(f"{scenario.told} at step {reached}{plan}", style="red")
    stage.act = f"{scenario.told}: starting again"
    job.start(scenario.processes)
    stage.wait_until(lambda: job.is_restored, "the state to come back", _RECOVERY_LIMIT_SECONDS)
    seconds = time.monotonic() - begun
    stage.wait_until(lambda: job.is_compared, "the comparison", _RECOVERY_LIMIT_SECONDS)
    recovery = _recovery(scenario, job, reached, committed, seconds)
    for step, reason in job.passed_over:
        # At the end it says which shares are gone; before that, what each process misses for it.
        stage.say(f"passed over step {step}: {reason.rsplit('; ', 1)[-1]}", style="yellow")
    stage.say(_told(recovery), style="green" if recovery.ok else "bold red")
    return recovery


def _wait_until_worth_losing(scenario: Scenario, stage: Stage) -> None:
    job, begun = stage.job, time.monotonic()

    def is_worth_losing() -> bool:
        is_late = time.monotonic() - begun >= _SECONDS_BETWEEN_LOSSES
        steps = _LEAST_STEPS_BETWEEN_LOSSES if is_late else _STEPS_BETWEEN_LOSSES
        has_trained = job.trained_steps >= steps and job.saves >= _SAVES_BETWEEN_LOSSES
        return has_trained and (scenario.expected_tiers != ("backup",) or job.has_backup)

    stage.wait_until(is_worth_losing, "the job to train and save", _TRAINING_LIMIT_SECONDS)


def _recovery(
    scenario: Scenario, job: Job, reached: int, committed: int, seconds: float
) -> Recovery:
    restored = job.restored_step
    return Recovery(
        scenario=scenario.name,
        reached_step=reached,
        # A step that came back was committed, even when no process lived to say so.
        last_committed_step=max(committed, -1 if restored is None else restored),
        restored_step=-1 if restored is None else restored,
        tier=job.tier or "none",
        expected_tiers=scenario.expected_tiers,
        state_matches=job.state_matches,
        recovery_seconds=seconds,
    )


def _told(recovery: Recovery) -> str:
    arrays = "arrays equal" if recovery.state_matches else "ARRAYS DIFFER"
    place = _PLACES.get(recovery.tier, "nowhere")
    lost = f"{recovery.steps_lost} step{'' if recovery.steps_lost == 1 else 's'} lost"
    return (
        f"back at step {recovery.restored_step} from {place} in"
        f" {recovery.recovery_seconds:.1f} s, {lost}, {arrays}"
    )
