"""Who holds copies for whom: a grid of nodes, slices and replicas (case 7)."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from mtcheckpoint._handshake.files import job_name_fault, yaml_text
from mtcheckpoint._topology import Topology, from_jax, plan_topology, replicator_settings
from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.errors import ConfigError, TopologyError

JOB_NAMES = yaml.safe_load((Path(__file__).parent / "cases" / "job_names.yaml").read_text())
GRID = [
    (nodes, slices, replicas)
    for nodes in (1, 2, 3, 4, 6, 8, 12, 16)
    for slices in (None, -1, 0, 1, 2, 3, 4)
    for replicas in (None, -1, 0, 1, 2, 3, 4, 8)
]


def plans(nodes: int, ranks: Sequence[int] | None = None, **options: Any) -> list[Topology]:
    """The plan of every process."""
    ranks = tuple(ranks or range(nodes))
    return [
        plan_topology(node_ranks=ranks, process_index=index, **options) for index in range(nodes)
    ]


def typed(value: Any) -> Any:
    """What the replicator makes of a value of its YAML: variables expanded, digits an integer."""
    if isinstance(value, list):
        return [typed(item) for item in value]
    if isinstance(value, str):
        expanded = os.path.expandvars(value)
        try:
            return int(expanded)
        except ValueError:
            return expanded
    return value


def read_back(text: str) -> dict[str, Any]:
    return {key: typed(value) for key, value in yaml.safe_load(text).items()}


def multi_tier(**fields: Any) -> CheckpointConfig:
    defaults: dict[str, Any] = {
        "enable_multi_tier_checkpointing": True,
        "local_checkpoint_directory": "/ram",
        "local_checkpoint_period": 5,
        "multi_tier_checkpointing_backup_interval_minutes": 30,
        "run_name": "train-a",
    }
    return CheckpointConfig(**{**defaults, **fields})


# The grid.


@pytest.mark.parametrize(("nodes", "slices", "replicas"), GRID)
def test_grid_is_planned_consistently_or_refused(
    nodes: int, slices: int | None, replicas: int | None
) -> None:
    expected_slices = slices if (slices or 0) > 0 else 1
    assert expected_slices is not None
    expected_replicas = replicas if (replicas or 0) > 0 else expected_slices
    assert expected_replicas is not None
    fits = nodes % expected_slices == 0 and (
        expected_replicas == 1
        or (
            nodes % expected_replicas == 0
            and (
                expected_replicas % expected_slices == 0 or expected_slices % expected_replicas == 0
            )
        )
    )
    options = {"num_slices": slices, "mtc_data_parallelism": replicas}
    if not fits:
        with pytest.raises(TopologyError, match=r"divide|replica"):
            plans(nodes, **options)
        return
    planned = plans(nodes, **options)
    by_rank = {plan.node_rank: plan for plan in planned}
    assert sorted(by_rank) == list(range(nodes))
    for rank, plan in by_rank.items():
        assert rank not in plan.peer_ranks
        assert len(set(plan.peer_ranks)) == len(plan.peer_ranks)
        if expected_replicas > 1:
            assert (plan.replication, plan.data_parallelism) == ("replicas", expected_replicas)
            width = nodes // expected_replicas
            assert {peer % width for peer in plan.peer_ranks} == {rank % width}
            assert len(plan.peer_ranks) == expected_replicas - 1
            assert all(rank in by_rank[peer].peer_ranks for peer in plan.peer_ranks)
        else:
            assert (plan.replication, plan.data_parallelism) == ("copies", None)
            assert plan.peer_ranks == (() if nodes == 1 else ((rank + nodes // 2) % nodes,))


@pytest.mark.parametrize("nodes", range(2, 13))
def test_copies_are_spread_evenly(nodes: int) -> None:
    for count in range(1, nodes):
        planned = plans(nodes, peers_per_node=count)
        received = Counter(peer for plan in planned for peer in plan.peer_ranks)
        assert received == dict.fromkeys(range(nodes), count)
        for plan in planned:
            assert plan.node_rank not in plan.peer_ranks
            assert len(set(plan.peer_ranks)) == count
            assert plan.peer_ranks[0] == (plan.node_rank + nodes // 2) % nodes


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
def test_either_half_of_the_cluster_holds_everything(nodes: int) -> None:
    planned = plans(nodes)
    for half in (range(nodes // 2), range(nodes // 2, nodes)):
        held = {plan.node_rank for plan in planned if {plan.node_rank, *plan.peer_ranks} & {*half}}
        assert held == set(range(nodes))


def test_further_copies_lie_far_apart() -> None:
    assert plans(8, peers_per_node=3)[0].peer_ranks == (4, 2, 6)


@pytest.mark.parametrize(("nodes", "count"), [(1, 2), (2, 2), (4, 4), (4, 9), (4, 0), (4, -1)])
def test_peers_that_there_are_not(nodes: int, count: int) -> None:
    with pytest.raises(TopologyError, match=f"peers_per_node={count} with {nodes} nodes"):
        plans(nodes, peers_per_node=count)


def test_a_single_node_has_no_peers() -> None:
    assert plans(1)[0].peer_ranks == plans(1, peers_per_node=1)[0].peer_ranks == ()


# What the user asks for.


def test_replication_can_be_chosen() -> None:
    assert plans(4, num_slices=2, replication="copies")[0].peer_ranks == (2,)
    assert plans(4, num_slices=2, replication="copies")[0].data_parallelism is None
    assert plans(4, mtc_data_parallelism=4, replication="replicas")[0].peer_ranks == (1, 2, 3)


def test_one_replica_cannot_stand_in_for_another() -> None:
    with pytest.raises(TopologyError, match="set mtc_data_parallelism"):
        plans(4, replication="replicas")


def test_slices_come_from_the_devices() -> None:
    plan = plans(6, slice_indices=[7, 7, 7, 3, 3, 3])[1]
    assert (plan.num_slices, plan.peer_ranks) == (2, (4,))


def test_slices_of_different_length_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"equally many nodes, found \[1, 3\]"):
        plans(4, slice_indices=[0, 1, 1, 1])
    with pytest.raises(TopologyError, match="3 slice indices for 4 nodes"):
        plans(4, slice_indices=[0, 1, 1])


# Ranks.


@pytest.mark.parametrize(
    "ranks", [(0, 0), (0, 2), (-1, 0), (1, 2), (0, 1, 1, 3), (0, 1, 2, 4)], ids=str
)
def test_ranks_that_are_not_one_to_one(ranks: tuple[int, ...]) -> None:
    with pytest.raises(TopologyError, match="each once, found"):
        plans(len(ranks), ranks)


@pytest.mark.parametrize("index", [-1, 4])
def test_a_process_that_there_is_not(index: int) -> None:
    with pytest.raises(TopologyError, match="not one of 4 processes"):
        plan_topology(node_ranks=(0, 1, 2, 3), process_index=index)


@pytest.mark.parametrize("ranks", [(2, 3, 0, 1), (1, 0, 3, 2), (3, 0, 1, 2)], ids=str)
def test_permuted_ranks_that_keep_the_replicators_columns(ranks: tuple[int, ...]) -> None:
    for index, plan in enumerate(plans(4, ranks, num_slices=2)):
        twin = ranks[(index + 2) % 4]
        assert plan.peer_ranks == (twin,)
        assert plan.node_ranks == ranks


def test_ranks_that_the_replicator_would_pair_otherwise() -> None:
    with pytest.raises(TopologyError, match=r"place 0 of the 2 replicas have ranks \[1, 2\]"):
        plans(4, (1, 0, 2, 3), num_slices=2)


def test_copies_do_not_mind_how_ranks_are_permuted() -> None:
    ranks = random.Random(0).sample(range(8), 8)
    assert [plan.peer_ranks for plan in plans(8, ranks)] == [((r + 4) % 8,) for r in ranks]


# What is written.


def test_settings_of_copies_have_no_data_parallelism() -> None:
    settings = replicator_settings(multi_tier(), plans(4)[1])
    assert list(settings.items()) == [
        ("job-name", "train-a"),
        ("framework", "orbax"),
        ("node-rank", 1),
        ("nodes", 4),
        ("peer-ranks", [3]),
        ("backup-interval-minutes", 30),
    ]


def test_settings_of_replicas_and_steps() -> None:
    config = multi_tier(
        multi_tier_checkpointing_backup_interval_minutes=0,
        multi_tier_checkpointing_backup_interval_steps=50,
    )
    settings = replicator_settings(config, plans(4, num_slices=2)[1])
    assert settings["assume-data-parallelism"] == 2
    assert settings["backup-interval-steps"] == 50
    assert "backup-interval-minutes" not in settings
    assert list(settings)[:3] == ["job-name", "framework", "assume-data-parallelism"]


@pytest.mark.parametrize("name", JOB_NAMES["good"])
def test_good_job_names_come_back_from_a_typed_reader(name: str) -> None:
    assert job_name_fault(name) is None
    for plan in (*plans(1), *plans(6), *plans(64, num_slices=2)):
        settings = replicator_settings(multi_tier(run_name=name), plan)
        assert read_back(yaml_text(settings)) == settings


@pytest.mark.parametrize("name", JOB_NAMES["bad"], ids=ascii)
def test_bad_job_names_are_refused_before_anything_is_written(name: str) -> None:
    with pytest.raises(ConfigError, match="run_name") as fault:
        multi_tier(run_name=name)
    assert "run_name" in fault.value.fields


# The running job.


def test_from_jax_asks_for_the_ranks_within_the_limit() -> None:
    limits: list[float] = []

    def ranks(timeout_secs: float) -> Sequence[int]:
        limits.append(timeout_secs)
        return [0]

    topology = from_jax(multi_tier(timeout_secs=7.0), ranks)
    assert limits == [7.0]
    assert (topology.nodes, topology.num_slices, topology.peer_ranks) == (1, 1, ())
    assert jax.process_count() == 1


def test_from_jax_refuses_ranks_of_another_count() -> None:
    with pytest.raises(TopologyError):
        from_jax(multi_tier(), lambda _: [1, 0])
