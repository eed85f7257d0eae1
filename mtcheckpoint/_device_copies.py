"""Copies of arrays, started on the devices: behind what is queued there, in few calls.

A call for each array would cost the training thread half a millisecond.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding

__all__ = ["is_host_memory", "start_copies"]

_HOST_MEMORY = "pinned_host"

# Before, on CPU devices, a second computation on several devices waits until the first is over, be
# it one of the steps that are queued. One on a single device does not.
_MANY_DEVICES_QUEUE = jax.__version_info__ >= (0, 12)


def start_copies(
    arrays: Sequence[jax.Array], positions: Sequence[tuple[int, ...]]
) -> list[Sequence[jax.Array]]:
    """Starts to copy shards of arrays; returns before anything has moved.

    The copies go to pinned host memory where the devices have it and it is not theirs already, else
    to where the arrays are. The arrays may be donated, overwritten or deleted at once.

    Args:
        arrays: global arrays, or single ones.
        positions: of each array, which of its addressable shards are wanted.

    Returns:
        Of each array the copies of its wanted shards, in their order.
    """
    copies: dict[int, Sequence[jax.Array]] = {}
    by_mesh: dict[Mesh, list[int]] = {}
    apart: list[int] = []
    for index, (array, wanted) in enumerate(zip(arrays, positions, strict=True)):
        place = _mesh_to_copy_on(array.sharding, len(wanted))
        (apart if place is None else by_mesh.setdefault(place, [])).append(index)
    for mesh, indices in by_mesh.items():
        whole = _copy_whole(mesh, [arrays[index] for index in indices])
        for index, copy in zip(indices, whole, strict=True):
            copies[index] = _Shards(copy, positions[index])
    pieces = [[arrays[i].addressable_data(position) for position in positions[i]] for i in apart]
    moved = iter(_copy_pieces([piece for of_one in pieces for piece in of_one]))
    copies |= {i: [next(moved) for _ in of_one] for i, of_one in zip(apart, pieces, strict=True)}
    return [copies[index] for index in range(len(arrays))]


@functools.lru_cache(maxsize=1024)
def is_host_memory(sharding: Sharding) -> bool:
    """Whether arrays on it lie in this process's own memory, so that they can be looked at."""
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


class _Shards(Sequence[jax.Array]):
    """Shards of an array, taken out when somebody looks at them."""

    def __init__(self, array: jax.Array, positions: tuple[int, ...]) -> None:
        self._array = array
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> jax.Array: ...

    @overload
    def __getitem__(self, index: slice) -> list[jax.Array]: ...

    def __getitem__(self, index: int | slice) -> jax.Array | list[jax.Array]:
        if isinstance(index, slice):
            return [self._array.addressable_data(p) for p in self._positions[index]]
        return self._array.addressable_data(self._positions[index])


@functools.lru_cache(maxsize=1024)
def _mesh_to_copy_on(sharding: Sharding, wanted: int) -> Mesh | None:
    """The mesh on which whole arrays are copied where they are; None for shard by shard.

    Also where some shards are alike and one of them is wanted only: all would take more memory.
    """
    if (
        not _MANY_DEVICES_QUEUE
        or not isinstance(sharding, NamedSharding)
        or wanted != len(sharding.addressable_devices)
        or _moves_to_host(sharding)
        or sharding.memory_kind not in (None, _default_memory(sharding))
    ):
        return None
    return sharding.mesh


def _copy_whole(mesh: Mesh, arrays: list[jax.Array]) -> Sequence[jax.Array]:
    """Copies arrays of one mesh where they are."""
    with jax.set_mesh(mesh):  # that of the training loop may have other devices
        return _copier(tuple(array.sharding for array in arrays))(arrays)


@functools.lru_cache(maxsize=64)
def _copier(shardings: tuple[Sharding, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    copier: Callable[[list[jax.Array]], list[jax.Array]] = jax.jit(
        _copied, out_shardings=list(shardings)
    )
    return copier


def _copy_pieces(pieces: list[jax.Array]) -> Sequence[jax.Array]:
    """Copies arrays of one device each.

    One by one: a whole array of several processes goes through a computation on its way to host
    memory in older versions of JAX, which waits for what is queued on the devices.
    """
    if not pieces:
        return []
    if not _moves_to_host(pieces[0].sharding):
        return _copy_pieces_on_devices(pieces)
    places = [piece.sharding.with_memory_kind(_HOST_MEMORY) for piece in pieces]
    # Without may_alias, arrays that are in host memory already would be handed back as they are.
    moved: list[jax.Array] = jax.device_put(pieces, places, may_alias=False)
    return moved


def _copy_pieces_on_devices(pieces: Sequence[jax.Array]) -> list[jax.Array]:
    by_device: dict[jax.Device, list[int]] = {}
    for position, piece in enumerate(pieces):
        by_device.setdefault(piece.device, []).append(position)
    copies: dict[int, jax.Array] = {}
    for device, positions in by_device.items():
        with jax.set_mesh(_mesh_of(device)):
            copied = _copy_on_device([pieces[position] for position in positions])
        copies.update(zip(positions, copied, strict=True))
    return [copies[position] for position in range(len(pieces))]


@functools.cache
def _mesh_of(device: jax.Device) -> Mesh:
    return Mesh([device], ("device",))


def _copied(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


_copy_on_device = jax.jit(_copied)


def _moves_to_host(sharding: Sharding) -> bool:
    """Whether the devices can put it into pinned host memory, and it is not in host memory yet."""
    device = next(iter(sharding.addressable_devices))
    has_it = any(memory.kind == _HOST_MEMORY for memory in device.addressable_memories())
    return has_it and not is_host_memory(sharding)


def _default_memory(sharding: Sharding) -> str:
    return str(next(iter(sharding.addressable_devices)).default_memory().kind)
