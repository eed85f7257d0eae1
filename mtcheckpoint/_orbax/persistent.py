"""Persistent mode: Orbax's own manager."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint._src.futures import synchronization
from orbax.checkpoint._src.handlers import handler_registration

__all__ = ["catch_up_operation_id", "open_persistent_manager", "operation_id"]


def open_persistent_manager(
    directory: str,
    *,
    save_policy: Any,
    preservation_policy: Any,
    max_to_keep: int | None,
    asynchronous: bool,
    concurrent_gb: int,
) -> ocp.CheckpointManager:
    """Orbax's plain manager on `directory`. Call on every process.

    Args:
        directory: absolute path or URL, which exists.
        save_policy: any object with Orbax's `should_save`.
        preservation_policy: any object with Orbax's `should_preserve`; None: the newest
            `max_to_keep` are kept.
        max_to_keep: None keeps all.
        asynchronous: write in the background.
        concurrent_gb: limit on concurrent I/O, in GB.
    """
    limited = ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=concurrent_gb, restore_concurrent_gb=concurrent_gb
    )
    registry = handler_registration.DefaultCheckpointHandlerRegistry()
    registry.add(None, ocp.args.PyTreeSave, limited)
    registry.add(None, ocp.args.PyTreeRestore, limited)
    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            save_decision_policy=save_policy,
            preservation_policy=preservation_policy
            or ocp.checkpoint_managers.LatestN(n=max_to_keep),
            enable_async_checkpointing=asynchronous,
        ),
        handler_registry=registry,
    )


def operation_id() -> int:
    """The number of Orbax's present operation, which is part of the keys that processes share."""
    return int(synchronization.OperationIdGenerator.get_current_operation_id())


def catch_up_operation_id(target: int) -> None:
    """Counts on to `target`.

    Orbax's continuous policy counts an operation when it is asked. Asked on one process only, that
    one would use other keys than the rest at the next save, and the rest would write without
    waiting for the directories that it makes.
    """
    while operation_id() < target:
        synchronization.OperationIdGenerator.next_operation_id()
