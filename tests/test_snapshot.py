"""What a snapshot holds: each part once, the right one, and out of training's reach."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtcheckpoint import _device_copies, _snapshot
from mtcheckpoint._host_array import HostArray
from mtcheckpoint._snapshot import take_snapshot
from mtcheckpoint.testing import case_mesh

VALUES = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
SPECS = [(), ("data",), ("model",), (None, "model"), ("data", "model"), (("model", "data"),)]


def meshes() -> list[jax.sharding.Mesh]:
    devices = np.asarray(jax.devices()[:4])
    orders = [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 0, 1]]
    return [jax.sharding.Mesh(devices[o].reshape(2, 2), ("data", "model")) for o in orders]


@pytest.fixture(params=["looked at", "copied whole", "copied by shards"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a snapshot comes about, whatever the version of JAX."""
    monkeypatch.setattr(_snapshot, "is_host_memory", lambda _: request.param == "looked at")
    monkeypatch.setattr(_device_copies, "_MANY_DEVICES_QUEUE", request.param == "copied whole")
    _device_copies._mesh_to_copy_on.cache_clear()
    return str(request.param)


@pytest.mark.parametrize(("mesh", "spec"), [*itertools.product(range(3), SPECS)])
def test_each_part_once_and_where_it_belongs(mesh: int, spec: Any, way: str) -> None:
    sharding = jax.NamedSharding(meshes()[mesh], jax.P(*spec))
    array = jax.device_put(VALUES, sharding)
    (held,) = jax.tree.leaves(take_snapshot({"x": array}, meshes()[mesh]).tree)
    assert isinstance(held, HostArray)
    assert (held.shape, held.dtype, held.sharding) == (VALUES.shape, VALUES.dtype, sharding)
    array.delete()
    parts = held.parts()
    for box, part in zip(held.form.boxes, parts, strict=True):
        assert np.array_equal(part, VALUES[tuple(slice(*ends) for ends in box)])
    assert sum(part.size for part in parts) == VALUES.size, "all of it, each part once"


def test_leaves_of_all_kinds_at_once(way: str) -> None:
    """Of several meshes and axis types, on single devices, keys, replicated and not."""
    explicit = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    one, two, _ = meshes()
    state = {
        "one": jax.device_put(VALUES, jax.NamedSharding(one, jax.P("data", "model"))),
        "two": jax.device_put(VALUES + 1, jax.NamedSharding(two, jax.P(("data", "model")))),
        "replicated": jax.device_put(VALUES + 2, jax.NamedSharding(one, jax.P())),
        "explicit": jax.device_put(VALUES + 3, jax.NamedSharding(explicit, jax.P("x"))),
        "single": jax.device_put(VALUES + 4, jax.devices()[2]),
        "scalar": jnp.int32(7),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(1), 8), jax.NamedSharding(one, jax.P("data"))
        ),
        "bfloat16": jax.device_put(
            VALUES.astype(jnp.bfloat16), jax.NamedSharding(one, jax.P("model"))
        ),
    }
    wanted = {k: np.asarray(_data(array)) for k, array in state.items()}
    with jax.set_mesh(explicit):
        snapshot = take_snapshot(state, one)
    for array in state.values():
        array.delete()
    for name, held in snapshot.tree.items():
        whole = np.empty(held.shape, held.dtype)
        for box, part in zip(held.form.boxes, held.parts(), strict=True):
            whole[tuple(slice(*ends) for ends in box)] = part
        assert np.array_equal(whole, wanted[name]), name


def _data(array: jax.Array) -> jax.Array:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def test_training_cannot_have_the_memory_as_long_as_it_is_looked_at() -> None:
    mesh = case_mesh()
    array = jax.device_put(VALUES, jax.NamedSharding(mesh, jax.P("data")))
    addresses = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
    snapshot = take_snapshot({"x": array}, mesh)
    (held,) = jax.tree.leaves(snapshot.tree)
    assert {part.ctypes.data for part in held.parts()} <= addresses, "nothing was copied"
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    overwrite(array).block_until_ready()
    for box, part in zip(held.form.boxes, held.parts(), strict=True):
        assert np.array_equal(part, VALUES[tuple(slice(*ends) for ends in box)])
        assert not part.flags.writeable
    if not array.is_deleted():
        array.delete()
    assert all(part.any() for part in held.parts())


def test_what_is_still_being_computed_is_copied_without_waiting() -> None:
    mesh = case_mesh()
    sharding = jax.NamedSharding(mesh, jax.P())
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 400, lambda _, y: jnp.sin(y @ y), x))
    array = slow(jax.device_put(jnp.full((256, 256), 0.01), sharding))
    was_ready = array.is_ready()
    (held,) = jax.tree.leaves(take_snapshot({"x": array}, mesh).tree)
    if not was_ready:
        assert all(isinstance(piece, jax.Array) for piece in held.pieces)
    for part in held.parts():
        assert np.array_equal(part, np.asarray(array))


def test_keys_are_held_as_their_data() -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    snapshot = take_snapshot({"keys": keys}, case_mesh())
    (held,) = jax.tree.leaves(snapshot.tree)
    (part,) = held.parts()
    assert np.array_equal(part, np.asarray(jax.random.key_data(keys)))
    assert snapshot.kinds == {"keys": f"key:{jax.random.key_impl(keys)}"}
