"""Planning at the scale of a large cluster, on synthetic inventories and shardings: no files."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.results import Case, Pair, Result, Settings, compared, memory_bytes
from mtcheckpoint._choice import Choice, VolumeSummary, choose
from mtcheckpoint._restore import Box, Chunk, LeafPlan, chunks_touching, plan_leaf
from mtcheckpoint._shares.layout import Layout, ranks_to_open

__all__ = ["CASES"]

LIMIT_SECONDS = 5.0
LIMIT_BYTES = 2**30

_NODES = 4096
_LEAVES = 2000
_DEVICES = 8  # of a node
_CHUNK = 64  # elements along each sharded dimension
_STEPS = (1000, 1010)


# What a cluster holds.


def summaries(nodes: int) -> Iterator[VolumeSummary]:
    """The volumes of a cluster: own shares of two steps, and copies for the node opposite.

    One node in sixteen did not change since an earlier step, so that its shares do not say which
    save they belong to; some lie where an older topology left them.
    """
    for rank in range(nodes):
        opposite = (rank + nodes // 2) % nodes
        shares = [
            (step, "" if of % 16 == 3 else f"{step:032x}", of, nodes, _digest(step, of))
            for step in _STEPS
            for of in (rank, opposite)
        ]
        if rank % 8 == 0:
            old = (900, f"{900:032x}", rank // 8, max(nodes // 8, 1), _digest(900, rank // 8))
            shares.append(old)
        yield VolumeSummary(
            node_rank=rank,
            shares=tuple(shares),
            metas=tuple((step, of, digest) for step, _, of, _, digest in shares),
            digests=tuple(sorted(digest for *_, digest in shares)),
        )


def _digest(step: int, rank: int) -> str:
    # As poorly compressible as a hash is.
    return (
        f"D{(step * 1_000_003 + rank) * 0x9E3779B97F4A7C15 % 2**63:016x}"
        + (f"{(step + rank * 7919) ** 11 % 2**192:048x}"[:47])
    )


# What was saved.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """How one kind of leaf is sharded: the parts that each dimension is cut into."""

    axes: tuple[tuple[str, ...], ...]

    def grid(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(_product(sizes[axis] for axis in part) for part in self.axes)


# Fully sharded both ways, copies over the data axis, and copies everywhere.
_KINDS = (
    _Kind(axes=(("data", "fsdp"), ("tensor",))),
    _Kind(axes=(("tensor",), ("fsdp", "data"))),
    _Kind(axes=(("fsdp",), ("tensor",))),
    _Kind(axes=((), ())),
)
_SHARES_OF_KINDS = (0, 0, 0, 1, 1, 1, 2, 2, 3, 3)


def _product(numbers: Any) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def _mesh_sizes(nodes: int) -> dict[str, int]:
    data = 16 if nodes % 16 == 0 else 1
    return {"data": data, "fsdp": nodes // data, "tensor": _DEVICES}


def _sharding(kind: _Kind, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Orbax's description, which names every device of the job."""
    devices: Any = [{"id": device} for device in range(_product(sizes.values()))]
    for size in reversed([*sizes.values()][1:]):
        devices = [devices[at : at + size] for at in range(0, len(devices), size)]
    return {
        "sharding_type": "NamedSharding",
        "shape": list(sizes.values()),
        "axis_names": list(sizes),
        "partition_spec": [list(part) or None for part in kind.axes],
        "device_mesh": {"mesh": devices},
    }


def _held(kind: _Kind, sizes: Mapping[str, int], rank: int) -> frozenset[Chunk]:
    """The chunks in a rank's share, one for each different part on its devices."""
    return frozenset(_chunk(kind, sizes, rank * _DEVICES + device) for device in range(_DEVICES))


def _chunk(kind: _Kind, sizes: Mapping[str, int], device: int) -> Chunk:
    place = {}
    for axis, size in reversed([*sizes.items()]):
        device, place[axis] = divmod(device, size)
    chunk = []
    for part in kind.axes:
        index = 0
        for axis in part:
            index = index * sizes[axis] + place[axis]
        chunk.append(index)
    return tuple(chunk)


def _boxes(kind: _Kind, old: Mapping[str, int], new: Mapping[str, int], rank: int) -> list[Box]:
    """What a rank's devices need when the job comes back on another mesh."""
    shape = [parts * _CHUNK for parts in kind.grid(old)]
    parts = kind.grid(new)
    found = set()
    for device in range(_DEVICES):
        chunk = _chunk(kind, new, rank * _DEVICES + device)
        sizes = [extent // count for extent, count in zip(shape, parts, strict=True)]
        found.add(
            tuple((at * size, (at + 1) * size) for at, size in zip(chunk, sizes, strict=True))
        )
    return sorted(found)


# Planning: what one process does between the inventories and the first byte.


def plan_at_scale(nodes: int, leaves: int) -> dict[str, Any]:
    """Plans a restore on half the nodes; returns seconds by phase, and what was planned."""
    told = [json.dumps(summary.to_json()) for summary in summaries(nodes)]
    old, new = _mesh_sizes(nodes), _mesh_sizes(nodes // 2)
    kinds = [_KINDS[_SHARES_OF_KINDS[leaf % len(_SHARES_OF_KINDS)]] for leaf in range(leaves)]
    shardings = {kind: _sharding(kind, old) for kind in _KINDS}
    needed = {kind: _boxes(kind, old, new, rank=1) for kind in _KINDS}
    devices = [list(range(rank * _DEVICES, (rank + 1) * _DEVICES)) for rank in range(nodes)]

    begun = time.perf_counter()
    choice = choose(
        [VolumeSummary.from_json(json.loads(text)) for text in told],
        nodes=nodes // 2,
        replicas=None,
    )
    chosen = time.perf_counter()
    layout = Layout(devices, ranks=range(nodes))
    opened: dict[int, Sequence[frozenset[Chunk]]] = {}
    to_open: Any = {1}  # what lies in the own volume
    rounds = 0
    while to_open:
        for rank in to_open:
            opened[rank] = [_held(kind, old, rank) for kind in kinds]
        plans = _planned(kinds, needed, list(opened.values()))
        missing = {
            leaf: (shardings[kind], plan.missing)
            for leaf, (kind, plan) in enumerate(zip(kinds, plans, strict=True))
            if plan.missing
        }
        closed = frozenset(range(nodes)) - opened.keys()
        to_open = ranks_to_open(missing.values(), layout, closed=closed, turn=1)
        rounds += 1
    planned = time.perf_counter()
    _check(choice, kinds, plans, needed, nodes)
    return {
        "choose_seconds": chosen - begun,
        "plan_seconds": planned - chosen,
        "peak_bytes": memory_bytes("VmHWM"),
        "opened": len(opened),
        "rounds": rounds,
        "chunks": sum(len(plan.sources) for plan in plans),
    }


def _planned(
    kinds: Sequence[_Kind],
    needed: Mapping[_Kind, Sequence[Box]],
    held: Sequence[Sequence[frozenset[Chunk]]],
) -> list[LeafPlan]:
    chunks = {
        kind: {chunk for box in boxes for chunk in chunks_touching(box, (_CHUNK, _CHUNK))}
        for kind, boxes in needed.items()
    }
    return [
        plan_leaf(chunks[kind], [share[leaf] for share in held]) for leaf, kind in enumerate(kinds)
    ]


def _check(
    choice: Choice,
    kinds: Sequence[_Kind],
    plans: Sequence[LeafPlan],
    needed: Mapping[_Kind, Sequence[Box]],
    nodes: int,
) -> None:
    """That the plan is right; a fast wrong one is worth nothing."""
    newest = choice.saves[0]
    assert (newest.step, newest.nodes, newest.gone) == (_STEPS[-1], nodes, ())
    assert choice.offered is None  # another topology: it is read before the handshake
    for kind, plan in zip(kinds, plans, strict=True):
        area = sum(_product(stop - start for start, stop in box) for box in set(needed[kind]))
        assert not plan.missing
        assert len(plan.sources) * _CHUNK**2 == area


def plan_scale(settings: Settings) -> Result:
    """Planning for a cluster of 4,096 nodes, 2,000 leaves and 8 shards a node, on one core."""
    nodes, leaves = _NODES, _LEAVES
    runs = [_in_a_process(nodes, leaves) for _ in range(min(settings.pairs, 3))]
    pairs = [Pair(run["choose_seconds"] + run["plan_seconds"], LIMIT_SECONDS) for run in runs]
    peak = max(run["peak_bytes"] for run in runs)
    last = runs[-1]
    described = len(json.dumps(_sharding(_KINDS[0], _mesh_sizes(nodes))))
    assert peak <= LIMIT_BYTES, f"peak memory {peak} bytes, at most {LIMIT_BYTES} allowed"
    return compared(
        "plan_scale",
        pairs,
        f"{nodes} nodes to {nodes // 2}, {leaves} leaves, {_DEVICES} shards a node, one core;"
        f" other: the limit. choose {last['choose_seconds']:.2f} s, plan"
        f" {last['plan_seconds']:.2f} s, peak {peak / 2**20:.0f} of {LIMIT_BYTES / 2**20:.0f} MiB;"
        f" {last['chunks']} chunks from {last['opened']} shares in {last['rounds']} rounds."
        f" Not counted: reading the description of the mesh, {described / 2**20:.1f} MiB, once in"
        " each share of ours; in Orbax's own once for each leaf",
    )


def _in_a_process(nodes: int, leaves: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planning", str(nodes), str(leaves)],
        check=True,
        capture_output=True,
        text=True,
    )
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


CASES: dict[str, Case] = {"plan_scale": plan_scale}

if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(json.dumps(plan_at_scale(*map(int, sys.argv[1:]))))
