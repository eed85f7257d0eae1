"""Copies of a state that training cannot change any more.

A snapshot is started on the training thread and finished by the hardware: `device_put` to pinned
host memory returns before the bytes have moved, and holds the source buffers until they have, so
that donating or overwriting them afterwards is safe.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

from mtcheckpoint._trees import flatten_named

__all__ = ["Snapshot", "take_snapshot"]

_HOST_MEMORY = "pinned_host"
_HOST_TYPES = (np.ndarray, np.generic, bool, int, float, complex, str)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A state that stays as it was.

    Attributes:
        tree: the same tree, its leaves out of training's reach.
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
        ValueError: an array was donated or deleted already, or has no elements.
    """
    named, structure = flatten_named(tree)
    for name, leaf in named.items():
        _check_leaf(name, leaf)
    arrays = {n: _as_global(x, mesh) for n, x in named.items() if isinstance(x, jax.Array)}
    plain = {n: x for n, x in arrays.items() if not _is_key(x)}
    copies = dict(zip(plain, _copy_to_host(list(plain.values())), strict=True))
    copies |= {n: _copy_key(x) for n, x in arrays.items() if _is_key(x)}
    leaves = [copies[n] if n in copies else _copy_plain(x) for n, x in named.items()]
    return Snapshot(
        tree=jax.tree_util.tree_unflatten(structure, leaves),
        kinds={n: kind for n, x in named.items() if (kind := _kind(x)) is not None},
        size_bytes=sum(_addressable_bytes(x) for x in leaves),
    )


def _check_leaf(name: str, leaf: Any) -> None:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(
            f"leaf {name!r} was donated or deleted before the save: save the state that the step"
            " returned, not the one that went into it"
        )
    if not isinstance(leaf, (jax.Array, *_HOST_TYPES)):
        raise TypeError(
            f"leaf {name!r} is of type {type(leaf).__name__}: a state holds jax.Array, numpy"
            " arrays, numbers and strings. Put other things into `extras`"
        )
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        _check_array(name, leaf)
    elif isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        raise ValueError(f"leaf {name!r} is {leaf}: integers beyond 64 bits are not saved")


def _check_array(name: str, array: Any) -> None:
    if array.size == 0:
        raise ValueError(
            f"leaf {name!r} has the shape {array.shape}: arrays without elements are not saved."
            " Leave it out of the state, or make it None"
        )
    is_key = isinstance(array, jax.Array) and _is_key(array)
    if not is_key and not isinstance(array, np.str_) and not _is_storable(array.dtype.name):
        raise TypeError(
            f"leaf {name!r} has elements of type {array.dtype}, which TensorStore does not store."
            " Convert it, or put it into `extras`"
        )


@functools.cache
def _is_storable(dtype: str) -> bool:
    try:
        ts.dtype(dtype)
    except (TypeError, ValueError):
        return False
    return True


def _is_key(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _kind(leaf: Any) -> str | None:
    if isinstance(leaf, jax.Array):
        return f"key:{jax.random.key_impl(leaf)}" if _is_key(leaf) else None
    if isinstance(leaf, np.ndarray):
        return "numpy"
    if isinstance(leaf, np.generic):
        return "numpy_scalar"
    return type(leaf).__name__


def _as_global(array: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    """An array over the whole job, as Orbax wants it, without asking the other processes."""
    if jax.process_count() == 1 or not array.is_fully_addressable:
        return array
    local = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    data = jax.random.key_data(array) if _is_key(array) else array
    whole: jax.Array = jax.make_array_from_single_device_arrays(
        data.shape,
        NamedSharding(mesh, PartitionSpec()),
        [jax.device_put(data, device) for device in local],
    )
    return _wrapped(whole, array) if _is_key(array) else whole


def _wrapped(data: jax.Array, like: jax.Array) -> jax.Array:
    key: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    return key


def _copy_to_host(arrays: list[jax.Array]) -> list[jax.Array]:
    """Copies in one call: a call for each leaf costs half a millisecond each.

    Shard by shard: put as a whole, an array of several processes goes through a computation in
    older versions of JAX, which waits for what is queued on the devices.
    """
    shards = [[shard.data for shard in array.addressable_shards] for array in arrays]
    flat = [data for own in shards for data in own]
    if not flat:
        return arrays
    if not _has_host_memory(flat[0]):
        return list(_copy_on_device(arrays))
    places = [data.sharding.with_memory_kind(_HOST_MEMORY) for data in flat]
    # Without may_alias, arrays that are in host memory already would be handed back as they are.
    copies = iter(jax.device_put(flat, places, may_alias=False))
    return [
        jax.make_array_from_single_device_arrays(
            array.shape,
            array.sharding.with_memory_kind(_HOST_MEMORY),
            [next(copies) for _ in own],
            dtype=array.dtype,
        )
        for array, own in zip(arrays, shards, strict=True)
    ]


def _has_host_memory(array: jax.Array) -> bool:
    device = next(iter(array.sharding.addressable_devices))
    return any(memory.kind == _HOST_MEMORY for memory in device.addressable_memories())


@jax.jit  # type: ignore[untyped-decorator]
def _copy_on_device(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


def _copy_key(key: jax.Array) -> jax.Array:
    # Keys cannot be put to another memory; they are a few bytes.
    data = jnp.copy(jax.random.key_data(key))
    return _wrapped(data, key)


def _copy_plain(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    return leaf


def _addressable_bytes(leaf: Any) -> int:
    if isinstance(leaf, jax.Array):
        data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        return sum(shard.data.nbytes for shard in data.addressable_shards)
    return int(np.asarray(leaf).nbytes)
