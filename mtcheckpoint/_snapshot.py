"""Copies of a state that training cannot change any more.

A snapshot is started on the training thread and finished by the hardware: `device_put` to pinned
host memory returns before the bytes have moved, and holds the source buffers until they have, so
that donating or overwriting them afterwards is safe. On CPU devices, whose memory it is already,
nothing moves: see `_to_host`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

from mtcheckpoint._device_copies import is_host_memory, start_copies
from mtcheckpoint._host_array import ArrayForm, HostArray
from mtcheckpoint._restore import Box, box_of
from mtcheckpoint._trees import flatten_named

__all__ = ["Snapshot", "take_snapshot"]

_HOST_TYPES = (np.ndarray, np.generic, bool, int, float, complex, str)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A state that stays as it was.

    Attributes:
        tree: the same tree, its leaves out of training's reach; a `HostArray` for each array.
        kinds: what a leaf was where its array alone does not tell: by leaf name,
            ``"key:<implementation>"`` for typed PRNG keys, ``"numpy"``, ``"numpy_scalar"`` or the
            type's name for plain Python values.
        size_bytes: bytes that this process holds of it.
    """

    tree: Any
    kinds: dict[str, str]
    size_bytes: int


def take_snapshot(tree: Any, mesh: jax.sharding.Mesh) -> Snapshot:
    """Starts a snapshot of `tree` and returns at once.

    Args:
        tree: leaves are `jax.Array` (global ones, or ones that this process alone can address:
            those are taken for replicated), numpy arrays, and plain numbers and strings.
        mesh: the mesh of the job.

    Raises:
        TypeError: a leaf is of another type.
        ValueError: an array was donated or deleted already, or has no elements; or there are no
            leaves at all.
    """
    named, structure = flatten_named(tree)
    if not named:
        raise ValueError("the state has no leaves: there is nothing to save")
    for name, leaf in named.items():
        _check_leaf(name, leaf)
    arrays = [leaf for leaf in named.values() if isinstance(leaf, jax.Array)]
    copies = iter(_to_host(arrays, mesh))
    leaves = [
        next(copies) if isinstance(leaf, jax.Array) else _copy_plain(leaf)
        for leaf in named.values()
    ]
    return Snapshot(
        tree=jax.tree_util.tree_unflatten(structure, leaves),
        kinds={n: kind for n, x in named.items() if (kind := _kind(x)) is not None},
        size_bytes=sum(_size_bytes(x) for x in leaves),
    )


def _check_leaf(name: str, leaf: Any) -> None:
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(
                f"leaf {name!r} was donated or deleted before the save: save the state that the"
                " step returned, not the one that went into it"
            )
        _check_elements(name, leaf.shape, leaf.dtype)
    elif not isinstance(leaf, _HOST_TYPES):
        raise TypeError(
            f"leaf {name!r} is of type {type(leaf).__name__}: a state holds jax.Array, numpy"
            " arrays, numbers and strings. Put other things into `extras`"
        )
    elif isinstance(leaf, np.ndarray | np.generic) and not isinstance(leaf, str):
        _check_elements(name, leaf.shape, leaf.dtype)
    elif isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        raise ValueError(f"leaf {name!r} is {leaf}: integers beyond 64 bits are not saved")


def _check_elements(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    if 0 in shape:
        raise ValueError(
            f"leaf {name!r} has the shape {shape}: arrays without elements are not saved."
            " Leave it out of the state, or make it None"
        )
    if not _is_storable(dtype):
        raise TypeError(
            f"leaf {name!r} has elements of type {dtype}, which TensorStore does not store."
            " Convert it, or put it into `extras`"
        )


@functools.lru_cache(maxsize=256)
def _is_storable(dtype: Any) -> bool:
    if _is_key_type(dtype):
        return True
    try:
        ts.dtype(dtype.name)
    except (TypeError, ValueError):
        return False
    return True


def _is_key(leaf: jax.Array) -> bool:
    return _is_key_type(leaf.dtype)


@functools.lru_cache(maxsize=256)
def _is_key_type(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _kind(leaf: Any) -> str | None:
    if isinstance(leaf, jax.Array):
        return f"key:{jax.random.key_impl(leaf)}" if _is_key(leaf) else None
    if isinstance(leaf, np.ndarray):
        return "numpy"
    if isinstance(leaf, str):
        return "str"
    if isinstance(leaf, np.generic):
        return "numpy_scalar"
    return type(leaf).__name__


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """What is known of all arrays of one shape, type and sharding."""

    form: ArrayForm
    # Of each box, which of the array's shards has it.
    positions: tuple[int, ...]


def _to_host(arrays: Sequence[jax.Array], mesh: jax.sharding.Mesh) -> list[HostArray]:
    """Takes what this process holds of the arrays out of training's reach.

    What is computed and lies in host memory already is only looked at: as long as somebody does,
    JAX gives that memory to nobody else, and copies where it was to be donated.
    """
    held: list[HostArray | _Kind] = []
    moving: list[tuple[jax.Array, _Kind]] = []
    for array in arrays:
        data: Any = jax.random.key_data(array) if _is_key(array) else array
        kind = _kind_of(data.shape, data.dtype, data.sharding, mesh)
        if data.is_ready() and is_host_memory(data.sharding):
            pieces = [np.asarray(data.addressable_data(p)) for p in kind.positions]
            held.append(HostArray(kind.form, pieces))
        else:
            moving.append((data, kind))
            held.append(kind)
    copies = iter(start_copies([x for x, _ in moving], [kind.positions for _, kind in moving]))
    return [x if isinstance(x, HostArray) else HostArray(x.form, next(copies)) for x in held]


@functools.lru_cache(maxsize=4096)
def _kind_of(
    shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding, mesh: jax.sharding.Mesh
) -> _Kind:
    places: dict[Box, int] = {}
    for position, index in enumerate(sharding.addressable_devices_indices_map(shape).values()):
        places.setdefault(box_of(index or (), shape), position)
    # An array that this process has for itself, among several, is one that all have alike.
    is_own = jax.process_count() > 1 and sharding.is_fully_addressable
    return _Kind(
        form=ArrayForm(
            shape=shape,
            dtype=np.dtype(dtype),
            sharding=NamedSharding(mesh, PartitionSpec()) if is_own else sharding,
            boxes=tuple(places),
        ),
        positions=tuple(places.values()),
    )


def _copy_plain(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if isinstance(leaf, str):
        return str(leaf)
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    return leaf


def _size_bytes(leaf: Any) -> int:
    return int(leaf.nbytes if isinstance(leaf, HostArray) else np.asarray(leaf).nbytes)
