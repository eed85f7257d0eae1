"""Jobs that save by all kinds of policies, each in a run of its own; the steps that were saved."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from typing import Any

import saving_jobs as jobs

import mtcheckpoint as mtc
from mtcheckpoint.testing import assert_state, case_state


@dataclasses.dataclass
class ByProcess:
    """A user's policy that every host would answer in its own way."""

    salt: int

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return (os.getpid() * 7 + step.step * 3 + jobs.rank() + self.salt) % 5 == 0


class ByLocalClock:
    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return (time.time_ns() // 1_000_000 + 3 * jobs.rank()) % 7 < 2


def all_policies(root: str) -> dict[str, Any]:
    from orbax.checkpoint.checkpoint_managers import save_decision_policy as orbax

    def fixed(period: int) -> dict[str, Any]:
        return {"enable_continuous_checkpointing": False, "local_checkpoint_period": period}

    listed = {"enable_continuous_checkpointing": False, "local_checkpoint_steps": (3, 5, 17)}
    return {
        "period": _saved(root, **fixed(10)),
        "period, not on start": _saved(root, save_checkpoint_on_start=False, **fixed(10)),
        "steps": _saved(root, save_checkpoint_on_start=False, **listed),
        "continuous": _saved(root),
        "continuous, seconds": _saved(root, minimum_interval_secs=0.5, pace=0.02),
        "orbax fixed": _saved(root, orbax.FixedIntervalPolicy(10)),
        "orbax continuous": _saved(root, orbax.ContinuousCheckpointingPolicy()),
        "orbax steps": _saved(root, orbax.SpecificStepsPolicy([4, 9])),
        "by process": _saved(root, ByProcess(salt=1)),
        "by clock": _saved(root, ByLocalClock(), pace=0.005),
        "in the foreground": _saved(root, async_checkpointing=False, waits=False),
        "asked": _asked(root),
        "rolled back": _rolled_back(root),
    }


def _saved(
    root: str, policy: Any = None, *, pace: float = 0.0, waits: bool = True, **changes: Any
) -> list[int]:
    """Waits after each save, so that what is saved follows from the policy alone."""
    settings = jobs.alone(root, **changes)
    saved = []
    with mtc.ReplicatedCheckpointManager(settings, mesh=jobs.mesh(), policy=policy) as manager:
        for step in range(41):
            jobs.train()
            if manager.save(step, case_state(jobs.mesh(), step)):
                saved.append(step)
                if waits:
                    manager.wait_until_finished()
                assert not manager.is_saving_in_progress()
            jobs.pause(pace)
        assert manager.latest_step() == (saved[-1] if saved else None)
    _wipe(root)
    return saved


def _asked(root: str) -> dict[str, Any]:
    """Forced saves, saves of steps that are there, and questions without a save."""
    settings = jobs.alone(root, enable_continuous_checkpointing=False, local_checkpoint_period=1000)
    state = case_state(jobs.mesh(), 7)
    with mtc.ReplicatedCheckpointManager(settings, mesh=jobs.mesh()) as manager:
        should = [manager.should_save(0), manager.should_save(7)]
        forced = [manager.save(7, state), manager.save(7, state, force=True)]
        manager.wait_until_finished()
        written = _identity(root, 7)
        again = [manager.save(7, state), manager.save(7, state, force=True)]
        manager.wait_until_finished()
        unchanged = _identity(root, 7) == written
        try:
            manager.save(-1, state, force=True)
            negative = ""
        except ValueError as error:
            negative = str(error)
    _wipe(root)
    return {
        "should": should,
        "forced": forced,
        "again": again,
        "unchanged": unchanged,
        "negative": negative,
    }


def _identity(root: str, step: int) -> str:
    return (jobs.volume(root) / str(step) / "mtcheckpoint" / "identity.json").read_text()


def _rolled_back(root: str) -> dict[str, Any]:
    settings = jobs.alone(
        root,
        enable_continuous_checkpointing=False,
        local_checkpoint_period=10,
        max_num_checkpoints_to_keep=3,
    )
    with mtc.ReplicatedCheckpointManager(settings, mesh=jobs.mesh()) as manager:
        for step in (10, 20, 30):
            manager.save(step, case_state(jobs.mesh(), step), force=True)
        manager.wait_until_finished()
        manager.restore(10)
        latest = [manager.latest_step()]
        saved = []
        for step in range(11, 26):
            jobs.train()
            if manager.save(step, case_state(jobs.mesh(), 100 + step)):
                saved.append(step)
                manager.wait_until_finished()
                latest.append(manager.latest_step())
        steps = sorted(int(p.name) for p in jobs.volume(root).iterdir() if p.name.isdigit())
    with mtc.ReplicatedCheckpointManager(settings, mesh=jobs.mesh()) as manager:
        restored = manager.restore_latest(case_state(jobs.mesh(), 0))
        assert restored is not None
        assert_state(restored.state, 100 + restored.step)
    _wipe(root)
    return {"saved": saved, "latest": latest, "steps": steps, "restored": restored.step}


def _wipe(root: str) -> None:
    for path in jobs.volume(root).iterdir():
        shutil.rmtree(path)
