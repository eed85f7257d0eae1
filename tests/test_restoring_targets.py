"""What a caller may ask for: shardings, forms of the abstract state, trees that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from restoring_clusters import run_job, same
from restoring_jobs import alone, open_manager, outcome, save_all

from mtcheckpoint._trees import flatten_named
from mtcheckpoint.testing import abstract_state, assert_state, case_mesh, case_state, ram_disk

NODES = 4
STEP, MIXED_STEP = 7, 8

Struct = jax.ShapeDtypeStruct


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[dict[str, Any]]]:
    """How each request ends on each process: one save, and all requests against it."""
    with ram_disk() as root:
        found = run_job(restore_all_forms, NODES, str(root))
    return {name: [process[name] for process in found] for name in found[0]}


# Shardings.

SHARDINGS = (
    "as saved",
    "axes swapped",
    "transposed mesh",
    "mesh of reversed devices",
    "replicated",
    "over data only",
    "mesh 1x8",
    "mesh 8x1",
    "mesh 4x2",
)


def shardings() -> dict[str, Any]:
    """The standard state asked for on other meshes and specs, by name."""
    mesh = case_mesh()
    devices = mesh.devices
    transposed = Mesh(devices.reshape(4, 2).T, ("data", "model"))
    reversed_mesh = Mesh(devices[::-1, ::-1], ("data", "model"))
    return {
        "as saved": on(mesh),
        "axes swapped": on(mesh, lambda spec: [SWAPPED.get(axis) for axis in spec]),
        "transposed mesh": on(transposed),
        "mesh of reversed devices": on(reversed_mesh),
        "replicated": on(mesh, lambda spec: []),
        "over data only": on(mesh, lambda spec: ["data" if a == "data" else None for a in spec]),
        "mesh 1x8": on(case_mesh(1, 8)),
        "mesh 8x1": on(case_mesh(8, 1)),
        "mesh 4x2": on(case_mesh(4, 2)),
    }


SWAPPED = {"data": "model", "model": "data"}


def on(mesh: Mesh, change: Callable[[Any], list[Any]] = list) -> Any:
    """The abstract standard state on a mesh, its partition specs changed."""

    def leaf(x: Struct) -> Struct:
        spec = PartitionSpec(*change(x.sharding.spec))
        return Struct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(leaf, abstract_state(case_state(case_mesh(), 0)))


@pytest.mark.parametrize("name", SHARDINGS)
def test_shardings(outcomes: dict[str, Any], name: str) -> None:
    assert same(outcomes[name], "step", "sharded as asked") == [STEP, True]


# Forms.

FORMS = ("arrays", "None", "no shardings", "no shardings on another mesh")
ORBAX_FORMS = (
    "orbax restore_args",
    "orbax item and restore_args",
    "orbax item",
    "orbax bare",
    "orbax StandardRestore",
    "orbax newest step",
    "orbax no args",
)


@pytest.mark.parametrize("name", FORMS + ORBAX_FORMS)
def test_forms(outcomes: dict[str, Any], name: str) -> None:
    assert same(outcomes[name], "step") == STEP


def test_leaves_that_are_no_arrays_come_back_as_they_were(outcomes: dict[str, Any]) -> None:
    found = same(outcomes["mixed"], "leaves")
    assert found == {
        "name": ["str", "a run"],
        "count": ["int", 3],
        "rate": ["float", 0.5],
        "flag": ["bool", True],
        "host": ["ndarray", [0.0, 1.0, 2.0]],
        "scalar": ["float32", 1.5],
        "layers.0": ["ArrayImpl", [0.0] * 8],
        "layers.1": ["ArrayImpl", [1.0] * 8],
        "key": ["PRNGKeyArray", [0, 5]],
    }
    assert same(outcomes["mixed as saved"], "leaves") == found
    assert same(outcomes["mixed as saved"], "layers") == "dict"


# What does not fit.

MISMATCHES = {
    "dropped": ["b: saved as float32[32], not asked for"],
    "added": ["extra: asked for float32[4], not saved"],
    "renamed": ["v: asked for bfloat16[16, 32], not saved", "w: saved as bfloat16[16, 32]"],
    "longer": ["w: asked for bfloat16[16, 40], saved as bfloat16[16, 32]"],
    "shorter": ["w: asked for bfloat16[16, 24], saved as bfloat16[16, 32]"],
    "other dtype": ["w: asked for float32[16, 32], saved as bfloat16[16, 32]"],
    "array for key": ["key: asked for uint32[2], saved as key<threefry2x32>[]"],
    "key for array": ["step: asked for key<threefry2x32>[], saved as int32[]"],
    "two at once": ["b: asked for float32[33]", "w: asked for float32[16, 32]"],
    "number for string": ["name: asked for int, saved as string"],
    "string for number": ["count: asked for str, saved as int64[]"],
    "other integer keys": ["layers.2: asked for float32[8], not saved", "layers.0: saved as"],
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatches(outcomes: dict[str, Any], name: str) -> None:
    error, paths = same(outcomes[name], "error", "paths")
    assert error == "StructureMismatchError"
    assert {line.split(":")[0] for line in MISMATCHES[name]} <= set(paths)
    for process in outcomes[name]:
        for line in MISMATCHES[name]:
            assert line in process["message"]
        assert process["took_seconds"] < 20


# The job.


def restore_all_forms(root: str) -> dict[str, Any]:
    settings = alone(root)
    with open_manager(settings) as manager:
        save_all(manager, [STEP])
        manager.save(MIXED_STEP, mixed_state(), force=True)
    with open_manager(settings) as manager:
        return {
            **{name: like(manager, tree) for name, tree in shardings().items()},
            **forms(manager),
            **orbax_forms(manager),
            "no shardings on another mesh": on_another_mesh(settings),
            **mixed(manager),
            **mismatches(manager),
        }


def restore_tree(manager: Any, tree: Any, step: int = STEP) -> Any:
    """The state of one step, like `tree`."""
    args = ocp.args.Composite(state=ocp.args.StandardRestore(tree))
    return manager.restore(step, args=args)["state"]


def like(manager: Any, tree: Any) -> dict[str, Any]:
    def attempt() -> dict[str, Any]:
        state = restore_tree(manager, tree)
        assert_state(state, STEP)
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(tree), strict=True)
        asked = all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in pairs)
        return {"step": STEP, "sharded as asked": asked}

    return outcome(attempt)


def forms(manager: Any) -> dict[str, Any]:
    arrays = case_state(case_mesh(), 0)
    bare = jax.tree.map(lambda x: Struct(x.shape, x.dtype), arrays)

    def check(tree: Any, verify: Callable[[Any], None]) -> dict[str, Any]:
        def attempt() -> dict[str, Any]:
            verify(restore_tree(manager, tree))
            return {"step": STEP}

        return outcome(attempt)

    return {
        "arrays": check(arrays, lambda state: assert_state(state, STEP)),
        "None": check(None, assert_leaves),
        "no shardings": check(bare, lambda state: assert_state(state, STEP)),
    }


def on_another_mesh(settings: Any) -> dict[str, Any]:
    """Saved partition specs, on a mesh of another shape with the same axes."""
    bare = jax.tree.map(lambda x: Struct(x.shape, x.dtype), case_state(case_mesh(), 0))

    def attempt() -> dict[str, Any]:
        mesh = case_mesh(4, 2)
        with open_manager(settings, mesh) as manager:
            state = restore_tree(manager, bare)
        assert_state(state, STEP)
        assert state["w"].sharding == NamedSharding(mesh, PartitionSpec("data", "model"))
        return {"step": STEP}

    return outcome(attempt)


def assert_leaves(state: Any) -> None:
    """Compares by name: without a request, tuples and the like come back as dictionaries."""
    found, _ = flatten_named(state)
    wanted, _ = flatten_named(case_state(case_mesh(), STEP))
    assert set(found) == set(wanted)
    for name, leaf in wanted.items():
        got = found[name]
        if name == "key":
            got, leaf = jax.random.key_data(got), jax.random.key_data(leaf)
        assert got.dtype == leaf.dtype and got.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        for ours, theirs in zip(got.addressable_shards, leaf.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(ours.data), np.asarray(theirs.data))


def orbax_forms(manager: Any) -> dict[str, Any]:
    tree = abstract_state(case_state(case_mesh(), 0))
    requests = ocp.checkpoint_utils.construct_restore_args(tree)
    pytree = ocp.args.PyTreeRestore
    asked = {
        "orbax restore_args": pytree(restore_args=requests),
        "orbax item and restore_args": pytree(item=tree, restore_args=requests),
        "orbax item": pytree(item=tree),
        "orbax bare": pytree(),
        "orbax StandardRestore": ocp.args.StandardRestore(tree),
    }

    def check(step: int | None, args: Any, whole: bool = True) -> dict[str, Any]:
        def attempt() -> dict[str, Any]:
            state = manager.restore(step, args=args)["state"]
            (assert_state if whole else lambda s, _: assert_leaves(s))(state, STEP)
            return {"step": STEP}

        return outcome(attempt)

    found = {
        name: check(STEP, ocp.args.Composite(state=item), name != "orbax bare")
        for name, item in asked.items()
    }
    found["orbax no args"] = check(STEP, None, False)
    found["orbax newest step"] = newest(manager)
    return found


def newest(manager: Any) -> dict[str, Any]:
    """``restore()`` takes the newest step."""

    def attempt() -> dict[str, Any]:
        assert set(manager.restore()["state"]) == set(mixed_state())
        assert manager.latest_step() == MIXED_STEP
        return {"step": STEP}

    return outcome(attempt)


def mixed_state() -> dict[str, Any]:
    """Leaves that are no arrays, and a dictionary with integer keys."""
    mesh = case_mesh()

    def array(value: float) -> jax.Array:
        return jax.jit(
            lambda: jnp.full(8, value, jnp.float32),
            out_shardings=NamedSharding(mesh, PartitionSpec("model")),
        )()

    return {
        "name": "a run",
        "count": 3,
        "rate": 0.5,
        "flag": True,
        "host": np.arange(3.0),
        "scalar": np.float32(1.5),
        "layers": {0: array(0.0), 1: array(1.0)},
        "key": jax.random.key(5),
    }


def mixed(manager: Any) -> dict[str, Any]:
    def check(tree: Any) -> dict[str, Any]:
        def attempt() -> dict[str, Any]:
            state = restore_tree(manager, tree, MIXED_STEP)
            named, _ = flatten_named(state)
            leaves = {name: [type(x).__name__, plain(x)] for name, x in named.items()}
            return {"leaves": leaves, "layers": type(state["layers"]).__name__}

        return outcome(attempt)

    return {"mixed": check(mixed_state()), "mixed as saved": check(None)}


def plain(value: Any) -> Any:
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        whole = np.zeros(value.shape)
        for shard in value.addressable_shards:
            whole[shard.index] = np.asarray(shard.data)
        # Every process has a part only; where it has none, the neighbours' value stands in.
        return [float(x) if whole.max() != 1 else 1.0 for x in whole]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def mismatches(manager: Any) -> dict[str, Any]:
    state, mixed = abstract_state(case_state(case_mesh(), 0)), mixed_state()
    without = {name: leaf for name, leaf in state.items() if name not in ("b", "w")}
    w, b = state["w"], state["b"]
    vector = Struct((4,), jnp.float32)
    wide = Struct((16, 40), w.dtype, sharding=w.sharding)
    asked: dict[str, tuple[int, Any]] = {
        "dropped": (STEP, {**without, "w": w}),
        "added": (STEP, {**state, "extra": vector}),
        "renamed": (STEP, {**without, "b": b, "v": w}),
        "longer": (STEP, {**state, "w": wide}),
        "shorter": (STEP, {**state, "w": Struct((16, 24), w.dtype, sharding=w.sharding)}),
        "other dtype": (STEP, {**state, "w": Struct(w.shape, jnp.float32, sharding=w.sharding)}),
        "array for key": (STEP, {**state, "key": Struct((2,), jnp.uint32)}),
        "key for array": (STEP, {**state, "step": state["key"]}),
        "two at once": (
            STEP,
            {**state, "w": Struct(w.shape, jnp.float32), "b": Struct((33,), b.dtype)},
        ),
        "number for string": (MIXED_STEP, {**mixed, "name": 1}),
        "string for number": (MIXED_STEP, {**mixed, "count": "3"}),
        "other integer keys": (
            MIXED_STEP,
            {**mixed, "layers": {1: mixed["layers"][1], 2: mixed["layers"][0]}},
        ),
    }
    return {
        name: outcome(lambda step=step, tree=tree: restore_tree(manager, tree, step))
        for name, (step, tree) in asked.items()
    }
