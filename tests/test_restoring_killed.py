"""A job that saves all the time is killed, loses a node, and comes back: both replicators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from restoring_clusters import REPLICATORS, lose_node, newest_held, same, start_replicator
from restoring_jobs import config, extras_of, open_manager, summary

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint.testing import (
    ProcessGroup,
    abstract_state,
    assert_state,
    case_mesh,
    case_state,
    report,
)

NODES = 2
ENOUGH_SAVES = 6
STEP_SECONDS = 0.02


@pytest.fixture(params=REPLICATORS)
def cluster(request: pytest.FixtureRequest, volume_root: Path) -> Iterator[Any]:
    with start_replicator(request.param, volume_root, NODES) as cluster:
        yield cluster


def test_killed_while_saving_all_the_time(
    cluster: Any, volume_root: Path, record_property: Callable[[str, object], None]
) -> None:
    with ProcessGroup(train_until_killed, NODES, devices=4, args=[str(volume_root)]) as group:
        lags = []
        for _ in range(ENOUGH_SAVES):
            saved = group.wait_for("saved", rank=0)["step"]
            held = newest_held(cluster.volumes)
            lags.append(saved - held if held is not None else saved)
        held_before = newest_held(cluster.volumes)
        for rank in range(NODES):
            group.kill(rank)
        steps = [event["step"] for event in group.events(0) if event.name == "saved"]
    lose_node(cluster, 1)

    begun = time.time()
    with ProcessGroup(restore_and_tell, NODES, devices=4, args=[str(volume_root)]) as group:
        found = group.wait(120)

    step, tier = same(found, "step", "tier")
    assert tier == "peer"
    assert held_before is not None and step >= held_before
    # A save starts when the one before was taken: no more than two are on their way.
    later = [saved for saved in steps if saved > step]
    assert len(later) <= 2
    record_property("steps saved", steps)
    record_property("steps behind, by save", lags)
    record_property("saved steps after the restored one", later)
    record_property("seconds from the start", max(f["restored_at"] for f in found) - begun)
    record_property("seconds of phases", found[0]["seconds"])


def pass_time() -> None:
    """What a training step takes."""
    end = Deadline.after(STEP_SECONDS)
    wait_for(lambda: end.passed() or None, Deadline.after(10), "the step")


def train_until_killed(root: str) -> None:
    """Short steps; saves as often as it may."""
    settings = config(root, local_checkpoint_period=0, enable_continuous_checkpointing=True)
    mesh = case_mesh()
    with open_manager(settings) as manager:
        assert manager.restore_latest(abstract_state(case_state(mesh, 0))) is None
        for step in range(1_000_000):
            pass_time()
            if manager.save(step, case_state(mesh, step), extras=extras_of(step)):
                report("saved", step=step)


def restore_and_tell(root: str) -> dict[str, Any]:
    settings = config(root, local_checkpoint_period=0, enable_continuous_checkpointing=True)
    with open_manager(settings) as manager:
        restored = manager.restore_latest(abstract_state(case_state(case_mesh(), 0)))
        restored_at = time.time()
        assert restored is not None
        assert_state(restored.state, restored.step)
        return {**summary(restored), "restored_at": restored_at}
