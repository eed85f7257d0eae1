"""Resident memory of a process while it saves and restores, over its part of the state."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import memory_jobs as jobs
from benchmarks.results import Case, Pair, Result, Settings, times_of
from mtcheckpoint.testing import ram_disk, run_processes

__all__ = ["CASES"]

_PROCESSES = 2
_LIMIT_SECONDS = 1800.0


def memory_save(settings: Settings) -> Result:
    """What a save takes beyond the state, while a step changes that."""
    return _result("memory_save", settings, jobs.save)


def memory_restore(settings: Settings) -> Result:
    """What a restore takes beyond the state that it makes."""
    return _result("memory_restore", settings, jobs.restore, jobs.prepare)


CASES: dict[str, Case] = {"memory_save": memory_save, "memory_restore": memory_restore}


def _result(case: str, settings: Settings, target: Any, prepare: Any = None) -> Result:
    ours = _measured(settings, "ours", target, prepare)
    orbax = _measured(settings, "orbax", target, prepare)
    times = statistics.median(pair.ours / pair.other for pair in orbax)
    return times_of(
        case,
        ours,
        f"{settings.size_mib} MiB, {_PROCESSES} processes; the peak of resident memory, less what"
        " was resident before there was a state, less the state once, in the process with most;"
        " other: its part of the state. What lies in tmpfs counts only while it is mapped, and what"
        " the allocator keeps from earlier rounds is given back before each. Orbax's replicator"
        f" manager takes {times:.2f} times the state",
        unit="B",
    )


def _measured(settings: Settings, side: str, target: Any, prepare: Any) -> list[Pair]:
    """Bytes beyond the state and bytes of the state, of each round, in fresh processes."""
    with ram_disk("mtcheckpoint-bench-") as root:
        if prepare is not None:
            _run(prepare, str(root), settings.size_bytes, side)
        told = _run(target, str(root), settings.size_bytes, side, settings.pairs)
    rounds = zip(*(process["beyond"] for process in told), strict=True)
    # Never 0: ratios are made of it.
    return [Pair(max(1, *found), told[0]["state_bytes"]) for found in rounds]


def _run(target: Any, *arguments: Any) -> list[Any]:
    return run_processes(target, _PROCESSES, args=arguments, timeout_secs=_LIMIT_SECONDS)
