"""What the processes of the restore tests run: small jobs on one RAM disk each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

import mtcheckpoint as mtc
from mtcheckpoint import _topology
from mtcheckpoint.errors import MtCheckpointError
from mtcheckpoint.testing import abstract_state, assert_state, case_mesh, case_state, this_process

JOB = "job-a"
LIMIT_SECONDS = 60.0


def rank() -> int:
    """Whose RAM disk this process has: not its JAX process id, when those are permuted."""
    place = this_process()
    assert place is not None
    return place.rank


def folder(root: str) -> Path:
    """This process's RAM disk."""
    return Path(root) / f"node{rank()}"


def config(root: str | Path, **flags: Any) -> mtc.CheckpointConfig:
    defaults: dict[str, Any] = {
        "enable_multi_tier_checkpointing": True,
        "local_checkpoint_directory": str(folder(str(root))),
        "local_checkpoint_period": 1,
        "multi_tier_checkpointing_backup_interval_minutes": 30,
        "run_name": JOB,
        "timeout_secs": LIMIT_SECONDS,
    }
    return mtc.CheckpointConfig(**{**defaults, **flags})


def alone(root: str | Path, **flags: Any) -> mtc.CheckpointConfig:
    """A configuration without a replicator, which keeps two steps."""
    folder(str(root)).mkdir(parents=True, exist_ok=True)
    return config(root, **{"enable_replicator": False, "max_num_checkpoints_to_keep": 2, **flags})


def open_manager(
    settings: mtc.CheckpointConfig, mesh: jax.sharding.Mesh | None = None
) -> mtc.ReplicatedCheckpointManager:
    return mtc.ReplicatedCheckpointManager(settings, mesh=mesh or case_mesh())


def together(name: str) -> None:
    """Returns when all processes have come."""
    multihost_utils.sync_global_devices(name)


def extras_of(step: int) -> dict[str, Any]:
    return {"rank": jax.process_index(), "step": step, "iterator": b"\x00at"}


def save_all(manager: mtc.ReplicatedCheckpointManager, steps: Iterable[int]) -> None:
    mesh = case_mesh()
    for step in steps:
        assert manager.save(step, case_state(mesh, step), extras=extras_of(step), force=True)
    manager.wait_until_finished()


def save_alone(root: str | Path, steps: Iterable[int], **flags: Any) -> None:
    """Saves steps without a replicator; they lie in the RAM disks as directories of digits."""
    with open_manager(alone(root, **flags)) as manager:
        save_all(manager, steps)


def summary(restored: mtc.RestoredState | None) -> dict[str, Any]:
    """What came back, as JSON. The elements are checked here, where they are."""
    if restored is None:
        return {"step": None}
    assert_state(restored.state, restored.step)
    return {
        "step": restored.step,
        "tier": restored.tier,
        "extras": [(e["rank"], e["step"], e["iterator"] == b"\x00at") for e in restored.extras],
        "passed_over": [[p.step, p.source, p.reason] for p in restored.report.passed_over],
        "bytes": dict(restored.report.bytes_by_tier),
        "seconds": dict(restored.report.seconds),
    }


def outcome(attempt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `attempt` returns, or the error that it raises, and how long that took."""
    begun = time.monotonic()
    try:
        found = attempt()
    except MtCheckpointError as error:
        found = {
            "error": type(error).__name__,
            "message": str(error),
            "paths": list(getattr(error, "paths", ())),
            "available": list(getattr(error, "available", ())),
        }
    return {**found, "took_seconds": time.monotonic() - begun}


def restore_outcome(settings: mtc.CheckpointConfig) -> dict[str, Any]:
    """How `restore_latest` ends for the standard state."""

    def attempt() -> dict[str, Any]:
        with open_manager(settings) as manager:
            return summary(manager.restore_latest(abstract_state(case_state(case_mesh(), 0))))

    return outcome(attempt)


# Jobs.


def train(root: str, flags: dict[str, Any], steps: list[int]) -> dict[str, Any]:
    """Restores what there is, then saves `steps`."""
    with open_manager(config(root, **flags)) as manager:
        found = summary(manager.restore_latest(abstract_state(case_state(case_mesh(), 0))))
        save_all(manager, steps)
    return found


def train_with_backups(
    root: str, flags: dict[str, Any], interval: dict[str, Any], steps: list[int]
) -> dict[str, Any]:
    """As `train`, with an interval between backups that our configuration does not take."""
    settings = _topology.replicator_settings

    def changed(*arguments: Any) -> dict[str, Any]:
        kept = settings(*arguments)
        del kept["backup-interval-minutes"]
        return {**kept, **interval}

    _topology.replicator_settings = changed
    return train(root, flags, steps)


def restore_without_replicator(root: str, flags: dict[str, Any]) -> dict[str, Any]:
    return restore_outcome(alone(root, **flags))


def to_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def environment_of(url: str) -> dict[str, str]:
    """What a process needs to reach a Cloud Storage server on loopback."""
    return {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url, **_offline()}


def _offline() -> dict[str, str]:
    names = ("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "FSSPEC_GCS", "GOOGLE_AUTH_TOKEN_FOR_TESTING")
    return {name: os.environ[name] for name in names if name in os.environ}
