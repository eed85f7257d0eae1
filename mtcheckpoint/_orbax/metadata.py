"""What a save says of itself, in the types that Orbax's managers return."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint._src.composite import Composite
from orbax.checkpoint._src.metadata import sharding as sharding_metadata
from orbax.checkpoint._src.metadata import tree as tree_metadata

from mtcheckpoint._shares.contents import Leaf
from mtcheckpoint._shares.identity import STATE_ITEM

__all__ = ["root_metadata", "step_metadata"]


def root_metadata() -> Any:
    """Of all steps together nothing is kept."""
    return ocp.metadata.RootMetadata()


def step_metadata(checkpoint: Mapping[str, Any], tree: Any, place: str) -> Any:
    """Orbax's metadata of one step.

    Args:
        checkpoint: the content of Orbax's file of it.
        tree: the saved tree, with a `Leaf` for each leaf.
        place: the share that tells all this.
    """
    directory = epath.Path(PurePosixPath(place) / STATE_ITEM)
    leaves = jax.tree.map(lambda leaf: _leaf_metadata(leaf, directory), tree)
    # Orbax has no public way to make one.
    state = tree_metadata.build_default_tree_metadata(leaves, use_zarr3=True)
    return ocp.metadata.StepMetadata(
        item_handlers=_mapping(checkpoint.get("item_handlers")),
        item_metadata=Composite(**{STATE_ITEM: state}),
        init_timestamp_nsecs=checkpoint.get("init_timestamp_nsecs"),
        commit_timestamp_nsecs=checkpoint.get("commit_timestamp_nsecs"),
        custom_metadata=_mapping(checkpoint.get("custom_metadata")),
    )


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _leaf_metadata(leaf: Leaf, directory: epath.Path) -> Any:
    if leaf.value_type == "string":
        return ocp.metadata.StringMetadata(name=leaf.name, directory=directory)
    kind = (
        ocp.metadata.ScalarMetadata if leaf.value_type == "scalar" else ocp.metadata.ArrayMetadata
    )
    return kind(
        name=leaf.name,
        directory=directory,
        shape=leaf.shape,
        sharding=_sharding(leaf.sharding),
        dtype=np.dtype(leaf.dtype),
        storage=ocp.metadata.StorageMetadata(chunk_shape=leaf.chunk_shape),
    )


def _sharding(described: Mapping[str, Any] | None) -> Any:
    if not described:
        return None
    spec = described.get("partition_spec")
    if spec is not None:
        described = {**described, "partition_spec": [_axes(axes) for axes in spec]}
    mesh = described.get("device_mesh")
    if mesh is not None:
        described = {**described, "device_mesh": {"mesh": _devices(mesh["mesh"])}}
    return sharding_metadata.from_serialized_string(json.dumps(described))


def _axes(axes: Any) -> Any:
    """The axes of one dimension as Orbax writes them; of ours each is a list."""
    return axes[0] if isinstance(axes, list) and len(axes) == 1 else axes


def _devices(mesh: Any) -> Any:
    """Devices as Orbax writes them; ours are bare ids."""
    if isinstance(mesh, list):
        return [_devices(part) for part in mesh]
    return {"id": mesh} if isinstance(mesh, int) else mesh
