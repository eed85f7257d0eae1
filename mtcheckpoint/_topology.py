"""Who is who: node ranks, slices, replicas, and which nodes hold copies for each other.

`plan_topology` is pure; `from_jax` only collects what it needs from the running job. Everything is
checked before anything is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.errors import TopologyError

__all__ = ["Topology", "from_jax", "plan_topology", "replicator_settings"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The nodes of a job as the replicator sees them.

    Attributes:
        nodes: how many nodes; one process is one node.
        node_rank: rank of this node, 0..nodes-1.
        process_index: JAX's index of this process.
        node_ranks: node ranks by process index, each once.
        num_slices: slices of the job.
        replication: whether data-parallel replicas stand in for each other, or data are copied.
        data_parallelism: replicas of the state; None where data are copied.
        peer_ranks: the ranks that hold what this node holds.
    """

    nodes: int
    node_rank: int
    process_index: int
    node_ranks: tuple[int, ...]
    num_slices: int
    replication: Literal["replicas", "copies"]
    data_parallelism: int | None
    peer_ranks: tuple[int, ...]


def plan_topology(
    *,
    node_ranks: Sequence[int],
    process_index: int,
    slice_indices: Sequence[int] | None = None,
    num_slices: int | None = None,
    replication: Literal["auto", "replicas", "copies"] = "auto",
    mtc_data_parallelism: int | None = None,
    peers_per_node: int | None = None,
) -> Topology:
    """Plans who holds copies of whose data.

    Args:
        node_ranks: node ranks by process index.
        process_index: this process.
        slice_indices: the slice of each process, by process index; None: one slice.
        num_slices: overrides the slices of the devices: process indices are then cut into this
            many equal runs. None, 0 and less: as `slice_indices` says.
        replication: "auto" takes replicas where there are several of them.
        mtc_data_parallelism: replicas of the state; None, 0 and less: one a slice.
        peers_per_node: copies of each node's data where data are copied; None: 1.

    Raises:
        TopologyError: numbers that do not fit each other.
    """
    nodes = len(node_ranks)
    _check_ranks(node_ranks, process_index)
    slices = _slices(nodes, slice_indices, num_slices)
    replicas = mtc_data_parallelism if (mtc_data_parallelism or 0) > 0 else len(slices)
    assert replicas is not None
    by_replica = replication == "replicas" or (replication == "auto" and replicas > 1)
    rank = node_ranks[process_index]
    if by_replica:
        order = [process for members in slices for process in members]
        _check_replicas(nodes, len(slices), replicas)
        _check_columns([node_ranks[process] for process in order], replicas)
        peers = _twins(rank, nodes, replicas)
    else:
        peers = _copy_peers(rank, nodes, peers_per_node)
    return Topology(
        nodes=nodes,
        node_rank=rank,
        process_index=process_index,
        node_ranks=tuple(node_ranks),
        num_slices=len(slices),
        replication="replicas" if by_replica else "copies",
        data_parallelism=replicas if by_replica else None,
        peer_ranks=peers,
    )


def from_jax(
    config: CheckpointConfig, node_ranks_by_process: Callable[[float], Sequence[int]]
) -> Topology:
    """Plans the topology of the running job. Call on every process, after `initialize`.

    Args:
        config: `num_slices`, `replication`, `mtc_data_parallelism`, `peers_per_node` and
            `timeout_secs` are used.
        node_ranks_by_process: given a limit in seconds, returns the distributed process ids by
            process index: JAX may number processes otherwise than the replicator numbers nodes.

    Raises:
        TopologyError: numbers that do not fit each other.
        WaitTimeoutError: a process did not tell its rank in time.
    """
    # Imported late: importing jax takes a second, and planning does without.
    import jax

    slice_of = {d.process_index: getattr(d, "slice_index", 0) for d in jax.devices()}
    return plan_topology(
        node_ranks=tuple(node_ranks_by_process(config.timeout_secs)),
        process_index=jax.process_index(),
        slice_indices=[slice_of.get(index, 0) for index in range(jax.process_count())],
        num_slices=config.num_slices,
        replication=config.replication,
        mtc_data_parallelism=config.mtc_data_parallelism,
        peers_per_node=config.peers_per_node,
    )


def replicator_settings(config: CheckpointConfig, topology: Topology) -> dict[str, Any]:
    """The keys of ``replicator.yaml`` in their order."""
    parallelism = topology.data_parallelism
    minutes = config.multi_tier_checkpointing_backup_interval_minutes
    steps = config.multi_tier_checkpointing_backup_interval_steps
    settings: Mapping[str, Any] = {
        "job-name": config.run_name,
        "framework": "orbax",
        "assume-data-parallelism": parallelism,
        "node-rank": topology.node_rank,
        "nodes": topology.nodes,
        "peer-ranks": list(topology.peer_ranks),
        "backup-interval-minutes": minutes,
        "backup-interval-steps": steps,
    }
    return {key: value for key, value in settings.items() if value is not None}


def _check_ranks(node_ranks: Sequence[int], process_index: int) -> None:
    nodes = len(node_ranks)
    if nodes == 0 or not 0 <= process_index < nodes:
        raise TopologyError(f"process index {process_index} is not one of {nodes} processes")
    if sorted(node_ranks) != list(range(nodes)):
        raise TopologyError(
            f"node ranks by process index must be 0..{nodes - 1}, each once, found"
            f" {list(node_ranks)}: two pods share a rank or one is left from an earlier run"
        )


def _slices(
    nodes: int, slice_indices: Sequence[int] | None, num_slices: int | None
) -> list[list[int]]:
    """Process indices by slice, in order: all slices equally long."""
    if num_slices is not None and num_slices > 0:
        if nodes % num_slices:
            raise TopologyError(
                f"{nodes} nodes cannot be divided into {num_slices} slices (num_slices)"
            )
        length = nodes // num_slices
        return [list(range(i * length, (i + 1) * length)) for i in range(num_slices)]
    indices = [0] * nodes if slice_indices is None else list(slice_indices)
    if len(indices) != nodes:
        raise TopologyError(f"{len(indices)} slice indices for {nodes} nodes")
    slices = [[p for p in range(nodes) if indices[p] == i] for i in sorted(set(indices))]
    lengths = [len(members) for members in slices]
    if len(set(lengths)) > 1:
        raise TopologyError(f"slices must have equally many nodes, found {lengths}: set num_slices")
    return slices


def _check_replicas(nodes: int, num_slices: int, replicas: int) -> None:
    if replicas < 2:
        raise TopologyError(
            "replication='replicas' needs 2 replicas or more, found 1"
            f" ({num_slices} slice(s)): set mtc_data_parallelism, or use replication='copies'"
        )
    if nodes % replicas:
        raise TopologyError(
            f"{nodes} nodes cannot be divided into {replicas} replicas (mtc_data_parallelism)"
        )
    if replicas % num_slices and num_slices % replicas:
        raise TopologyError(
            f"{replicas} replicas (mtc_data_parallelism) over {num_slices} slices: a replica must"
            " be a part of one slice or several whole slices"
        )


def _check_columns(ranks: Sequence[int], replicas: int) -> None:
    """Refuses ranks that the replicator would take for other replicas than JAX does.

    The replicator's grid is rank = row * (nodes / replicas) + column; nodes of one column stand in
    for each other. `ranks` are in the order of the mesh: replica by replica, place by place.
    """
    width = len(ranks) // replicas
    for place in range(width):
        twins = ranks[place::width]
        if len({rank % width for rank in twins}) > 1:
            raise TopologyError(
                f"the nodes at place {place} of the {replicas} replicas have ranks {list(twins)},"
                f" which the replicator does not take for twins (equal modulo {width}), so it"
                " would restore other data: use replication='copies'"
            )


def _twins(rank: int, nodes: int, replicas: int) -> tuple[int, ...]:
    width = nodes // replicas
    return tuple(other for other in range(rank % width, nodes, width) if other != rank)


def _copy_peers(rank: int, nodes: int, peers_per_node: int | None) -> tuple[int, ...]:
    """The nodes that get a copy: half the cluster away first, further ones spread evenly.

    The same distances for every rank, so each node receives as many copies as it sends. Half the
    cluster away: either half alone then holds everything.
    """
    count = 1 if peers_per_node is None else peers_per_node
    if count < 1 or count >= max(nodes, 2):
        raise TopologyError(
            f"peers_per_node={count} with {nodes} nodes: must be 1 or more and below the nodes"
        )
    if nodes == 1:
        return ()
    half = nodes // 2
    others = [distance for distance in range(1, nodes) if distance != half]
    further = [others[(2 * i + 1) * len(others) // (2 * (count - 1))] for i in range(count - 1)]
    return tuple((rank + distance) % nodes for distance in (half, *further))
