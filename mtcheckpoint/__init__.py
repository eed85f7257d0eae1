"""Checkpoints for JAX that survive in the cluster's memory.

import mtcheckpoint as mtc

config = mtc.CheckpointConfig.from_flags(flags)
mtc.initialize(config)
with mtc.ReplicatedCheckpointManager(config, mesh=mesh) as manager:
    restored = manager.restore_latest(abstract_state)
    ...
    manager.save(step, state, extras={"data": iterator_state})
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtcheckpoint import errors as errors
    from mtcheckpoint._extras import spread_extras as spread_extras
    from mtcheckpoint._initialize import initialize as initialize
    from mtcheckpoint._persistent import create_checkpoint_manager as create_checkpoint_manager
    from mtcheckpoint._replicator.embedded import EmbeddedReplicator as EmbeddedReplicator
    from mtcheckpoint._restored import PassedOver as PassedOver
    from mtcheckpoint._restored import RestoredState as RestoredState
    from mtcheckpoint._restored import RestoreReport as RestoreReport
    from mtcheckpoint.config import CheckpointConfig as CheckpointConfig
    from mtcheckpoint.manager import ReplicatedCheckpointManager as ReplicatedCheckpointManager

# Where each public name lives. Loaded when it is first asked for: the command line and the embedded
# replicator need neither JAX nor Orbax, which take a second.
_HOMES = {
    "CheckpointConfig": "mtcheckpoint.config",
    "EmbeddedReplicator": "mtcheckpoint._replicator.embedded",
    "PassedOver": "mtcheckpoint._restored",
    "ReplicatedCheckpointManager": "mtcheckpoint.manager",
    "RestoreReport": "mtcheckpoint._restored",
    "RestoredState": "mtcheckpoint._restored",
    "create_checkpoint_manager": "mtcheckpoint._persistent",
    "initialize": "mtcheckpoint._initialize",
    "spread_extras": "mtcheckpoint._extras",
}

__all__ = [
    "CheckpointConfig",
    "EmbeddedReplicator",
    "PassedOver",
    "ReplicatedCheckpointManager",
    "RestoreReport",
    "RestoredState",
    "create_checkpoint_manager",
    "errors",
    "initialize",
    "spread_extras",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in __all__:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
