"""What processes run in which saves fail (case 15), each job in a volume of its own."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import saving_jobs as jobs

import mtcheckpoint as mtc
from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint.testing import case_state

FAULTY = 1


class Faults:
    """Makes the writer of one process fail for as long as it is told to."""

    def __init__(self) -> None:
        self.on = False

    def __call__(self, step: int, staging: Path) -> float:
        if self.on and jobs.rank() == FAULTY:
            (staging / f"{step}.half").mkdir(parents=True, exist_ok=True)
            raise OSError(errno.EIO, "the disk is broken")
        return 1.0


def every_kind(root: str) -> dict[str, Any]:
    """Step 20 fails on one process, and is heard of in each of the ways there are."""
    return {
        "by a later save": _by_a_later_save(root),
        "by wait": _raised(root, "job-wait", lambda manager: manager.wait_until_finished()),
        "by check": _raised(root, "job-check", _check),
        "by leaving": _raised(root, "job-leave", lambda manager: None),
        "by forcing": _raised(root, "job-force", _force),
        "the body's own": _the_bodys_own(root),
        "warned": _warned(root),
        "fixed period": _fixed_period(root),
    }


def _manager(root: str, job: str, faults: Faults, **changes: Any) -> jobs.ManagerWith:
    settings = jobs.alone(root, run_name=job, **changes)
    return jobs.ManagerWith(settings, mesh=jobs.mesh(), before=faults)


def _fail_step_20(manager: jobs.ManagerWith, faults: Faults) -> None:
    assert manager.save(10, case_state(jobs.mesh(), 10))
    manager.wait_until_finished()
    faults.on = True
    # All processes have reported step 10 to process 0 by then, or the save is forced.
    assert manager.save(20, case_state(jobs.mesh(), 20), force=True)


def _described(error: BaseException) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "step": getattr(error, "step", None),
        "processes": list(getattr(error, "processes", ())),
    }


def _clean(root: str, manager: mtc.ReplicatedCheckpointManager) -> dict[str, Any]:
    return {
        "latest": manager.latest_step(),
        "steps": list(manager.all_steps()),
        "names": _names(root),
    }


def _names(root: str) -> list[str]:
    volume = jobs.volume(root)
    found = [str(path.relative_to(volume)) for path in volume.glob("mtcheckpoint.staging/*")]
    return sorted([*found, *(path.name for path in volume.iterdir() if path.name.isdigit())])


def _by_a_later_save(root: str) -> dict[str, Any]:
    faults = Faults()
    with _manager(root, "job-later", faults) as manager:
        _fail_step_20(manager, faults)
        heard = None
        for step in range(21, 3000):
            try:
                assert not manager.save(step, case_state(jobs.mesh(), step))
            except mtc.errors.SaveError as error:
                heard = {"at": step, **_described(error), **_clean(root, manager)}
                break
            jobs.pause(0.005)
    _remove_steps(root)
    return heard or {}


def _raised(root: str, job: str, act: Any) -> dict[str, Any]:
    faults = Faults()
    with jobs.caught(mtc.errors.SaveError) as found, _manager(root, job, faults) as manager:
        _fail_step_20(manager, faults)
        act(manager)
    described = {**_described(found[0]), "latest": manager.latest_step(), "names": _names(root)}
    _remove_steps(root)
    return described


def _check(manager: jobs.ManagerWith) -> None:
    wait_for(
        lambda: not manager.is_saving_in_progress() or None, Deadline.after(30.0), "the failure"
    )
    manager.check_for_errors()


def _force(manager: jobs.ManagerWith) -> None:
    manager.save(30, case_state(jobs.mesh(), 30), force=True)


def _the_bodys_own(root: str) -> dict[str, Any]:
    faults = Faults()
    with jobs.caught(KeyError) as found, _manager(root, "job-body", faults) as manager:
        _fail_step_20(manager, faults)
        raise KeyError("from the loop")
    _remove_steps(root)
    return _described(found[0])


def _warned(root: str) -> dict[str, Any]:
    """Two failures in a row are forgiven, a third one is not."""
    faults = Faults()
    with _manager(root, "job-warn", faults, on_save_error="warn", save_error_budget=2) as manager:
        _fail_step_20(manager, faults)
        manager.wait_until_finished()
        faults.on = False
        assert manager.save(30, case_state(jobs.mesh(), 30), force=True)
        manager.wait_until_finished()
        after_one = manager.latest_step()
        faults.on = True
        heard = None
        for step in range(31, 3000):
            try:
                manager.save(step, case_state(jobs.mesh(), step))
            except mtc.errors.SaveError as error:
                heard = {"at": step, **_described(error), **_clean(root, manager)}
                break
            jobs.pause(0.005)
    _remove_steps(root)
    return {"after one": after_one, "heard": heard}


def _fixed_period(root: str) -> dict[str, Any]:
    """The next step that is due is far away, but the failure is heard of soon."""
    faults = Faults()
    faults.on = True
    changes = {"enable_continuous_checkpointing": False, "local_checkpoint_period": 1000}
    with _manager(root, "job-fixed", faults, **changes) as manager:
        assert manager.save(1000, case_state(jobs.mesh(), 1000))
        heard = None
        for step in range(1001, 1999):
            try:
                assert not manager.save(step, case_state(jobs.mesh(), step))
            except mtc.errors.SaveError as error:
                heard = {"at": step, **_described(error)}
                break
            jobs.pause(0.01)
    return heard or {}


def _remove_steps(root: str) -> None:
    import shutil

    for path in jobs.volume(root).iterdir():
        shutil.rmtree(path, ignore_errors=True)
