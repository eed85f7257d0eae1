"""Orbax's arguments of `save` and `restore`, as a loop written for its manager gives them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import orbax.checkpoint as ocp

from mtcheckpoint._shares.identity import STATE_ITEM

__all__ = ["LeafRequest", "composite_result", "restore_request", "state_to_save"]


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
