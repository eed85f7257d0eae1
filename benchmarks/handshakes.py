"""From a job that has started to what it can restore, against Orbax's initialisation."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from absl import flags
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.experimental.emergency import replicator_checkpoint_manager as replicated
from orbax.checkpoint.experimental.emergency.multi_tier_checkpointing import initialization

import mtcheckpoint as mtc
from benchmarks import replicators, sides, states, timing
from benchmarks.results import Case, Pair, Result, Settings, compared
from mtcheckpoint.testing import ram_disk, run_processes

__all__ = ["CASES"]

_PROCESSES = 2
_LIMIT_SECONDS = 300.0
_SIDES = ("ours", "orbax")


def handshake(settings: Settings) -> Result:
    """Opposite the embedded replicator."""
    return _result("handshake", "embedded", settings)


def handshake_google(settings: Settings) -> Result:
    """Opposite Google's replicator, which waits for its first job."""
    return _result("handshake_google", "google", settings)


def handshake_google_restart(settings: Settings) -> Result:
    """The same, when it is still busy with the run before, and starts itself anew."""
    return _result("handshake_google_restart", "google", settings, which="again")


CASES: dict[str, Case] = {
    "handshake": handshake,
    "handshake_google": handshake_google,
    "handshake_google_restart": handshake_google_restart,
}


def _result(case: str, kind: str, settings: Settings, *, which: str = "first") -> Result:
    rounds = _shaken(kind, settings.pairs)
    found = [{side: told[which] for side, told in both.items()} for both in rounds]
    pairs = [Pair(*(_slowest(both[side], "seconds") for side in _SIDES)) for both in found]
    inner = statistics.median(_slowest(both["ours"], "handshake") for both in found)
    return compared(
        case,
        pairs,
        f"{_PROCESSES} processes, {kind} replicator, nothing to restore; from jax.distributed to"
        " the answer. Ours: the manager and restore_latest, with its checks before the first step;"
        f" {inner:.3f} s of it from replicator.yaml to the marker. Other:"
        " initialize_multi_tier_checkpointing, the manager and latest_step",
    )


def _slowest(told: Sequence[Mapping[str, float]], what: str) -> float:
    return max(process[what] for process in told)


@functools.cache
def _shaken(kind: str, pairs: int) -> list[dict[str, Any]]:
    """Rounds of all sides in turns, each opposite a replicator that has just started."""
    start = replicators.running(kind)
    # The embedded replicator does not start itself anew, so a restart is like a first start.
    which = ("first", "again") if kind == "google" else ("first",)
    rounds = []
    for number in range(pairs):
        order = _SIDES if number % 2 == 0 else _SIDES[::-1]
        rounds.append({side: _started(start, side, which) for side in order})
    return rounds


def _started(
    start: replicators.Start, side: str, which: Sequence[str]
) -> dict[str, list[dict[str, float]]]:
    """A job's first start and maybe its restart, each in new processes."""
    with ram_disk("mtcheckpoint-bench-") as root, start(root, _PROCESSES, sides.JOB):
        return {
            name: run_processes(
                shake, _PROCESSES, devices=1, args=[str(root), side], timeout_secs=_LIMIT_SECONDS
            )
            for name in which
        }


# In each process.


def shake(root: str, side: str) -> dict[str, float]:
    """Seconds that one handshake takes."""
    _ = mtc.ReplicatedCheckpointManager  # imports it: Orbax's manager was imported above
    multihost_utils.sync_global_devices("handshake")
    return {"ours": _begin_ours, "orbax": _begin_orbax}[side](sides.own_volume(root))


def _begin_ours(volume: Path) -> dict[str, float]:
    config = mtc.CheckpointConfig(
        run_name=sides.JOB,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=str(volume),
        local_checkpoint_period=1,
        multi_tier_checkpointing_backup_interval_minutes=30,
    )

    def begin() -> mtc.ReplicatedCheckpointManager:
        manager = mtc.ReplicatedCheckpointManager(config, mesh=states.mesh())
        assert manager.restore_latest() is None
        return manager

    taken, manager = timing.clocked(begin)
    inner = manager._session.seconds["handshake"]
    manager.close()
    return {"seconds": taken["seconds"], "handshake": inner}


def _begin_orbax(volume: Path) -> dict[str, float]:
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["benchmark"])  # what Orbax expects of the program around it

    def begin() -> Any:
        # Both sides find jax.distributed running.
        with mock.patch.object(jax.distributed, "initialize"):
            initialization.initialize_multi_tier_checkpointing(
                epath.Path(volume), run_name=sides.JOB, num_slices=1, use_mtc_process_ids=False
            )
        manager = replicated.ReplicatorCheckpointManager(
            epath.Path(volume),
            options=replicated.ReplicatorCheckpointManagerOptions(),
            global_mesh=states.mesh(),
        )
        assert manager.latest_step() is None
        return manager

    taken, manager = timing.clocked(begin)
    manager.close()
    return {"seconds": taken["seconds"]}
