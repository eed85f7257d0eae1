"""Saves against those of Orbax's manager, and against writing the same buffers raw."""

from __future__ import annotations

import functools
import statistics
from typing import Any

from benchmarks import saving_jobs as jobs
from benchmarks import timing
from benchmarks.results import Case, Result, Settings
from mtcheckpoint.testing import ram_disk, run_processes

__all__ = ["CASES"]

_PROCESSES = 2
_DEVICES = 2
_LIMIT_SECONDS = 1800.0


def save_vs_orbax_replicator(settings: Settings) -> Result:
    """From the call of `save` to the commit on all processes."""
    return timing.result_of(
        "save_vs_orbax_replicator",
        _saved(settings),
        "orbax",
        f"{_setting(settings)}; from the call of save to the commit on all processes, ours sealed",
    )


def save_vs_raw_tmpfs(settings: Settings) -> Result:
    """The share of the speed of plain writes."""
    return timing.result_of(
        "save_vs_raw_tmpfs",
        _saved(settings),
        "raw",
        f"{_setting(settings)}; raw: each process writes the state's own buffers by os.write into"
        " fresh files, one a shard, with as many threads as it has cores; ours into the files of a"
        " step that was deleted",
    )


def save_vs_raw_over(settings: Settings) -> Result:
    """The same, with plain writes over files that are there already, as ours go."""
    return timing.result_of(
        "save_vs_raw_over",
        _saved(settings),
        "raw_over",
        f"{_setting(settings)}; raw: as before, over the files of a step that was deleted, as ours"
        " are written",
    )


def blocked_vs_orbax_replicator(settings: Settings) -> Result:
    """How long `save` keeps the training thread, with nothing else to do."""
    return timing.result_of(
        "blocked_vs_orbax_replicator",
        _saved(settings),
        "orbax",
        f"{_setting(settings)}; seconds until save returns, devices idle",
        what="blocked",
    )


def blocked_queued_vs_orbax_replicator(settings: Settings) -> Result:
    """The same, when the state comes out of steps that are still queued on the devices."""
    told = _run(jobs.save_behind_steps, settings)
    alone = statistics.median(timing.slowest(told, "steps")[1:])
    following = {side: max(timing.slowest(told, side, "next")[1:]) for side in ("ours", "orbax")}
    return timing.result_of(
        "blocked_queued_vs_orbax_replicator",
        told,
        "orbax",
        f"{_setting(settings)}; seconds until save returns, with {jobs.QUEUED_STEPS} steps of"
        f" training queued before it, which alone take {alone:.2f} s; after it the next step, which"
        f" is given the state's memory, is queued in at most {following['ours']:.3f} s, with Orbax"
        f" in {following['orbax']:.3f} s",
        what="blocked",
    )


CASES: dict[str, Case] = {
    "save_vs_orbax_replicator": save_vs_orbax_replicator,
    "save_vs_raw_tmpfs": save_vs_raw_tmpfs,
    "save_vs_raw_over": save_vs_raw_over,
    "blocked_vs_orbax_replicator": blocked_vs_orbax_replicator,
    "blocked_queued_vs_orbax_replicator": blocked_queued_vs_orbax_replicator,
}


@functools.cache
def _saved(settings: Settings) -> timing.Told:
    """One run of all sides in turns, which several cases look at."""
    return _run(jobs.save, settings)


def _run(target: Any, settings: Settings) -> timing.Told:
    with ram_disk("mtcheckpoint-bench-") as root:
        return run_processes(
            target,
            _PROCESSES,
            devices=_DEVICES,
            args=[str(root), settings.size_bytes, settings.pairs],
            timeout_secs=_LIMIT_SECONDS,
        )


def _setting(settings: Settings) -> str:
    return f"{settings.size_mib} MiB, {_PROCESSES} processes of {_DEVICES} devices"
