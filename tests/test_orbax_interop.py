"""Orbax's ReplicatorCheckpointManager and ours read each other's steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost
from orbax.checkpoint.experimental.emergency import replicator_checkpoint_manager as replicated
from restoring_clusters import run_job, same
from restoring_jobs import alone, config, folder, open_manager, outcome, rank, together

from mtcheckpoint._handshake import files
from mtcheckpoint.testing import case_mesh, ram_disk

NODES = 2
STEP = 6


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[dict[str, Any]]]:
    with ram_disk() as root:
        found = run_job(exchange, NODES, str(root))
    return {name: [process[name] for process in found] for name in found[0]}


def test_orbax_restores_a_step_of_ours(outcomes: dict[str, Any]) -> None:
    assert same(outcomes["orbax reads ours"], "steps", "equal") == [[STEP], True]


def test_orbax_restores_ours_without_being_told_shardings(outcomes: dict[str, Any]) -> None:
    assert same(outcomes["orbax reads ours bare"], "equal") is True


def test_we_restore_a_step_of_orbax(outcomes: dict[str, Any]) -> None:
    found = outcomes["ours reads orbax"]
    assert same(found, "step", "tier", "extras", "equal") == [STEP, "local", [], True]


def test_we_restore_a_step_of_orbax_that_a_replicator_offers(outcomes: dict[str, Any]) -> None:
    found = outcomes["ours reads orbax after a handshake"]
    assert same(found, "step", "tier", "extras", "equal") == [STEP, "local", [], True]


def test_we_reshard_a_step_of_orbax(outcomes: dict[str, Any]) -> None:
    assert same(outcomes["ours reshards orbax"], "step", "equal") == [STEP, True]


def test_our_call_works_in_a_loop_written_for_orbax(outcomes: dict[str, Any]) -> None:
    assert same(outcomes["the same calls"], "equal") is True


def exchange(root: str) -> dict[str, Any]:
    mesh = case_mesh()
    # What Orbax's manager expects of the program around it.
    flags.FLAGS(["interop"])
    multihost.initialize_runtime_to_distributed_ids()
    multihost.initialize_distributed_to_device_ids()
    with open_manager(alone(f"{root}/ours")) as manager:
        manager.save(STEP, state(mesh), force=True)
    orbax_saves(Path(f"{root}/orbax"), mesh)
    together("saved")
    return {
        "orbax reads ours": outcome(lambda: orbax_reads(f"{root}/ours", mesh)),
        "orbax reads ours bare": outcome(lambda: orbax_reads_bare(f"{root}/ours", mesh)),
        "ours reads orbax": outcome(lambda: ours_reads(f"{root}/orbax", mesh)),
        "ours reshards orbax": outcome(lambda: ours_reads(f"{root}/orbax", case_mesh(4, 2))),
        "ours reads orbax after a handshake": outcome(lambda: ours_shakes_hands(root, mesh)),
        "the same calls": outcome(lambda: same_calls(f"{root}/calls", mesh)),
    }


def state(mesh: Mesh) -> dict[str, Any]:
    """Arrays only: Orbax's manager writes no others on every process."""

    def array(shape: tuple[int, ...], *spec: str | None) -> jax.Array:
        whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])

    return {
        "params": {"w": array((16, 32), "data", "model"), "b": array((32,), "model")},
        "layers": [array((8, 4), None, "model"), array((4,))],
        "step": array(()),
    }


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def equal(found: Any, wanted: Any) -> bool:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return all(
        np.array_equal(ours.data, theirs.data) and ours.index == theirs.index
        for x, y in pairs
        for ours, theirs in zip(x.addressable_shards, y.addressable_shards, strict=True)
    )


def orbax_manager(directory: Path, mesh: Mesh) -> Any:
    return replicated.ReplicatorCheckpointManager(
        directory,
        options=replicated.ReplicatorCheckpointManagerOptions(enable_async_checkpointing=False),
        global_mesh=mesh,
    )


def orbax_saves(root: Path, mesh: Mesh) -> None:
    directory = folder(str(root))
    directory.mkdir(parents=True)
    with orbax_manager(directory, mesh) as manager:
        manager.save(STEP, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state(mesh))))
        manager.wait_until_finished()


def restore_args(mesh: Mesh) -> Any:
    return ocp.args.Composite(
        state=ocp.args.PyTreeRestore(
            item=abstract(state(mesh)),
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract(state(mesh))),
        )
    )


def orbax_reads(root: str, mesh: Mesh) -> dict[str, Any]:
    with orbax_manager(folder(root), mesh) as manager:
        steps = list(manager.all_steps())
        restored = manager.restore(STEP, args=restore_args(mesh))["state"]
    return {"steps": steps, "equal": equal(restored, state(mesh))}


def orbax_reads_bare(root: str, mesh: Mesh) -> dict[str, Any]:
    with orbax_manager(folder(root), mesh) as manager:
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore())
        return {"equal": equal(manager.restore(STEP, args=args)["state"], state(mesh))}


def ours_reads(root: str, mesh: Mesh) -> dict[str, Any]:
    with open_manager(alone(root), mesh) as manager:
        return summary(manager, mesh)


def ours_shakes_hands(root: str, mesh: Mesh) -> dict[str, Any]:
    from handshake_peer import ThreadedReplicator

    place = f"{root}/offered"
    digest = "D" + f"{rank()}" * 64
    share = files.ShareName(job="job-a", step=STEP, node_rank=rank())
    folder(place).mkdir(parents=True)
    shutil.copytree(folder(f"{root}/orbax") / str(STEP), folder(place) / files.data_name(digest))
    (folder(place) / share.meta).write_text(digest)

    def answer(volume: Path) -> None:
        (volume / files.PRERESTORE_FILE).write_text(f"restore-step: {STEP}\n")
        (volume / share.restore).symlink_to(files.data_name(digest))

    together("offered")
    with (
        ThreadedReplicator(folder(place), answer),
        open_manager(config(place), mesh) as manager,
    ):
        return summary(manager, mesh)


def summary(manager: Any, mesh: Mesh) -> dict[str, Any]:
    restored = manager.restore_latest(abstract(state(mesh)))
    if restored is None:
        return {"step": None}
    return {
        "step": restored.step,
        "tier": restored.tier,
        "extras": list(restored.extras),
        "equal": equal(restored.state, state(mesh)),
    }


def same_calls(root: str, mesh: Mesh) -> dict[str, Any]:
    with open_manager(alone(root), mesh) as manager:
        assert manager.save(STEP, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state(mesh))))
        manager.wait_until_finished()
        assert manager.latest_step() == STEP
        restored = manager.restore(manager.latest_step(), args=restore_args(mesh))
        return {
            "equal": equal(restored["state"], state(mesh)) and equal(restored.state, state(mesh))
        }
