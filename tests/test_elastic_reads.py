"""What a restore reads, and from where: what this process's devices need, up to whole chunks."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import elastic_jobs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_orbax_interop as interop
from aiohttp import web
from elastic_jobs import JOB, Run, lay_out
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from replicator_cluster import eventually
from restoring_clusters import run_job, same, start_replicator, wait_until_held
from restoring_jobs import alone as alone_here
from restoring_jobs import open_manager, outcome, together
from synthetic_saves import SyntheticSave
from test_elastic_memory import contents, size_bytes

import mtcheckpoint as mtc
from mtcheckpoint._shares.peers import ShareServer
from mtcheckpoint.testing import ram_disk

MIB = 1 << 20
STEP = 5


def large_save() -> SyntheticSave:
    """16 MiB over eight devices of four processes, 1 MiB that all have, and small things."""
    count = np.arange(4 * MIB, dtype=np.float32)
    return SyntheticSave(
        job=JOB,
        step=STEP,
        values={
            "w": count.reshape(4096, 1024),
            "b": count[: MIB // 4] + 1,
            "h": np.arange(64).astype(jnp.bfloat16),
            "zeros": np.zeros((8, 8), np.float32),
        },
        specs={"w": (("data",), ("model",)), "b": ((),), "h": ((),), "zeros": (("data",), ())},
        mesh={"data": 4, "model": 2},
        ranks=4,
    )


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Two processes: one has the shares of ranks 0 and 2, the other those of 1 and 3."""
    with ram_disk() as root:
        for rank, share in enumerate(large_save().write(root / "shares")):
            lay_out(share, f"{root}/node{rank % 2}", step=STEP, node_rank=rank)
        found = run_job(read_parts, 2, str(root))
        yield {name: [process[name] for process in found] for name in found[0]}


def test_half_of_the_rows_each(outcomes: dict[str, Any]) -> None:
    """Each needs two shares, of which it has one; what all shares have is read at home."""
    for process in outcomes["halves"]:
        small = 64 * 2 + 2 * 2 * 8 * 4
        assert process["bytes"]["peer"] == 4 * MIB + 2 * 8 * 4
        assert process["bytes"]["local"] == 4 * MIB + MIB + small - 2 * 8 * 4
        assert_counted(process, local=5 * MIB, peer=4 * MIB)


def test_everything_on_each(outcomes: dict[str, Any]) -> None:
    """Replicated leaves are read once per process, not once per device."""
    for process in outcomes["replicated"]:
        assert_counted(process, local=9 * MIB, peer=8 * MIB)


def assert_counted(process: dict[str, Any], *, local: int, peer: int) -> None:
    """What peers sent, and what this process read from files, counted beside the report."""
    assert peer <= process["sent"] <= peer + MIB // 2
    read = process["read_from_files"] - process["sent"]
    assert local <= read <= local + 2 * MIB
    for tier, expected in (("local", local), ("peer", peer)):
        assert expected <= process["bytes"][tier] <= expected + 1024


def test_a_part_of_the_tree_reads_that_part(outcomes: dict[str, Any]) -> None:
    for process in outcomes["part"]:
        assert process["bytes"] == {"local": MIB}
        assert process["sent"] == 0
        assert process["read_from_files"] <= 3 * MIB


def test_zeros_stay_zeros_and_a_lost_chunk_is_an_error(outcomes: dict[str, Any]) -> None:
    assert same(outcomes["halves"], "zeros") is True
    found = outcomes["a share gone"]
    assert same(found, "error") == "RestoreError"
    assert "the shares of its ranks 3 are gone" in found[0]["message"]
    assert "chunk" in found[0]["message"]


def test_other_element_types_only_as_allowed(outcomes: dict[str, Any]) -> None:
    assert "safe" in same(outcomes["widened, never"], "message")
    assert same(outcomes["widened, safe"], "dtype", "equal") == ["float32", True]
    assert "lossy" in same(outcomes["narrowed, safe"], "message")
    assert same(outcomes["narrowed, lossy"], "dtype", "equal") == ["bfloat16", True]


def read_parts(root: str) -> dict[str, Any]:
    sent = count_sent_bytes()
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))

    def read(tree: Any, **options: Any) -> dict[str, Any]:
        together(str(len(root)))
        sent.clear()
        with open_manager(alone_here(root), mesh) as manager:
            before = read_bytes()
            restored = manager.restore_latest(tree, **options)
            assert restored is not None
            found = {
                "bytes": dict(restored.report.bytes_by_tier),
                "sent": sum(sent),
                "read_from_files": read_bytes() - before,
                "dtype": str(jax.tree.leaves(restored.state)[0].dtype),
                "equal": all(equal(name, leaf) for name, leaf in restored.state.items()),
            }
            if "zeros" in restored.state:
                found["zeros"] = equal("zeros", restored.state["zeros"])
        assert found["equal"]
        return found

    def wanted(spec: PartitionSpec, **dtypes: Any) -> dict[str, jax.ShapeDtypeStruct]:
        values = large_save().values
        return {
            name: jax.ShapeDtypeStruct(
                value.shape,
                dtypes.get(name, value.dtype),
                sharding=NamedSharding(mesh, spec if value.ndim == 2 else PartitionSpec()),
            )
            for name, value in values.items()
            if not dtypes or name in dtypes
        }

    rows, nothing = PartitionSpec("data", "model"), PartitionSpec()
    wide, narrow = wanted(nothing, h=jnp.float32), wanted(nothing, b=jnp.bfloat16)
    found = {
        "halves": outcome(lambda: read(wanted(PartitionSpec("data", None)))),
        "replicated": outcome(lambda: read(wanted(nothing))),
        "part": outcome(lambda: read(wanted(rows, b=jnp.float32), partial=True)),
    }
    for name, tree, cast in (
        ("widened, never", wide, "never"),
        ("widened, safe", wide, "safe"),
        ("narrowed, safe", narrow, "safe"),
        ("narrowed, lossy", narrow, "lossy"),
    ):
        found[name] = outcome(lambda t=tree, c=cast: read(t, partial=True, cast=c))
    together("before the loss")
    if elastic_jobs.rank() == 1:
        name = f"{elastic_jobs.digest_for(STEP, 3)}.data"
        shutil.rmtree(Path(root) / "node1" / name)
    together("after the loss")
    found["a share gone"] = outcome(lambda: read(wanted(rows)))
    return found


def equal(name: str, found: jax.Array) -> bool:
    value = large_save().values[name].astype(found.dtype)
    return all(
        np.array_equal(np.asarray(shard.data), value[shard.index])
        for shard in found.addressable_shards
    )


def read_bytes() -> int:
    """Bytes that this process has read from files; those from sockets are not among them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def count_sent_bytes() -> list[int]:
    """Has the server of shares note how much each answer holds."""
    sent: list[int] = []
    answer = ShareServer._answer

    async def counting(self: ShareServer, request: web.Request) -> web.StreamResponse:
        response = await answer(self, request)
        assert isinstance(response, web.FileResponse)
        size = response._path.stat().st_size
        start, stop, _ = request.http_range.indices(size)
        sent.append(stop - start)
        return response

    ShareServer._answer = counting
    return sent


# A part of the tree, and a restore in the middle of a run, opposite a replicator.

ALONE = Run(hosts=[0], mesh=[2, 4], steps=[1, 2])


def test_a_part_of_the_tree_leaves_the_handshake_to_the_first_save(volume_root: Path) -> None:
    volume = volume_root / "node0"
    with start_replicator("embedded", volume_root, 1) as cluster:
        elastic_jobs.train(str(volume_root), dataclasses.asdict(ALONE))
        cluster.replicator.stop()
        before = sorted(path.name for path in volume.iterdir())
        mesh = elastic_jobs.mesh_of(ALONE)
        with mtc.ReplicatedCheckpointManager(
            elastic_jobs.settings(str(volume_root), ALONE), mesh=mesh
        ) as manager:
            # Nobody would answer a handshake now.
            target = {"w": elastic_jobs.target_of(ALONE)["w"]}
            restored = manager.restore_latest(target, partial=True)
            assert restored is not None and restored.step == 2
            assert sum(restored.report.bytes_by_tier.values()) == 16 * 32 * 2
            assert sorted(path.name for path in volume.iterdir()) == before
            cluster.restart()
            assert manager.save(3, elastic_jobs.state_of(ALONE, 3), force=True)
        assert list(volume.glob("*.restore"))


def test_a_restore_in_the_middle_of_a_run_keeps_no_memory(volume_root: Path) -> None:
    volume = volume_root / "node0"
    with start_replicator("embedded", volume_root, 1):
        with mtc.ReplicatedCheckpointManager(
            elastic_jobs.settings(str(volume_root), ALONE), mesh=elastic_jobs.mesh_of(ALONE)
        ) as manager:
            assert manager.restore_latest(elastic_jobs.target_of(ALONE)) is None
            elastic_jobs.save(manager, ALONE)
            restored = manager.restore_latest(elastic_jobs.target_of(ALONE))
            assert restored is not None
            elastic_jobs.check(ALONE, restored.state, restored.step)
            assert not (volume / "mtcheckpoint.pinned").exists()
            elastic_jobs.save(manager, dataclasses.replace(ALONE, steps=[3, 4]))
        wait_until_held([volume], 4, [[0]])
        eventually(lambda: len(list(volume.glob("*.data"))) == 1, "the older share to go")
        # Whatever lies there, held fast or not, against the one share that should.
        everything = sum(p.stat().st_size for p in volume.rglob("*") if p.is_file())
        assert everything <= 1.1 * size_bytes(volume)
        assert contents(volume)


# Shares that Orbax's own manager has written.


@pytest.fixture(scope="module")
def orbax_root() -> Iterator[Path]:
    with ram_disk() as root:
        run_job(orbax_saves, 2, str(root))
        yield root


def test_one_process_restores_what_orbax_saved_with_two(orbax_root: Path, tmp_path: Path) -> None:
    for rank in range(2):
        share = orbax_root / f"node{rank}" / str(interop.STEP)
        lay_out(share, f"{tmp_path}/node0", step=interop.STEP, node_rank=rank)
    run = Run(hosts=[0], mesh=[8, 1])
    mesh = elastic_jobs.mesh_of(run)
    with mtc.ReplicatedCheckpointManager(
        elastic_jobs.alone(str(tmp_path), run), mesh=mesh
    ) as manager:
        restored = manager.restore_latest(interop.abstract(interop.state(mesh)))
    assert restored is not None
    assert (restored.step, restored.tier) == (interop.STEP, "local")
    assert interop.equal(restored.state, interop.state(mesh))


def test_four_processes_restore_what_orbax_saved_with_two(orbax_root: Path) -> None:
    found = run_job(orbax_restored, 4, str(orbax_root))
    assert same(found, "step", "tier", "equal") == [interop.STEP, "peer", True]


def orbax_saves(root: str) -> None:
    interop.flags.FLAGS(["interop"])
    interop.multihost.initialize_runtime_to_distributed_ids()
    interop.multihost.initialize_distributed_to_device_ids()
    interop.orbax_saves(Path(root), interop.case_mesh())


def orbax_restored(root: str) -> dict[str, Any]:
    return interop.ours_reads(root, interop.case_mesh(4, 2))
