"""`latest_step` and `all_steps` are one answer for all processes, at every point of the program."""

from __future__ import annotations

import random
from typing import Any

import pytest
import saving_jobs as jobs

import mtcheckpoint as mtc
from mtcheckpoint._shares.volume import KeptSteps
from mtcheckpoint.testing import case_state, ram_disk, run_processes

pytestmark = pytest.mark.extended

STEPS = 120


@pytest.mark.parametrize("late", [0, 1])
def test_all_tell_the_same_steps(late: int) -> None:
    """One process knows of each commit long after the other: it is held up where it tidies up."""
    with ram_disk() as root:
        for rank in range(2):
            (root / f"node-{rank}").mkdir()
        told = run_processes(save_and_tell, 2, devices=1, args=[str(root), late])
    assert told[0] == told[1]
    latest = [step for step, _ in told[0] if step is not None]
    assert latest == sorted(latest)
    assert len(set(latest)) > 3, "no commit was told between two saves"
    assert latest[-1] == told[0][-1][1][-1]


def save_and_tell(root: str, late: int) -> list[Any]:
    stalls = random.Random(jobs.rank())
    if jobs.rank() == late:
        tidy = KeptSteps.tidy
        KeptSteps.tidy = lambda self: (jobs.pause(0.1), tidy(self))[1]  # type: ignore[method-assign]
    told: list[Any] = []

    def tell() -> None:
        told.append([manager.latest_step(), list(manager.all_steps())])

    settings = jobs.alone(root, max_num_checkpoints_to_keep=100)
    with mtc.ReplicatedCheckpointManager(settings, mesh=jobs.mesh()) as manager:
        for step in range(STEPS):
            jobs.train()
            jobs.pause(0.005 + stalls.random() * 0.01)
            manager.save(step, case_state(jobs.mesh(), step))
            tell()
            manager.check_for_errors()
            tell()
        manager.wait_until_finished()
        tell()
    return told
