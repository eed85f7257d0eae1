"""A small training state of which every element is known, to check a restore with."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["abstract_state", "assert_state", "case_mesh", "case_state"]

# The largest prime below 256: up to there bfloat16 holds every integer.
_MODULUS = 251


def case_mesh(data: int = 2, model: int = 4) -> Mesh:
    """The first ``data * model`` devices of the job, as axes ``data`` and ``model``."""
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    return Mesh(devices, ("data", "model"))


def case_state(mesh: Mesh, step: int) -> dict[str, Any]:
    """A state of all kinds of leaves; every element follows from its global index and `step`.

    ``w`` (16, 32) bfloat16 over both axes, ``b`` (32,) float32 over ``model``, ``step`` an int32
    scalar, ``key`` a typed PRNG key, and ``opt``, the state of ``optax.adam`` with its empty parts.

    Call on every process of the mesh.

    Args:
        mesh: with axes ``data`` (divides 16) and ``model`` (divides 32).
        step: from 0.
    """

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        value = _expected(jax.tree_util.keystr(path), leaf, step)
        sharding = NamedSharding(mesh, _spec(leaf.shape))
        array: jax.Array = jax.make_array_from_callback(
            leaf.shape, sharding, lambda index: value[index]
        )
        return array

    state: dict[str, Any] = jax.tree_util.tree_map_with_path(place, _arrays())
    replicated = NamedSharding(mesh, PartitionSpec())
    state["key"] = jax.jit(jax.random.key, out_shardings=replicated)(np.uint32(step))
    return state


def abstract_state(state: Any) -> Any:
    """The same tree of ``jax.ShapeDtypeStruct``, with the shardings: a target for a restore."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def assert_state(state: Any, step: int) -> None:
    """Checks every element that this process can address against `case_state` of `step`.

    Raises:
        AssertionError: the tree differs, or an element; names leaf, index, found and expected.
    """
    found = _leaves(state)
    wanted = _leaves({**_arrays(), "key": jax.random.key(0)})
    if list(found) != list(wanted):
        raise AssertionError(f"leaves differ: found {list(found)}, expected {list(wanted)}")
    for path, leaf in found.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
            value = np.asarray(jax.random.key_data(jax.random.key(step)))
        else:
            value = _expected(path, wanted[path], step)
        _assert_leaf(path, leaf, value, step)


def _assert_leaf(path: str, leaf: jax.Array, value: np.ndarray, step: int) -> None:
    if leaf.dtype != value.dtype or leaf.shape != value.shape:
        raise AssertionError(
            f"{path}: found {leaf.dtype}{leaf.shape}, expected {value.dtype}{value.shape}"
        )
    for shard in leaf.addressable_shards:
        found, expected = np.asarray(shard.data), value[shard.index]
        if np.array_equal(found, expected):
            continue
        position = tuple(int(axis) for axis in np.argwhere(found != expected)[0])
        raise AssertionError(
            f"{path}: {np.count_nonzero(found != expected)} of {found.size} elements on"
            f" {shard.device} differ from step {step}; the first at {position} of the box"
            f" {shard.index}: found {found[position]}, expected {expected[position]}"
        )


def _leaves(tree: Any) -> dict[str, Any]:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in pairs}


def _arrays() -> dict[str, Any]:
    """Shapes and types of the state, without the key."""
    import optax

    params = {
        "w": jax.ShapeDtypeStruct((16, 32), jnp.bfloat16),
        "b": jax.ShapeDtypeStruct((32,), jnp.float32),
    }
    return {
        **params,
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "opt": jax.eval_shape(optax.adam(1e-3).init, params),
    }


def _spec(shape: tuple[int, ...]) -> PartitionSpec:
    axes = ("data", "model")
    return PartitionSpec(*axes[len(axes) - len(shape) :])


def _expected(path: str, leaf: jax.ShapeDtypeStruct, step: int) -> np.ndarray:
    """The whole array: every element differs from its neighbours, from the same element of other
    leaves and of other steps."""
    if not leaf.shape:
        return np.array(step, leaf.dtype)
    count = np.arange(np.prod(leaf.shape)).reshape(leaf.shape)
    return ((count + zlib.crc32(path.encode()) + 7 * step) % _MODULUS).astype(leaf.dtype)
