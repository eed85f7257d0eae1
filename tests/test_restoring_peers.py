"""Peers that refuse, stall or die while others read from them: bounded, and alike on all."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from aiohttp import web
from jax.sharding import NamedSharding, PartitionSpec
from restoring_clusters import run_job, same
from restoring_jobs import alone, folder, open_manager, outcome, rank, together

from mtcheckpoint import _attempt
from mtcheckpoint._shares.peers import ShareServer
from mtcheckpoint.testing import ProcessGroup, case_mesh, ram_disk, report

pytestmark = pytest.mark.extended

NODES = 2
FAULTY = 1
STEP = 3
# Large enough that its chunks are told from the tables of what is in a file.
SHAPE = (8, 1 << 15)
CHUNK_BYTES = 4 << 15
LIMIT_SECONDS = 6.0


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, list[dict[str, Any]]]]:
    with ram_disk() as root:
        found = run_job(restore_from_faulty_peers, NODES, str(root))
        yield {name: [process[name] for process in found] for name in found[0]}


def test_chunks_are_read_from_a_peer(outcomes: dict[str, Any]) -> None:
    assert same(outcomes["no fault"], "step", "tier") == [STEP, "peer"]


def test_a_peer_that_refuses(outcomes: dict[str, Any]) -> None:
    assert_alike(outcomes["refuses"], "401")


def test_a_peer_that_fails(outcomes: dict[str, Any]) -> None:
    assert_alike(outcomes["fails"], "500")


def test_a_peer_that_sends_half(outcomes: dict[str, Any]) -> None:
    assert_alike(outcomes["sends half"], "'w'")


def test_a_peer_that_stalls(outcomes: dict[str, Any]) -> None:
    """The leaf that was waited for is in the message, on all processes."""
    assert_alike(outcomes["stalls"], "'w'")


def test_process_0_that_stalls(outcomes: dict[str, Any]) -> None:
    """Process 0 collects the answers, and hears what the other one waited for."""
    assert_alike(outcomes["stalls, process 0"], "'w'")


def test_a_peer_that_stalls_while_it_is_looked_into(outcomes: dict[str, Any]) -> None:
    assert_alike(outcomes["stalls in tables"], "no answer in 6 s")


def test_a_peer_that_stalls_at_once(outcomes: dict[str, Any]) -> None:
    assert_alike(outcomes["stalls at once"], "")


def test_afterwards_all_is_well(outcomes: dict[str, Any]) -> None:
    assert same(outcomes["no fault again"], "step", "tier") == [STEP, "peer"]


def assert_alike(found: list[dict[str, Any]], said: str) -> None:
    """All processes failed, in bounded time, and say why."""
    kinds = {"RestoreError", "TierUnreadableError", "WaitTimeoutError"}
    for process in found:
        assert process.get("error") in kinds, process
        assert said in process["message"]
        assert process["took_seconds"] < 4 * LIMIT_SECONDS


def test_a_peer_that_dies() -> None:
    with (
        ram_disk() as root,
        ProcessGroup(save_and_lose_a_peer, NODES, devices=4, args=[str(root)]) as group,
    ):
        group.wait_for("asked for a chunk", rank=FAULTY)
        group.kill(FAULTY)
        survivor = group.wait(120)[1 - FAULTY]
    assert survivor["error"] in {"WaitTimeoutError", "RestoreError", "TierUnreadableError"}
    assert survivor["took_seconds"] < 6 * LIMIT_SECONDS


# In the processes.


class FaultyServer(ShareServer):
    """Does not give what it should, for the chunks or for everything."""

    fault = "no fault"
    faulty = FAULTY

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if rank() == self.faulty:
            if is_of_a_chunk(request):
                report("asked for a chunk")
                await misbehave(self.fault, request)
            if self.fault == "stalls at once":
                await asyncio.sleep(3600)
            if self.fault == "stalls in tables" and "/d/" in request.path:
                await asyncio.sleep(3600)
        return await super()._answer(request)


def is_of_a_chunk(request: web.Request) -> bool:
    span = request.headers.get("Range", "").removeprefix("bytes=").split("-")
    return len(span) == 2 and all(span) and int(span[1]) - int(span[0]) + 1 >= CHUNK_BYTES


async def misbehave(fault: str, request: web.Request) -> None:
    if fault == "refuses":
        raise web.HTTPUnauthorized
    if fault == "fails":
        raise web.HTTPInternalServerError
    if fault == "sends half":
        answer = web.StreamResponse(status=206, headers={"Content-Length": str(CHUNK_BYTES)})
        await answer.prepare(request)
        await answer.write(bytes(100))
        assert request.transport is not None
        request.transport.close()
    if fault == "stalls":
        await asyncio.sleep(3600)


def replicated_state(value: float) -> Any:
    """Each process holds half of the rows, by the mesh."""
    sharding = NamedSharding(case_mesh(2, 4), PartitionSpec("data"))
    return {"w": jax.jit(lambda: jnp.full(SHAPE, value, jnp.float32), out_shardings=sharding)()}


def save_halves(root: str) -> None:
    with open_manager(alone(root)) as manager:
        assert manager.save(STEP, replicated_state(STEP), force=True)


def restore_whole(root: str, fault: str) -> dict[str, Any]:
    """Restores onto a sharding for which each process needs the other's half."""
    FaultyServer.fault, _, zero = fault.partition(", process ")
    FaultyServer.faulty = 0 if zero else FAULTY
    _attempt.ShareServer = FaultyServer  # type: ignore[misc, attr-defined]
    whole = NamedSharding(case_mesh(2, 4), PartitionSpec())
    target = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=whole)}

    def attempt() -> dict[str, Any]:
        with open_manager(alone(root, timeout_secs=LIMIT_SECONDS)) as manager:
            restored = manager.restore_latest(target)
            assert restored is not None
            assert all(
                (shard.data == STEP).all() for shard in restored.state["w"].addressable_shards
            )
            return {"step": restored.step, "tier": restored.tier}

    return outcome(attempt)


def restore_from_faulty_peers(root: str) -> dict[str, Any]:
    save_halves(f"{root}/saved")
    stalls = ("stalls", "stalls, process 0", "stalls in tables", "stalls at once")
    faults = ("no fault", "refuses", "fails", "sends half", *stalls)
    found = {}
    for fault in (*faults, "no fault again"):
        place = f"{root}/{fault.replace(' ', '-')}"
        shutil.copytree(folder(f"{root}/saved"), folder(place))
        together(fault)
        found[fault] = restore_whole(place, fault)
        # One may be done before the other has given up.
        together(f"after {fault}")
    return found


def save_and_lose_a_peer(root: str) -> dict[str, Any]:
    save_halves(root)
    return restore_whole(root, "stalls")
