"""What the processes of the elastic tests run: a job that comes back on another topology."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from restoring_jobs import JOB, LIMIT_SECONDS, extras_of, outcome

import mtcheckpoint as mtc
from mtcheckpoint._handshake import files
from mtcheckpoint.testing import abstract_state, assert_state, case_state, this_process


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of the job, as it goes to its processes.

    Attributes:
        hosts: the node that each process lives on; its length is the number of processes.
        mesh: sizes of the axes ``data`` and ``model``.
        swapped: the axes lie over the devices in the other order.
        state: ``"case"``; ``"replicated"``: cut along ``model`` only, so that slices are replicas;
            ``"thirds"``: a state that three can share.
        given: whether the target has shardings; None asks for the state as it was saved.
        content: how far the elements are from those of the step, to tell two saves of one step.
        found_content: the same, of what is restored.
        steps: steps to save afterwards.
        flags: of the configuration, on top of the usual ones.
    """

    hosts: Sequence[int]
    mesh: Sequence[int]
    swapped: bool = False
    state: str = "case"
    given: bool = True
    content: int = 0
    found_content: int = 0
    steps: Sequence[int] = ()
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def rank() -> int:
    """Whose RAM disk this process has; 0 for a job of the test's own process."""
    place = this_process()
    return place.rank if place is not None else 0


def settings(root: str, run: Run) -> mtc.CheckpointConfig:
    node = Path(root) / f"node{run.hosts[rank()]}"
    node.mkdir(exist_ok=True)
    defaults: dict[str, Any] = {
        "enable_multi_tier_checkpointing": True,
        "enable_continuous_checkpointing": True,
        "local_checkpoint_directory": str(node),
        "multi_tier_checkpointing_backup_interval_minutes": 30,
        "run_name": JOB,
        "timeout_secs": LIMIT_SECONDS,
    }
    return mtc.CheckpointConfig(**{**defaults, **run.flags})


def mesh_of(run: Run) -> Mesh:
    sizes = dict(zip(("data", "model"), run.mesh, strict=True))
    names = ("model", "data") if run.swapped else ("data", "model")
    shape = [sizes[name] for name in names]
    of_each = int(np.prod(shape)) // jax.process_count()
    devices = [
        device
        for process in range(jax.process_count())
        for device in jax.devices()
        if device.process_index == process
    ]
    per_process = len(devices) // jax.process_count()
    chosen = [d for position, d in enumerate(devices) if position % per_process < of_each]
    return Mesh(np.array(chosen).reshape(shape), names)


def state_of(run: Run, step: int) -> dict[str, Any]:
    mesh = mesh_of(run)
    if run.state == "thirds":
        return _thirds(mesh, step)
    state = case_state(mesh, step)
    return jax.tree.map(_over_model, state) if run.state == "replicated" else state


def check(run: Run, state: Any, step: int) -> None:
    """Checks every element here, and that a sharding that was asked for is the one that came."""
    if run.state == "thirds":
        wanted = _thirds(mesh_of(run), step)
        assert jax.tree.structure(state) == jax.tree.structure(wanted)
        for found, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
            for ours, theirs in zip(found.addressable_shards, leaf.addressable_shards, strict=True):
                np.testing.assert_array_equal(np.asarray(ours.data), np.asarray(theirs.data))
        return
    if not run.given:
        # As it was saved: Orbax's names for what optax keeps in named tuples.
        state = jax.tree.unflatten(jax.tree.structure(state_of(run, 0)), jax.tree.leaves(state))
    assert_state(state, step)
    if run.given:
        for found, leaf in zip(
            jax.tree.leaves(state), jax.tree.leaves(state_of(run, 0)), strict=True
        ):
            assert found.sharding.is_equivalent_to(leaf.sharding, found.ndim), found.sharding


def _over_model(leaf: jax.Array) -> jax.Array:
    spec = PartitionSpec(*[None] * (leaf.ndim - 1), "model") if leaf.ndim else PartitionSpec()
    return jax.jit(lambda x: x, out_shardings=NamedSharding(leaf.sharding.mesh, spec))(leaf)


def _thirds(mesh: Mesh, step: int) -> dict[str, Any]:
    def array(shape: tuple[int, ...], *spec: str) -> jax.Array:
        whole = (np.arange(np.prod(shape)).reshape(shape) + 1000 * step).astype(np.float32)
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])

    return {"w": array((12, 24), "data", "model"), "b": array((24,), "model"), "n": array(())}


def summary(run: Run, restored: mtc.RestoredState | None) -> dict[str, Any]:
    if restored is None:
        return {"step": None}
    check(run, restored.state, restored.step + run.found_content)
    return {
        "step": restored.step,
        "tier": restored.tier,
        "extras": [[e["rank"], e["step"]] for e in restored.extras],
        "passed_over": [[p.step, p.source, p.reason] for p in restored.report.passed_over],
        "left_out": list(restored.report.left_out),
        "bytes": dict(restored.report.bytes_by_tier),
        "seconds": sum(restored.report.seconds.values()),
    }


def target_of(run: Run) -> Any:
    return abstract_state(state_of(run, 0)) if run.given else None


def train(root: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Restores what there is, checks it, and goes on with training."""
    run = Run(**fields)

    def attempt() -> dict[str, Any]:
        with mtc.ReplicatedCheckpointManager(settings(root, run), mesh=mesh_of(run)) as manager:
            found = summary(run, manager.restore_latest(target_of(run)))
            manager.wait_until_finished()
            save(manager, run)
        return found

    return outcome(attempt)


def save(manager: mtc.ReplicatedCheckpointManager, run: Run) -> None:
    for step in run.steps:
        state = state_of(run, step + run.content)
        assert manager.save(step, state, extras=extras_of(step), force=True)
    manager.wait_until_finished()


# Volumes and backups as a replicator lays them out, without one.


def save_alone(root: str, fields: dict[str, Any]) -> None:
    """Saves without a replicator: the steps lie in the volumes as directories of digits."""
    run = Run(**fields)
    with mtc.ReplicatedCheckpointManager(alone(root, run), mesh=mesh_of(run)) as manager:
        save(manager, run)


def alone(root: str, run: Run) -> mtc.CheckpointConfig:
    return dataclasses.replace(
        settings(root, run), enable_replicator=False, max_num_checkpoints_to_keep=2
    )


def open_alone(root: Path, run: Run) -> mtc.ReplicatedCheckpointManager:
    return mtc.ReplicatedCheckpointManager(alone(str(root), run), mesh=mesh_of(run))


def restore_alone(root: str, run: Run, **options: Any) -> dict[str, Any]:
    """How a restore without a replicator ends."""

    def attempt() -> dict[str, Any]:
        with mtc.ReplicatedCheckpointManager(alone(root, run), mesh=mesh_of(run)) as manager:
            return summary(run, manager.restore_latest(target_of(run), **options))

    return outcome(attempt)


def digest_for(step: int, node_rank: int) -> str:
    """A name such as the replicator's hashes, for data that no replicator has seen."""
    return "D" + f"{step:032x}{node_rank:032x}"


def lay_out(share: Path, place: str, *, step: int, node_rank: int, job: str = JOB) -> None:
    """Puts a copy of a share where a replicator would: a volume, or a backup at any URL."""
    filesystem, path = fsspec.core.url_to_fs(place)
    filesystem.makedirs(path, exist_ok=True)
    digest = digest_for(step, node_rank)
    for file in share.rglob("*"):
        if file.is_file():
            target = f"{path}/{files.data_name(digest)}/{file.relative_to(share)}"
            filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(target, file.read_bytes())
    name = files.ShareName(job=job, step=step, node_rank=node_rank).meta
    filesystem.pipe_file(f"{path}/{name}", digest.encode())
