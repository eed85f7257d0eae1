"""Steps of training with continuous saves, against steps without, and against Orbax's manager."""

from __future__ import annotations

import functools
import statistics

from benchmarks import stepping_jobs as jobs
from benchmarks import timing
from benchmarks.results import Case, Result, Settings
from mtcheckpoint.testing import ram_disk, run_processes

__all__ = ["CASES"]

_PROCESSES = 2
_LIMIT_SECONDS = 1800.0


def step_slowdown(settings: Settings) -> Result:
    """The share of the speed without any saves, on devices that leave the host to itself."""
    return _result("step_slowdown", "none", settings, on_host=False)


def step_slowdown_vs_orbax(settings: Settings) -> Result:
    """Against Orbax's manager saving as often."""
    return _result("step_slowdown_vs_orbax", "orbax", settings, on_host=False)


def step_slowdown_shared_cores(settings: Settings) -> Result:
    """The share of the speed without any saves, when the steps need all cores of the host."""
    return _result("step_slowdown_shared_cores", "none", settings, on_host=True)


CASES: dict[str, Case] = {
    "step_slowdown": step_slowdown,
    "step_slowdown_vs_orbax": step_slowdown_vs_orbax,
    "step_slowdown_shared_cores": step_slowdown_shared_cores,
}

_KINDS = {
    False: f"each of {jobs.DEVICE_STEP_SECONDS * 1000:.0f} ms on devices that need no core of the"
    " host meanwhile: played by a pause",
    True: "computed on the same cores as the saves, which is not so on accelerators",
}


def _result(case: str, other: str, settings: Settings, *, on_host: bool) -> Result:
    told = _trained(settings, on_host)
    saves = {side: _median(told, side, "saves") for side in ("ours", "orbax")}
    return timing.result_of(
        case,
        told,
        other,
        f"{settings.size_mib} MiB, {_PROCESSES} processes; {_steps(settings)} steps,"
        f" {_KINDS[on_host]}; saves in them: ours {saves['ours']:.0f}, as many as there is"
        f" time for, Orbax {saves['orbax']:.0f}",
    )


def _median(told: timing.Told, side: str, what: str) -> float:
    return statistics.median(timing.slowest(told, side, what)[1:])


@functools.cache
def _trained(settings: Settings, on_host: bool) -> timing.Told:
    """One run of all sides in turns, which several cases look at."""
    with ram_disk("mtcheckpoint-bench-") as root:
        return run_processes(
            jobs.train,
            _PROCESSES,
            args=[str(root), settings.size_bytes, settings.pairs, _steps(settings), on_host],
            timeout_secs=_LIMIT_SECONDS,
        )


def _steps(settings: Settings) -> int:
    """Of a round: some seconds' worth, so that several saves fall into it; few in tests."""
    return max(8, min(40, settings.size_mib))
