"""Jobs that lose processes, nodes and all memory, and come back, opposite both replicators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replicator_cluster import EmbeddedCluster
from restoring_clusters import (
    REPLICATORS,
    run_job,
    same,
    start_replicator,
    wait_until_backed_up,
    wait_until_held,
    wipe,
)
from restoring_jobs import restore_without_replicator, train, train_with_backups

NODES = 4


@pytest.fixture(params=REPLICATORS)
def cluster(request: pytest.FixtureRequest, volume_root: Path) -> Iterator[Any]:
    with start_replicator(request.param, volume_root, NODES) as cluster:
        yield cluster


def test_process_ids_may_move_and_a_node_may_be_lost(cluster: Any, volume_root: Path) -> None:
    def run(steps: list[int], **options: Any) -> list[dict[str, Any]]:
        found = run_job(train, NODES, str(volume_root), {}, steps, **options)
        # A share belongs to a process id, wherever that process lives.
        ids = options.get("process_ids") or range(NODES)
        volumes = [cluster.volumes[list(ids).index(process)] for process in range(NODES)]
        wait_until_held(volumes, steps[-1])
        return found

    assert same(run([1, 2, 3]), "step") is None

    found = run([4])
    assert same(found, "step", "tier") == [3, "local"]
    assert same(found, "extras") == [[rank, 3, True] for rank in range(NODES)]
    assert same(found, "passed_over") == []
    assert all(set(outcome["bytes"]) == {"local"} for outcome in found)

    assert same(run([5], process_ids=[1, 0, 3, 2]), "step", "tier") == [4, "peer"]
    assert same(run([6], process_ids=[3, 2, 0, 1]), "step", "tier") == [5, "peer"]

    wipe(cluster.volumes[1])
    assert same(run([7], process_ids=[3, 2, 0, 1]), "step", "tier") == [6, "peer"]


def test_all_memory_may_be_lost(cluster: Any, volume_root: Path) -> None:
    flags = {"backup_root": str(cluster.backup)}
    run_job(train_with_backups, NODES, str(volume_root), flags, backed_up_always(cluster), [2])
    wait_until_held(cluster.volumes, 2)
    backup = wait_until_backed_up(cluster.backup, 2, NODES)
    before = sorted(path.name for path in backup.iterdir())
    for volume in cluster.volumes:
        wipe(volume)

    # First by our own reader: a replicator that comes back makes new backups.
    found = run_job(restore_without_replicator, NODES, str(volume_root / "new"), flags)
    assert same(found, "step", "tier") == [2, "backup"]
    assert all(set(outcome["bytes"]) == {"backup"} for outcome in found)
    assert sorted(path.name for path in backup.iterdir()) == before

    found = run_job(train, NODES, str(volume_root), flags, [3])
    assert same(found, "step", "tier") == [2, "backup"]
    assert same(found, "extras") == [[rank, 2, True] for rank in range(NODES)]


def backed_up_always(cluster: Any) -> dict[str, float]:
    """What has a replicator of this kind back up every step."""
    if isinstance(cluster, EmbeddedCluster):
        return {"backup-interval-steps": 1}
    return {"backup-interval-minutes": 0.0001}


def test_two_slices_restore_a_lost_node_from_its_twin(cluster: Any, volume_root: Path) -> None:
    flags = {"num_slices": 2, "replication": "replicas"}
    twins = [[0, 2], [1, 3], [2, 0], [3, 1]]
    # Replicas hold the same data, so the state must not be cut along the axis between slices.
    run_job(train_replicated, NODES, str(volume_root), flags, [1, 2])
    wait_until_held(cluster.volumes, 2, twins)

    wipe(cluster.volumes[1])
    found = run_job(train_replicated, NODES, str(volume_root), flags, [3])

    assert same(found, "step", "tier") == [2, "peer"]
    wait_until_held(cluster.volumes, 3, twins)


def train_replicated(root: str, flags: dict[str, Any], steps: list[int]) -> dict[str, Any]:
    """As `train`, with a state that is the same on all slices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec
    from restoring_jobs import config, extras_of, open_manager, summary

    from mtcheckpoint.testing import abstract_state, case_mesh, case_state

    mesh = case_mesh()

    def over_model(leaf: jax.Array) -> jax.Array:
        spec = PartitionSpec(*[None] * (leaf.ndim - 1), "model") if leaf.ndim else PartitionSpec()
        return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, spec))(leaf)

    def state(step: int) -> Any:
        return jax.tree.map(over_model, case_state(mesh, step))

    with open_manager(config(root, **flags), mesh) as manager:
        found = summary(manager.restore_latest(abstract_state(state(0))))
        for step in steps:
            assert manager.save(step, state(step), extras=extras_of(step), force=True)
        manager.wait_until_finished()
    return found
