"""States to save: a transformer's with its optimizer, of random elements that are all known."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtcheckpoint.testing import case_mesh

__all__ = [
    "LAYOUTS",
    "abstract",
    "assert_equal",
    "check",
    "filled",
    "flat",
    "mesh",
    "own_bytes",
    "shapes",
]

_LAYERS = 8
_ALL = ("data", "model")

# How matrices lie on the mesh; vectors always lie over all devices.
LAYOUTS = {"rows": (_ALL, None), "columns": (None, _ALL), "blocks": ("data", "model")}


def mesh() -> Mesh:
    """All devices of the job, two of them along ``model``."""
    return case_mesh(jax.device_count() // 2, 2)


def shapes(size_bytes: int) -> dict[str, Any]:
    """Parameters, both moments of Adam and a count: 192 leaves of float32 and a scalar.

    Args:
        size_bytes: about what all of it takes.
    """
    # A layer has 12 * width**2 parameters, three times, of 4 bytes.
    width = max(math.isqrt(size_bytes // (_LAYERS * 144)) // 8 * 8, 8)
    layer = {
        **{f"attention_{part}": (width, width) for part in "qkvo"},
        "mlp_up": (width, 4 * width),
        "mlp_down": (4 * width, width),
        "norm_1": (width,),
        "norm_2": (width,),
    }
    layers = {f"layer_{number}": layer for number in range(_LAYERS)}
    return {"params": layers, "adam": {"mu": layers, "nu": layers, "count": ()}}


def abstract(size_bytes: int, layout: str = "rows") -> dict[str, Any]:
    """What a state of these `shapes` is like, with shardings.

    Args:
        size_bytes: about what all of it takes.
        layout: one of `LAYOUTS`.
    """
    tree: dict[str, Any] = jax.tree.map(
        lambda shape: _leaf(shape, layout),
        shapes(size_bytes),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    return tree


def flat(size_bytes: int, leaves: int) -> dict[str, Any]:
    """`leaves` matrices of equal size, all together about `size_bytes`."""
    devices = jax.device_count()
    columns = max(size_bytes // leaves // 4 // devices, 1)
    return {f"leaf_{number}": _leaf((devices, columns), "rows") for number in range(leaves)}


def _leaf(shape: tuple[int, ...], layout: str) -> jax.ShapeDtypeStruct:
    spec: dict[int, tuple[Any, ...]] = {0: (), 1: (_ALL,), 2: LAYOUTS[layout]}
    sharding = NamedSharding(mesh(), PartitionSpec(*spec[len(shape)]))
    return jax.ShapeDtypeStruct(shape, np.float32 if shape else np.int32, sharding=sharding)


def own_bytes(tree: Any) -> int:
    """Bytes of the shards that this process holds, of a tree of arrays or of what they are like."""
    sizes = (
        len(leaf.sharding.addressable_devices)
        * math.prod(leaf.sharding.shard_shape(leaf.shape))
        * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
    return sum(sizes)


def filled(tree: Any) -> Any:
    """The arrays that `tree` describes."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [
        jax.make_array_from_callback(
            leaf.shape,
            leaf.sharding,
            lambda index, n=number, leaf=leaf: _expected(n, leaf, index),
        )
        for number, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, jax.block_until_ready(arrays))


def check(state: Any) -> None:
    """Asserts that each element of `state` that lies here is as `filled` made it."""
    for number, leaf in enumerate(jax.tree.leaves(state)):
        for shard in leaf.addressable_shards:
            expected = _expected(number, leaf, shard.index)
            np.testing.assert_array_equal(np.asarray(shard.data), expected)


def assert_equal(found: Any, wanted: Any) -> None:
    """Asserts that two states are the same, in all that lies here."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        for left, right in zip(mine.addressable_shards, other.addressable_shards, strict=True):
            assert left.index == right.index
            np.testing.assert_array_equal(np.asarray(left.data), np.asarray(right.data))


def _expected(number: int, leaf: Any, index: tuple[slice, ...]) -> np.ndarray:
    """Random elements between -1 and 1, which follow from the leaf and their place in it."""
    if not leaf.shape:
        return np.array(number, leaf.dtype)
    place = np.zeros((1,) * len(leaf.shape), np.uint32)
    for axis, size in enumerate(leaf.shape):
        along = np.arange(size, dtype=np.uint32)[index[axis]]
        place = place * np.uint32(size) + along.reshape([-1] + [1] * (len(leaf.shape) - axis - 1))
    return _random(place + np.uint32(number * 0x9E3779B9 & 0xFFFFFFFF))


def _random(numbers: np.ndarray) -> np.ndarray:
    """MurmurHash3's finalizer, as sign and mantissa of float32; small exponents are rare.

    Like weights, they hardly get smaller by compression.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        numbers ^= numbers >> np.uint32(shift)
        numbers *= np.uint32(factor)
    numbers ^= numbers >> np.uint32(16)
    exponents = _EXPONENTS[(numbers >> np.uint32(23)) & np.uint32(0xFF)]
    numbers &= np.uint32(0x807FFFFF)
    numbers |= exponents
    return numbers.view(np.float32)


# As if numbers were even between 0 and 1: half of them from 0.5 on, a quarter from 0.25 on.
_EXPONENTS = np.array([(126 - (8 - number.bit_length())) << 23 for number in range(256)], np.uint32)
