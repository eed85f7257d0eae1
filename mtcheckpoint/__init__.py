"""Checkpoints for JAX that survive in the cluster's memory.

import mtcheckpoint as mtc

config = mtc.CheckpointConfig.from_flags(flags)
mtc.initialize(config)
with mtc.ReplicatedCheckpointManager(config, mesh=mesh) as manager:
    restored = manager.restore_latest(abstract_state)
    ...
    manager.save(step, state, extras={"data": iterator_state})
"""

from mtcheckpoint import errors
from mtcheckpoint._initialize import initialize
from mtcheckpoint._persistent import create_checkpoint_manager
from mtcheckpoint._restorer import PassedOver, RestoredState, RestoreReport
from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.manager import ReplicatedCheckpointManager

__all__ = [
    "CheckpointConfig",
    "PassedOver",
    "ReplicatedCheckpointManager",
    "RestoreReport",
    "RestoredState",
    "create_checkpoint_manager",
    "errors",
    "initialize",
]
