"""Any saved layout, any loss, any target: every element is right, or nobody has it."""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from synthetic_saves import Spec, SyntheticSave

from mtcheckpoint._clock import Deadline
from mtcheckpoint._reader import read_state, tensorstore_context
from mtcheckpoint._shares.layout import Layout
from mtcheckpoint._shares.places import LocalPlace
from mtcheckpoint._sources import Sources

AXES = ("x", "y", "z")
DTYPES = ["float32", "bfloat16", "int32", "uint8", "bool", "complex64", "int4", "float8_e4m3fn"]
CONTEXT = tensorstore_context()


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, int]:
    sizes = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
    while np.prod(sizes) > 8:
        sizes.pop()
    return dict(zip(AXES, sizes, strict=False))


@st.composite
def specs(draw: st.DrawFn, mesh: dict[str, int], rank: int) -> Spec:
    """Axes dealt out to dimensions, each at most once, in any order."""
    free = draw(st.permutations(list(mesh)))
    dealt: list[list[str]] = [[] for _ in range(rank)]
    for axis in free:
        dimension = draw(st.integers(-1, rank - 1))
        if dimension >= 0:
            dealt[dimension].append(axis)
    return tuple(tuple(axes) for axes in dealt)


def parts(mesh: dict[str, int], axes: tuple[str, ...]) -> int:
    return int(np.prod([mesh[axis] for axis in axes]))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[SyntheticSave, set[int], dict[str, int], dict[str, Spec]]:
    """A save, the ranks that are lost, a mesh to come back on, and how each leaf lies on it."""
    saved_mesh, new_mesh = draw(meshes()), draw(meshes())
    count = parts(saved_mesh, tuple(saved_mesh))
    ranks = draw(st.sampled_from([n for n in (1, 2, 4, 8) if count % n == 0]))
    values, saved_specs, new_specs = {}, {}, {}
    for index in range(draw(st.integers(1, 4))):
        name = f"group{index % 2}.leaf{index}"
        rank = draw(st.integers(0, 3))
        saved_specs[name] = draw(specs(saved_mesh, rank))
        new_specs[name] = draw(specs(new_mesh, rank))
        shape = tuple(
            int(np.lcm(parts(saved_mesh, old), parts(new_mesh, new))) * draw(st.integers(1, 3))
            for old, new in zip(saved_specs[name], new_specs[name], strict=True)
        )
        values[name] = elements(shape, draw(st.sampled_from(DTYPES)), draw(st.booleans()), index)
    save = SyntheticSave(values=values, specs=saved_specs, mesh=saved_mesh, ranks=ranks)
    lost = draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    return save, lost, new_mesh, new_specs


def elements(shape: tuple[int, ...], dtype: str, zeros: bool, seed: int) -> np.ndarray:
    """Elements that differ from their neighbours; or zeros, which must come back as zeros."""
    kind = np.dtype(getattr(jnp, dtype, dtype))
    if zeros:
        return np.zeros(shape, kind)
    count = (np.arange(int(np.prod(shape))) * 7 + seed + 1) % 15 - 7
    return count.reshape(shape).astype(np.int8).astype(kind)


def nested(flat: dict[str, object]) -> dict[str, dict[str, object]]:
    tree: dict[str, dict[str, object]] = {}
    for name, value in flat.items():
        group, leaf = name.split(".")
        tree.setdefault(group, {})[leaf] = value
    return tree


def target(save: SyntheticSave, mesh: Mesh, new_specs: dict[str, Spec]) -> object:
    return nested(
        {
            name: jax.ShapeDtypeStruct(
                value.shape,
                value.dtype,
                sharding=NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec))),
            )
            for (name, value), spec in zip(save.values.items(), new_specs.values(), strict=True)
        }
    )


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(worlds(), st.integers(0, 7))
def test_every_element_comes_back_or_nobody_has_it(world: object, turn: int) -> None:
    save, lost, new_mesh, new_specs = world  # type: ignore[misc]
    devices = np.array(jax.devices()[: parts(new_mesh, tuple(new_mesh))])
    mesh = Mesh(devices.reshape(list(new_mesh.values())), tuple(new_mesh))
    with tempfile.TemporaryDirectory() as folder:
        shares = save.write(Path(folder))
        left = {rank: [LocalPlace(s)] for rank, s in enumerate(shares) if rank not in lost}
        sources = Sources(left, preferred_ranks=[], turn=turn, context=CONTEXT)
        plan = sources.plan(target(save, mesh, new_specs), mesh)
        gone = {
            name: {chunk for chunk, ranks in save.holders(name).items() if ranks <= lost}
            for name in save.values
        }
        assert {name: set(chunks) for name, chunks in plan.missing.items()} == {
            name: chunks for name, chunks in gone.items() if chunks
        }
        if plan.missing:
            return
        state = read_state(
            plan, context=CONTEXT, concurrent_bytes=1 << 12, deadline=Deadline.after(60)
        )
        for name, value in save.values.items():
            group, leaf = name.split(".")
            array = state[group][leaf]
            assert array.dtype == value.dtype
            assert array.sharding.spec == PartitionSpec(*(a or None for a in new_specs[name]))
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(worlds())
def test_the_layout_of_a_save_follows_from_one_share(world: object) -> None:
    save = world[0]  # type: ignore[index]
    layout = Layout(save.devices_of_rank, ranks=range(save.ranks))
    for encoded, text in save._shardings():
        name = base64.b64decode(encoded).decode()
        sharding = json.loads(text)
        found = {chunk: set(layout.ranks_of(sharding, chunk)) for chunk in save.holders(name)}
        assert found == save.holders(name)


def test_only_the_shares_that_are_needed_are_opened(tmp_path: Path) -> None:
    save = SyntheticSave(
        values={
            "g.sharded": elements((8, 8), "float32", False, 0),
            "g.replicated": elements((4,), "float32", False, 1),
        },
        specs={"g.sharded": (("x",), ()), "g.replicated": ((),)},
        mesh={"x": 8},
        ranks=8,
    )
    left = {rank: [LocalPlace(share)] for rank, share in enumerate(save.write(tmp_path))}
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    whole = target(save, mesh, {"g.sharded": ((), ()), "g.replicated": ((),)})
    part = {"g": {"replicated": whole["g"]["replicated"]}}  # type: ignore[index]
    sources = Sources(left, preferred_ranks=[], turn=3, context=CONTEXT)
    assert not sources.plan(part, mesh, partial=True).missing
    assert [share.identity.node_rank for share in sources.opened if share.identity] == [3]
    assert not sources.plan(whole, mesh).missing
    assert len(sources.opened) == 8
