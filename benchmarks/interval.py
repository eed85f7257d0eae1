"""How far apart checkpoints are when the next save starts as soon as it can, against a period."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import mtcheckpoint as mtc
from benchmarks import replicators, sides
from benchmarks.results import Case, Pair, Result, Settings, compared
from mtcheckpoint.testing import ram_disk, run_processes

__all__ = ["CASES", "lost_seconds", "training"]

PERIOD_STEPS = 100

_PROCESSES = 2
_STATE_BYTES = 32 << 20  # at most: a model with steps this short is small
_STEPS = 1000
_STEP_SECONDS = 0.01
_KILLS = 10_000
_LIMIT_SECONDS = 600.0


def interval(settings: Settings) -> Result:
    """Median distance of checkpoints in steps."""
    return _result("interval", settings, "steps", _distance)


def interval_lost_work(settings: Settings) -> Result:
    """Median work that is lost by a kill at a random moment."""
    return _result("interval_lost_work", settings, "s", _lost)


CASES: dict[str, Case] = {"interval": interval, "interval_lost_work": interval_lost_work}


def _result(case: str, settings: Settings, unit: str, of: Callable[[Any], float]) -> Result:
    size = min(settings.size_bytes, _STATE_BYTES)
    rounds = _trained(size, min(settings.pairs, 3))
    pairs = [Pair(of(found["continuous"]), of(found["period"])) for found in rounds]
    lost = {name: statistics.median(_lost(found[name]) for found in rounds) for name in rounds[0]}
    result = compared(
        case,
        pairs,
        f"{size >> 20} MiB, {_PROCESSES} processes with the embedded replicator, {_STEPS} steps of"
        f" {_STEP_SECONDS * 1e3:g} ms; continuous saves against a save every {PERIOD_STEPS} steps;"
        f" lost by a kill at a random moment, median of {_KILLS}: {lost['continuous']:.3f} s"
        f" against {lost['period']:.3f} s",
        unit=unit,
    )
    last = rounds[-1]
    return dataclasses.replace(
        result, data={name: _timeline(found) for name, found in last.items()}
    )


@functools.cache
def _trained(size_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """Rounds of both policies in turns; which steps process 0 saw committed, and when."""
    return [
        {name: _train(name, size_bytes) for name in _in_turn(("continuous", "period"), number)}
        for number in range(rounds)
    ]


def _in_turn(names: Sequence[str], number: int) -> Iterator[str]:
    return iter(names if number % 2 == 0 else names[::-1])


def _train(name: str, size_bytes: int) -> dict[str, Any]:
    start = replicators.running("embedded")
    with ram_disk("mtcheckpoint-bench-") as root, start(root, _PROCESSES, sides.JOB):
        told = run_processes(
            train,
            _PROCESSES,
            devices=1,
            args=[str(root), size_bytes, name],
            timeout_secs=_LIMIT_SECONDS,
        )
    assert [process["saved"] for process in told] == [told[0]["saved"]] * _PROCESSES
    found: dict[str, Any] = told[0]
    return found


# What the figures are made of.


def _distance(found: dict[str, Any]) -> float:
    steps: list[int] = [step for step, _ in found["committed"]]
    return statistics.median(after - before for before, after in itertools.pairwise(steps))


def _lost(found: dict[str, Any]) -> float:
    return statistics.median(lost_seconds(found["ends"], found["committed"], kills=_KILLS))


def lost_seconds(
    ends: Sequence[float], committed: Sequence[tuple[int, float]], *, kills: int, seed: int = 0
) -> list[float]:
    """What kills at random moments cost: seconds since the end of the step that was newest then.

    Args:
        ends: when each step ended, in seconds.
        committed: steps and when they were committed, oldest first; kills come after the first.
        kills: how many.
        seed: of the moments.
    """
    rng = random.Random(seed)
    times = [seconds for _, seconds in committed]
    lost = []
    for _ in range(kills):
        moment = rng.uniform(times[0], ends[-1])
        step, _ = committed[bisect.bisect_right(times, moment) - 1]
        lost.append(moment - ends[step])
    return lost


def _timeline(found: dict[str, Any]) -> dict[str, Any]:
    """For the plot: each committed step, and the seconds at which it ended and was committed."""
    begun, ends = found["ends"][0], found["ends"]
    return {
        "seconds": round(ends[-1] - begun, 3),
        "committed": [
            [step, round(ends[step] - begun, 3), round(seconds - begun, 3)]
            for step, seconds in found["committed"]
        ],
    }


# In each process.


def train(root: str, size_bytes: int, policy: str) -> dict[str, Any]:
    """Trains; when each step ended, and which steps were committed on all processes when."""
    config = mtc.CheckpointConfig(
        run_name=sides.JOB,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=str(sides.own_volume(root)),
        enable_continuous_checkpointing=policy == "continuous",
        local_checkpoint_period=0 if policy == "continuous" else PERIOD_STEPS,
        multi_tier_checkpointing_backup_interval_minutes=30,
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    state, train_step = training(mesh, size_bytes)
    ends: list[float] = []
    saved: list[int] = []
    committed: list[tuple[int, float]] = []
    with mtc.ReplicatedCheckpointManager(config, mesh=mesh) as manager:
        assert manager.restore_latest(state) is None
        for step in range(_STEPS):
            begun = time.monotonic()
            state, total = train_step(state)
            assert float(total) >= 0.0  # waits for the step, as a loop that logs its loss does
            # Steps that leave the host to itself, as those of an accelerator do.
            time.sleep(max(0.0, _STEP_SECONDS - (time.monotonic() - begun)))
            ends.append(time.monotonic())
            if manager.save(step, state):
                saved.append(step)
            newest = manager.latest_step() if saved else None
            if newest is not None and newest != (committed[-1][0] if committed else None):
                committed.append((newest, time.monotonic()))
    return {"ends": ends, "saved": saved, "committed": committed}


def training(mesh: jax.sharding.Mesh, size_bytes: int) -> tuple[Any, Any]:
    """A state over all processes, and a step that changes it and for which all are needed."""
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    shape = (jax.device_count(), max(size_bytes // 4 // jax.device_count(), 64))
    rows = np.arange(shape[1], dtype=np.float32)[None]
    state = {"w": jax.make_array_from_callback(shape, sharded, lambda index: rows)}

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(tree: Any) -> Any:
        return {"w": tree["w"].at[:, :64].add(1.0)}

    total = jax.jit(lambda tree: jnp.sum(tree["w"][:, :64]), out_shardings=everywhere)

    def step(tree: Any) -> tuple[Any, Any]:
        tree = train_step(tree)
        return tree, total(tree)

    return state, step
