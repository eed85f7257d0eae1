"""The one door to Orbax: writing a share, translating arguments, policies and errors.

Everything here that is private to Orbax is marked so, and nothing of Orbax leaves this module
except its public argument and policy types.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import options as ocp_options
from orbax.checkpoint._src.checkpoint_managers import save_decision_policy
from orbax.checkpoint._src.futures import synchronization
from orbax.checkpoint._src.handlers import handler_registration
from orbax.checkpoint._src.serialization import (
    ocdbt_utils,
    tensorstore_utils,
    type_handler_registry,
    type_handlers,
)
from orbax.checkpoint.experimental.emergency.multi_tier_checkpointing import (
    process_metadata_checkpoint_handler as process_metadata,
)

from mtcheckpoint._shares.identity import PROCESS_METADATA_ITEM, STATE_ITEM
from mtcheckpoint._shares.shardings import ORBAX_DEVICE_LIMIT

__all__ = [
    "AbstractCheckpointManager",
    "LeafRequest",
    "OrbaxPolicy",
    "ShareWriter",
    "catch_up_operation_id",
    "composite_result",
    "is_continuous",
    "is_preservation_policy",
    "is_save_decision_policy",
    "open_persistent_manager",
    "operation_id",
    "restore_request",
    "split_policy",
    "state_to_save",
]

# Said on every save, at level WARNING, of a setting that is right here.
logging.getLogger("absl").addFilter(
    lambda record: "Global object size logging disabled" not in record.getMessage()
)

AbstractCheckpointManager = ocp.AbstractCheckpointManager


class ShareWriter:
    """Writes this process's share of a step, alone: no barrier, no other process, no device work.

    Call it from one thread at a time; not the training thread, since it waits for the bytes.
    """

    def __init__(
        self,
        staging: Path,
        *,
        mesh: jax.sharding.Mesh,
        device_ids_by_rank: Sequence[Sequence[int]],
        concurrent_gb: int,
        data_file_size_bytes: int,
    ) -> None:
        """Prepares the folder `staging`, which must be on the volume that steps are renamed in."""
        self._staging = staging
        self._mesh = mesh
        self._device_ids = [list(ids) for ids in device_ids_by_rank]
        self._concurrent_gb = concurrent_gb
        self._data_file_size_bytes = data_file_size_bytes
        staging.mkdir(parents=True, exist_ok=True)
        self._manager = self._open_manager()

    def write(self, step: int, tree: Any, custom_metadata: Mapping[str, Any] | None = None) -> Path:
        """Writes and closes the share; returns its directory under the staging folder."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{
                    STATE_ITEM: ocp.args.PyTreeSave(
                        tree, ocdbt_target_data_file_size=self._data_file_size_bytes
                    ),
                    PROCESS_METADATA_ITEM: process_metadata.ProcessMetadataSaveArgs(self._mesh),
                }
            ),
            force=True,
            custom_metadata=dict(custom_metadata) if custom_metadata else None,
        )
        return self._staging / str(step)

    def forget(self) -> None:
        """Makes the manager look at its folder anew, after a share was moved out of it."""
        self._manager.reload()

    def close(self) -> None:
        self._manager.close()

    def _open_manager(self) -> ocp.CheckpointManager:
        # One active process: Orbax then makes no barriers. With primary_host=None alone it makes
        # eight device collectives a save, which wait behind the steps queued on the accelerator.
        alone = ocp_options.MultiprocessingOptions(
            primary_host=None,
            active_processes={jax.process_index()},
            barrier_sync_key_prefix=f"mtcheckpoint_{jax.process_index()}",
        )
        registry = handler_registration.DefaultCheckpointHandlerRegistry()
        state_handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True,
            use_zarr3=True,
            # zstd makes a save ten times slower and random weights 7 % smaller.
            use_compression=False,
            multiprocessing_options=alone,
            type_handler_registry=_type_handlers(),
            save_concurrent_gb=self._concurrent_gb,
        )
        metadata_handler = process_metadata.ProcessMetadataCheckpointHandler(
            multiprocessing_options=alone,
            distributed_to_device_ids_fn=lambda: self._device_ids,
        )
        registry.add(None, ocp.args.PyTreeSave, state_handler)
        registry.add(None, process_metadata.ProcessMetadataSaveArgs, metadata_handler)
        return ocp.CheckpointManager(
            self._staging,
            options=ocp.CheckpointManagerOptions(
                multiprocessing_options=alone,
                create=False,
                # Our own thread waits for it; a second one would only add a hand-over.
                enable_async_checkpointing=False,
                cleanup_tmp_directories=False,
            ),
            handler_registry=registry,
        )


class _EveryProcess(type_handlers.NumpyHandler):  # type: ignore[misc]
    """Writes numpy arrays on every process: Orbax's writes them on process 0 only."""

    async def _background_serialize(
        self, values: Sequence[np.ndarray], infos: Sequence[Any], args: Any = None
    ) -> None:
        writes = []
        for value, info, arg in zip(values, infos, args, strict=True):
            await info.await_path_creation()
            spec = tensorstore_utils.build_array_write_spec(
                info=info,
                arg=arg,
                global_shape=value.shape,
                local_shape=value.shape,
                dtype=value.dtype,
                use_ocdbt=info.is_ocdbt_checkpoint,
                process_index=ocdbt_utils.get_process_index_for_subdir(
                    use_ocdbt=info.is_ocdbt_checkpoint
                ),
                metadata_key=None,
            )
            writes.append(self._open_and_write(value, spec.json, info.ts_context))
        await asyncio.gather(*writes)


class _EveryProcessScalar(_EveryProcess, type_handlers.ScalarHandler):  # type: ignore[misc]
    pass


class _EveryProcessString(type_handlers.StringHandler):  # type: ignore[misc]
    async def _background_serialize(self, values: Sequence[str], infos: Sequence[Any]) -> None:
        import tensorstore as ts

        transaction = ts.Transaction()
        for info, value in zip(infos, values, strict=True):
            await info.await_path_creation()
            store = await ts.open(self._get_json_tspec(info), open=True, context=self._ts_context)
            await store.with_transaction(transaction).write(value)
        await transaction.commit_async()


def _type_handlers() -> Any:
    arrays = type_handlers.ArrayHandler(
        primary_host=None,
        replica_id=None,
        use_replica_parallel=False,
        enable_write_sharding_file=jax.device_count() <= ORBAX_DEVICE_LIMIT,
    )
    scalars = _EveryProcessScalar()
    return type_handler_registry.create_type_handler_registry(
        (jax.Array, arrays),
        (np.ndarray, _EveryProcess()),
        (int, scalars),
        (float, scalars),
        (complex, scalars),
        (str, _EveryProcessString()),
    )


def state_to_save(args: Any) -> Any:
    """The state in Orbax's `save(args=...)`.

    Raises:
        ValueError: the arguments are not ``Composite(state=PyTreeSave(...))`` (or StandardSave).
    """
    item = _single_item(args, "save")
    if not isinstance(item, ocp.args.PyTreeSave | ocp.args.StandardSave):
        raise ValueError(
            f"save: args.{STATE_ITEM} should be PyTreeSave or StandardSave, found"
            f" {type(item).__name__}"
        )
    return item.item


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeafRequest:
    """What a caller asks of one leaf; None leaves it as it was saved."""

    shape: tuple[int, ...] | None = None
    dtype: Any = None
    sharding: jax.sharding.Sharding | None = None


def restore_request(args: Any) -> Any:
    """The tree asked for in Orbax's `restore(args=...)`: leaves to be like, or `LeafRequest`.

    None when the arguments name no tree: then everything comes back as it was saved.

    Raises:
        ValueError: the arguments are not ``Composite(state=PyTreeRestore(...))`` (or
            StandardRestore).
    """
    if args is None:
        return None
    item = _single_item(args, "restore")
    if isinstance(item, ocp.args.StandardRestore):
        return item.item
    if not isinstance(item, ocp.args.PyTreeRestore):
        raise ValueError(
            f"restore: args.{STATE_ITEM} should be PyTreeRestore or StandardRestore, found"
            f" {type(item).__name__}"
        )
    if item.restore_args is None:
        return item.item
    requests = jax.tree.map(_leaf_request, item.restore_args, is_leaf=_is_restore_args)
    if item.item is None:
        return requests
    return jax.tree.map(_with_shape_of, item.item, requests)


def _single_item(args: Any, verb: str) -> Any:
    if not isinstance(args, ocp.args.Composite):
        raise ValueError(
            f"{verb}: args should be ocp.args.Composite({STATE_ITEM}=...), found"
            f" {type(args).__name__}"
        )
    if set(args.keys()) != {STATE_ITEM}:
        raise ValueError(
            f"{verb}: args should have the one item {STATE_ITEM!r}, found {sorted(args.keys())}."
            " Iterator states and the like go into `extras`"
        )
    return args[STATE_ITEM]


def _is_restore_args(value: Any) -> bool:
    return isinstance(value, ocp.RestoreArgs)


def _leaf_request(args: Any) -> LeafRequest:
    sharding = getattr(args, "sharding", None)
    if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
        sharding = sharding.to_jax_sharding()  # Orbax's own description of one
    mesh, axes = getattr(args, "mesh", None), getattr(args, "mesh_axes", None)
    if sharding is None and mesh is not None and axes is not None:
        sharding = jax.sharding.NamedSharding(mesh, axes)
    shape = getattr(args, "global_shape", None)
    return LeafRequest(
        shape=tuple(shape) if shape is not None else None, dtype=args.dtype, sharding=sharding
    )


def _with_shape_of(leaf: Any, request: LeafRequest) -> LeafRequest:
    return dataclasses.replace(
        request,
        shape=request.shape if request.shape is not None else getattr(leaf, "shape", None),
        dtype=request.dtype if request.dtype is not None else getattr(leaf, "dtype", None),
    )


def composite_result(state: Any) -> Any:
    """A restored state as Orbax's managers return it for composite arguments."""
    return ocp.args.Composite(**{STATE_ITEM: state})


def is_save_decision_policy(policy: object) -> bool:
    """True for any object with Orbax's `should_save(step, previous_steps, *, context)`."""
    return isinstance(policy, save_decision_policy.SaveDecisionPolicy)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _PolicyStep:
    """Orbax's PolicyCheckpointInfo."""

    step: int
    time: datetime.datetime
    metrics: dict[str, Any] | None = None


def is_continuous(policy: object) -> bool:
    """True for Orbax's `ContinuousCheckpointingPolicy`."""
    return type(policy) is save_decision_policy.ContinuousCheckpointingPolicy


class OrbaxPolicy:
    """Asks one of Orbax's `SaveDecisionPolicy` objects, on the deciding process only."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def should_save(
        self,
        step: int,
        *,
        now_seconds: float,
        saved: Sequence[tuple[int, float]],
        saving: bool,
        preempted: bool,
    ) -> bool:
        """The policy's answer; `saved` are pairs of step and time, oldest first."""
        context = save_decision_policy.DecisionContext(
            is_saving_in_progress=saving,
            reached_preemption=preempted,
            multiprocessing_options=ocp_options.MultiprocessingOptions(primary_host=0),
        )
        return bool(
            self._policy.should_save(
                _policy_step(step, now_seconds),
                [_policy_step(*pair) for pair in saved],
                context=context,
            )
        )


def _policy_step(step: int, seconds: float) -> _PolicyStep:
    return _PolicyStep(step=step, time=datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC))


# Persistent mode: Orbax's own manager and policies.


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


def is_preservation_policy(policy: object) -> bool:
    """True for any object with Orbax's `should_preserve(checkpoints, *, context)`."""
    return callable(getattr(policy, "should_preserve", None))


def split_policy(policy: Any) -> tuple[list[Any], list[Any]]:
    """The parts of a save policy that answer alike on all processes by themselves, and the others.

    Alike are Orbax's own that look at nothing but the step, the steps saved and the preemption,
    which Orbax agrees on. A subclass may look at anything.
    """
    if type(policy) is save_decision_policy.AnySavePolicy:
        pairs = [split_policy(part) for part in policy.policies]
        return [p for alike, _ in pairs for p in alike], [p for _, asked in pairs for p in asked]
    return ([policy], []) if type(policy) in _ALIKE_POLICIES else ([], [policy])


_ALIKE_POLICIES = (
    save_decision_policy.FixedIntervalPolicy,
    save_decision_policy.SpecificStepsPolicy,
    save_decision_policy.InitialSavePolicy,
    save_decision_policy.PreemptionCheckpointingPolicy,
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
