"""What a step costs on which nothing is saved, with other steps being saved in the background."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mtcheckpoint as mtc
from benchmarks.interval import training
from benchmarks.results import Case, Pair, Result, Settings, compared
from mtcheckpoint.testing import NodeDirectories, ram_disk, run_processes, this_process

__all__ = ["CASES"]

LIMIT_UNASKED_SECONDS = 50e-6
LIMIT_ASKED_SECONDS = 2e-3

_PROCESSES = (2, 4)
_STATE_BYTES = 64 << 20  # at most: steps between saves are what counts here
_STEPS = 400
_STEP_SECONDS = 0.005
_LIMIT_SECONDS = 600.0


def decision_us(settings: Settings) -> Result:
    """Steps on which all processes know that nothing is due: most of them."""
    return _result(settings, "decision_us", "unasked", LIMIT_UNASKED_SECONDS)


def decision_asked_us(settings: Settings) -> Result:
    """Steps on which process 0 is asked, and nothing is saved."""
    return _result(settings, "decision_asked_us", "asked", LIMIT_ASKED_SECONDS)


CASES: dict[str, Case] = {"decision_us": decision_us, "decision_asked_us": decision_asked_us}


def _result(settings: Settings, case: str, kind: str, limit: float) -> Result:
    size = min(settings.size_bytes, _STATE_BYTES)
    pairs, lines = [], []
    for processes in _PROCESSES:
        runs = _trained(processes, size, min(settings.pairs, 3))
        seconds = [[s for told in run for s in told[kind]] for run in runs]
        pairs = [Pair(statistics.median(run), limit) for run in seconds]
        lines.append(_line(processes, kind, seconds, runs))
    return compared(
        case,
        pairs,
        f"of the call of save, {size >> 20} MiB saved continuously, steps of"
        f" {_STEP_SECONDS * 1e3:g} ms; other: the limit. {'; '.join(lines)}",
    )


def _line(processes: int, kind: str, seconds: Sequence[Sequence[float]], runs: Any) -> str:
    every = sorted(s for run in seconds for s in run)
    p99 = every[min(len(every) * 99 // 100, len(every) - 1)]
    saves = statistics.median(told["saves"] for run in runs for told in run)
    share = len(every) / sum(len(told["asked"]) + len(told["unasked"]) for r in runs for told in r)
    return (
        f"{processes} processes: median {statistics.median(every) * 1e6:.0f} µs, 99th percentile"
        f" {p99 * 1e6:.0f} µs of the {share:.0%} of steps that are {kind}, with {saves:g} saves in"
        f" {_STEPS} steps"
    )


@functools.cache
def _trained(processes: int, size_bytes: int, runs: int) -> list[list[dict[str, Any]]]:
    """Runs that both cases look at."""
    return [_train(processes, size_bytes) for _ in range(runs)]


def _train(processes: int, size_bytes: int) -> list[dict[str, Any]]:
    with ram_disk("mtcheckpoint-bench-") as root:
        nodes = NodeDirectories(root, processes)
        with mtc.EmbeddedReplicator(list(nodes)):
            return run_processes(
                train,
                processes,
                devices=1,
                args=[str(root), size_bytes],
                timeout_secs=_LIMIT_SECONDS,
            )


# In each process.


def train(root: str, size_bytes: int) -> dict[str, Any]:
    """Trains and saves as often as it can; seconds of each call that saved nothing."""
    place = this_process()
    assert place is not None
    config = mtc.CheckpointConfig(
        run_name="bench",
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=str(Path(root) / f"node-{place.rank}"),
        enable_continuous_checkpointing=True,
        multi_tier_checkpointing_backup_interval_minutes=30,
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    state, train_step = training(mesh, size_bytes)
    found: dict[str, Any] = {"asked": [], "unasked": [], "saves": 0}
    with mtc.ReplicatedCheckpointManager(config, mesh=mesh) as manager:
        assert manager.restore_latest(state) is None
        for step in range(_STEPS):
            begun = time.perf_counter()
            state, total = train_step(state)
            assert float(total) >= 0.0  # waits for the step, as a loop that logs its loss does
            time.sleep(max(0.0, _STEP_SECONDS - (time.perf_counter() - begun)))
            asked = manager._decider.asked
            begun = time.perf_counter()
            saved = manager.save(step, state)
            seconds = time.perf_counter() - begun
            if saved:
                found["saves"] += 1
            else:
                found["asked" if manager._decider.asked > asked else "unasked"].append(seconds)
        latest = manager.latest_step()
        assert latest is not None and found["saves"] > 0
    return found
