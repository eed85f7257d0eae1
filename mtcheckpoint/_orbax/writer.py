"""Writing a share: its layout and what tells the tree by Orbax's manager, its arrays by ours."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import options as ocp_options
from orbax.checkpoint._src.handlers import handler_registration
from orbax.checkpoint.experimental.emergency.multi_tier_checkpointing import (
    process_metadata_checkpoint_handler as process_metadata,
)

from mtcheckpoint._host_array import HostArray
from mtcheckpoint._orbax import handlers
from mtcheckpoint._shares.identity import PROCESS_METADATA_ITEM, STATE_ITEM
from mtcheckpoint._shares.sealing import SealForm
from mtcheckpoint._shares.shardings import ORBAX_DEVICE_LIMIT, SHARDINGS_FILE, shardings_to_json
from mtcheckpoint._shares.write_plan import WritePlan, plan_writes
from mtcheckpoint._shares.writing import OpenFile, new_file, write_arrays
from mtcheckpoint._trees import flatten_named

__all__ = ["ShareWriter", "WrittenShare"]

_CHECKPOINT_METADATA, _SUCCESS_FILE = "_CHECKPOINT_METADATA", "commit_success.txt"
# More would not make memory faster, and training has a use for the cores.
_MOST_THREADS, _CORES_PER_THREAD = 8, 4

# Said on every save, at level WARNING, of settings that are right here.
_SETTINGS = (
    "Global object size logging disabled",
    "Skipping merge of OCDBT checkpoints",
    "No jax.Array in TypeHandlerRegistry",
)
logging.getLogger("absl").addFilter(
    lambda record: not any(said in record.getMessage() for said in _SETTINGS)
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WrittenShare:
    """A share under the staging folder.

    Attributes:
        path: its directory.
        seal_form: for its seal.
        checksums: of its chunks, in the form's order.
    """

    path: Path
    seal_form: SealForm
    checksums: Sequence[str]


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
        data_file_size_bytes: int,
    ) -> None:
        """Prepares the folder `staging`, which must be on the volume that steps are renamed in."""
        self._staging = staging
        self._mesh = mesh
        self._device_ids = [list(ids) for ids in device_ids_by_rank]
        self._data_file_size_bytes = data_file_size_bytes
        staging.mkdir(parents=True, exist_ok=True)
        self._manager = self._open_manager()
        self._template: _Template | None = None

    def write(
        self,
        step: int,
        tree: Any,
        custom_metadata: Mapping[str, Any] | None = None,
        open_file: OpenFile = new_file,
    ) -> WrittenShare:
        """Writes a snapshot's share under the staging folder.

        Args:
            step: names the share.
            tree: of the snapshot.
            custom_metadata: for Orbax's metadata.
            open_file: opens the data files.

        Raises:
            OSError: it could not be written.
        """
        share = self._staging / str(step)
        arrays = {
            name: leaf if isinstance(leaf, HostArray) else HostArray.of(leaf)
            for name, leaf in flatten_named(tree)[0].items()
            if not isinstance(leaf, str)
        }
        kind = _kind_of(tree, arrays, custom_metadata)
        if self._template is None or self._template.kind != kind:
            self._template = self._write_first(step, tree, arrays, kind, custom_metadata)
        else:
            self._template.write(share)
        plan = self._template.plan
        written = write_arrays(share / STATE_ITEM, plan, arrays, open_file)
        return WrittenShare(
            path=share, seal_form=self._template.seal_form, checksums=written.checksums
        )

    def _write_first(
        self,
        step: int,
        tree: Any,
        arrays: Mapping[str, HostArray],
        kind: Any,
        custom_metadata: Mapping[str, Any] | None,
    ) -> _Template:
        """Writes all but the arrays of the first share of a kind of tree."""
        share = self._staging / str(step)
        self._write_tree(step, tree, custom_metadata)
        self._write_shardings(share, tree, arrays)
        plan = plan_writes(
            {name: array.form for name, array in arrays.items()},
            threads=_threads(),
            file_bytes=self._data_file_size_bytes,
        )
        return _Template.of(share, kind, plan)

    def _write_tree(
        self, step: int, tree: Any, custom_metadata: Mapping[str, Any] | None = None
    ) -> None:
        self._manager.reload()  # what it wrote before was moved away
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{
                    STATE_ITEM: ocp.args.PyTreeSave(tree),
                    PROCESS_METADATA_ITEM: process_metadata.ProcessMetadataSaveArgs(self._mesh),
                }
            ),
            force=True,
            custom_metadata=dict(custom_metadata) if custom_metadata else None,
        )

    def _write_shardings(self, share: Path, tree: Any, arrays: Mapping[str, HostArray]) -> None:
        own = share / SHARDINGS_FILE
        own.parent.mkdir(exist_ok=True)
        own.write_text(shardings_to_json(tree), encoding="utf-8")
        if jax.device_count() <= ORBAX_DEVICE_LIMIT:  # for Orbax's manager
            known = {n: a.sharding for n, a in arrays.items() if a.sharding is not None}
            text = handlers.shardings_to_json(known)
            (share / STATE_ITEM / "_sharding").write_text(text, encoding="utf-8")

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
            type_handler_registry=handlers.registry(),
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Template:
    """What is the same for each step of one kind of tree, but for times and names.

    Orbax's manager takes some ten milliseconds for its files, however small the state is.
    """

    kind: Any
    step: str
    files: Mapping[str, bytes]
    plan: WritePlan
    seal_form: SealForm

    @classmethod
    def of(cls, share: Path, kind: Any, plan: WritePlan) -> _Template:
        """Of a share that has everything but its arrays."""
        found = (path for path in share.rglob("*") if path.is_file())
        files = {path.relative_to(share).as_posix(): path.read_bytes() for path in found}
        form = SealForm.of(plan)
        return cls(kind=kind, step=share.name, files=files, plan=plan, seal_form=form)

    def write(self, share: Path) -> None:
        """Writes it for another step."""
        now = time.time_ns()
        for name, content in self.files.items():
            path = share / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name == _CHECKPOINT_METADATA:
                times = {"init_timestamp_nsecs": now, "commit_timestamp_nsecs": now}
                content = json.dumps({**json.loads(content), **times}).encode()
            if path.name == _SUCCESS_FILE:  # it tells where it was written
                content = content.replace(f"/{self.step}.".encode(), f"/{share.name}.".encode())
            path.write_bytes(content)


def _kind_of(
    tree: Any, arrays: Mapping[str, HostArray], custom_metadata: Mapping[str, Any] | None
) -> Any:
    """All of a tree that is not the content of an array."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    told = [leaf if isinstance(leaf, str) else type(leaf) for leaf in leaves]
    forms = [array.form for array in arrays.values()]
    return structure, told, forms, copy.deepcopy(custom_metadata)


def _threads() -> int:
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // _CORES_PER_THREAD))
