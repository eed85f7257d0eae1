"""Buckets and peers that take a request and never answer: a bounded end that says who it was."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import elastic_jobs
import gcs_server
import gcsfs  # noqa: F401 - takes longer than the limits here, and no limit is about that
import hangs_job
import jax
import jax.numpy as jnp
import programs
import pytest
import tensorstore as ts
from elastic_jobs import JOB, Run, lay_out, mesh_of, restore_alone, target_of
from gcs_proxy import LIST, Fault, FaultyProxy
from jax.sharding import NamedSharding, PartitionSpec
from restoring_clusters import run_job, same
from restoring_jobs import alone, environment_of, open_manager, outcome, rank, together
from test_elastic_backups import wait_less

import mtcheckpoint as mtc
from mtcheckpoint import _attempt, _doctor
from mtcheckpoint._shares.places import LocalPlace, PeerPlace
from mtcheckpoint._sources import Sources
from mtcheckpoint._verifying import verify_places
from mtcheckpoint.errors import ShareError
from mtcheckpoint.testing import abstract_state, case_mesh, ram_disk

pytestmark = pytest.mark.extended

NODES = 2
STEP, OLDER_STEP = 4, 3
NEWEST, OLDER = "2031-01-02_00-00", "2031-01-01_00-00"
LIMIT_SECONDS = 2.0
FOR_EVER = 86_400.0

# Large enough that its chunks are told from the tables of what is in a file.
SHAPE = (8, 1 << 15)
CHUNK_BYTES = 4 << 15

# What of the bucket never answers, and what the error says was waited for.
WHAT = {
    "list": (Fault(path=LIST), rf"/{JOB}\): no answer in"),
    "meta": (Fault(path=r"\.meta"), r"\.meta\): no answer in"),
    "share": (Fault(path=r"\.data.*seal"), r"\.data.*no answer in"),
    "tables": (Fault(path=r"\.data.*d%2F"), r"\.data.*no answer in"),
    "data": (Fault(path=r"\.data.*d%2F", least_bytes=CHUNK_BYTES), "for the data of leaf 'w'"),
}
HOSTS = {"all": [0, 1], "one": [1]}
ENDS = ["list", "meta", "data"]
CASES = [(what, hosts) for what in WHAT for hosts in HOSTS]


# What one host gets instead of the right answer, for a moment and for good.
LONGER_SECONDS = 8.0
PASSING = {
    f"{name} twice, {what}": dataclasses.replace(WHAT[what][0], times=2, **harm)
    for what in ("meta", "data")
    for name, harm in {
        "500": {"status": 500},
        "reset": {"harm": "reset"},
        "cut": {"harm": "cut"},
    }.items()
}
STAYING = {
    f"{harm}, {what}": dataclasses.replace(WHAT[what][0], harm=harm)
    for harm, places in {
        "reset": ("list", "meta", "data"),
        "cut": ("list", "meta", "data"),
        "short": ("list", "meta", "data"),
        "corrupt": ("data",),
    }.items()
    for what in places
}
BAD = {**PASSING, **STAYING}


def hosts_of(what: str, hosts: str) -> list[int]:
    """Process 0 is the one that lists."""
    return [0] if what == "list" and hosts == "one" else HOSTS[hosts]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Two backups of two nodes, and a proxy for each way of hanging."""

    root: Path
    url: str
    server: str
    proxies: dict[str, FaultyProxy]


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(ram_disk())
        server = stack.enter_context(gcs_server.running_server())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in gcs_server.environment(server).items():
            patch.setenv(name, value)
        url = f"gs://{gcs_server.make_bucket(server)}"
        run_job(save_large, NODES, str(root))
        for folder, step in ((NEWEST, STEP), (OLDER, OLDER_STEP)):
            for node in range(NODES):
                share = root / f"node{node}" / str(step)
                lay_out(share, f"{url}/{JOB}/{folder}", step=step, node_rank=node)
        proxies = {
            what: stack.enter_context(
                FaultyProxy(server, dataclasses.replace(fault, delay_secs=FOR_EVER))
            )
            for what, (fault, _) in WHAT.items()
        }
        for name, fault in BAD.items():
            proxies[name] = stack.enter_context(FaultyProxy(server, fault))
        yield Bucket(root=root, url=url, server=server, proxies=proxies)


@pytest.fixture(scope="module")
def outcomes(bucket: Bucket) -> dict[str, list[dict[str, Any]]]:
    proxies = {what: proxy.url for what, proxy in bucket.proxies.items()}
    found = run_job(
        restore_from_bucket,
        NODES,
        str(bucket.root / "again"),
        bucket.url,
        bucket.server,
        proxies,
        env=environment_of(bucket.server),
    )
    return {name: [process[name] for process in found] for name in found[0]}


@pytest.mark.parametrize(("what", "hosts"), CASES)
def test_a_bucket_that_never_answers(
    outcomes: dict[str, list[dict[str, Any]]], what: str, hosts: str
) -> None:
    """The same error on all: never a fresh start or an older backup, since nobody knows."""
    found = outcomes[f"{what}, {hosts}"]
    assert same(found, "error") == "TierUnreadableError", found
    for process in found:
        assert re.search(WHAT[what][1], process["message"]), process
        assert "gs://" in process["message"]
        # Two phases before may have taken their time, too; the others wait twice as long.
        assert process["took_seconds"] < 3 * LIMIT_SECONDS + 5, process
    if hosts == "one" and what != "list":
        assert f"process {HOSTS['one'][0]}" in found[0]["message"], found


@pytest.mark.parametrize("name", PASSING)
def test_a_bucket_that_answers_badly_for_a_moment(
    outcomes: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert same(outcomes[name], "step", "tier") == [STEP, "backup"]


@pytest.mark.parametrize("name", STAYING)
def test_a_bucket_that_keeps_answering_badly(
    outcomes: dict[str, list[dict[str, Any]]], name: str
) -> None:
    """An error, or what is whole: the same on all, in bounded time, and never a fresh start.

    What came back was compared element by element, where it is.
    """
    found = outcomes[name]
    for process in found:
        assert process["took_seconds"] < 4 * LONGER_SECONDS + 5, process
    if "error" in found[0]:
        assert same(found, "error") in {"TierUnreadableError", "RestoreError"}
    else:
        assert same(found, "tier") == "backup" and same(found, "step") in (STEP, OLDER_STEP)
    if "corrupt" in name or "short" in name:
        # Only one host saw it; the others went the same way.
        assert "error" in found[0] or same(found, "step") == OLDER_STEP


def test_afterwards_it_is_restored(outcomes: dict[str, list[dict[str, Any]]]) -> None:
    assert same(outcomes["no fault"], "step", "tier") == [STEP, "backup"]


def restore_from_bucket(
    root: str, place: str, server: str, proxies: dict[str, str]
) -> dict[str, Any]:
    Path(root).mkdir(exist_ok=True)
    found = {}
    for what, hosts in [*CASES, ("", "no fault")]:
        hanging = bool(what) and elastic_jobs.rank() in hosts_of(what, hosts)
        url = proxies[what] if hanging else server
        flags = {"backup_root": place}
        if what:
            flags["timeout_secs"] = LIMIT_SECONDS
        name = f"{what}, {hosts}" if what else hosts
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in gcs_server.environment(url).items():
                patch.setenv(variable, value)
            together(name)
            found[name] = restore_outcome(root, flags)
        together(f"after {name}")
    wait_less()
    flags = {"backup_root": place, "timeout_secs": LONGER_SECONDS}
    for name in BAD:
        with pytest.MonkeyPatch.context() as patch:
            hanging = hosts_of(name.rpartition(", ")[2], "one")
            url = proxies[name] if elastic_jobs.rank() in hanging else server
            for variable, value in gcs_server.environment(url).items():
                patch.setenv(variable, value)
            together(name)
            found[name] = restore_outcome(root, flags)
        together(f"after {name}")
    return found


def large_state(value: float) -> Any:
    sharding = NamedSharding(case_mesh(2, 4), PartitionSpec("data"))
    return {"w": jax.jit(lambda: jnp.full(SHAPE, value, jnp.float32), out_shardings=sharding)()}


def save_large(root: str) -> None:
    with open_manager(alone(root)) as manager:
        for step in (OLDER_STEP, STEP):
            assert manager.save(step, large_state(step), force=True)


def restore_outcome(root: str, flags: dict[str, Any]) -> dict[str, Any]:
    def attempt() -> dict[str, Any]:
        with open_manager(alone(root, **flags)) as manager:
            restored = manager.restore_latest(abstract_state(large_state(0)))
            if restored is None:
                return {"step": None}
            for shard in restored.state["w"].addressable_shards:
                assert (shard.data == restored.step).all()
            return {"step": restored.step, "tier": restored.tier}

    return outcome(attempt)


# The commands.


@pytest.mark.parametrize("what", WHAT)
def test_verify_says_what_does_not_answer(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    for variable, value in gcs_server.environment(bucket.proxies[what].url).items():
        monkeypatch.setenv(variable, value)
    begun = time.monotonic()
    verdicts = list(verify_places([f"{bucket.url}/{JOB}/{NEWEST}"], timeout_secs=1.0))
    assert verdicts and {verdict.state for verdict in verdicts} == {"unreadable"}
    assert all("no answer in" in verdict.faults[0] for verdict in verdicts), verdicts
    assert time.monotonic() - begun < 15.0


@pytest.mark.parametrize("path", [LIST, "storageLayout", "/upload/"])
def test_doctor_says_what_does_not_answer(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    with FaultyProxy(bucket.server, Fault(path=path, delay_secs=FOR_EVER)) as proxy:
        for variable, value in gcs_server.environment(proxy.url).items():
            monkeypatch.setenv(variable, value)
        config = mtc.CheckpointConfig(
            backup_root=bucket.url, run_name=JOB, enable_checkpointing=False
        )
        begun = time.monotonic()
        findings = _doctor.check_backup(config, write_test=True, timeout_secs=1.0)
        assert time.monotonic() - begun < 10.0
    worst = [finding for finding in findings if finding.level != "OK"]
    assert worst and all("gs://" in finding.line for finding in worst)
    assert any("no answer" in f.found or "WaitTimeoutError" in f.found for f in worst), worst


# The processes can end.


@pytest.fixture(scope="module")
def jobs(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Two processes for each; all at once, since most of their time passes in waits."""
    started: dict[str, list[tuple[subprocess.Popen[bytes], Path]]] = {}
    try:
        for what in ENDS:
            root, port = tmp_path_factory.mktemp(what), gcs_server._free_port()
            hanging = hosts_of(what, "one")
            started[what] = [
                start(
                    [node, root, port, bucket.url],
                    bucket.proxies[what].url if node in hanging else bucket.server,
                    root / f"output-{node}",
                )
                for node in range(NODES)
            ]
        yield started
    finally:
        for process, _ in itertools.chain.from_iterable(started.values()):
            process.kill()
            process.wait(timeout=30)


def start(words: list[Any], url: str, output: Path) -> tuple[subprocess.Popen[bytes], Path]:
    return programs.start(hangs_job.__file__, words, output, environment_of(url)), output


@pytest.mark.parametrize("what", ENDS)
def test_the_processes_end_with_an_error(jobs: dict[str, Any], what: str) -> None:
    for process, output in jobs[what]:
        code = process.wait(timeout=120 + 6 * programs.LIMIT_SECONDS)
        said = output.read_text()
        assert code == 1, said
        assert "begun" in said and "came back" not in said
        assert "mtcheckpoint.errors.TierUnreadableError: " in said


RETURNS_LATE = """
import sys, time
import jax
from mtcheckpoint import _jax


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)


jax.distributed.initialize("127.0.0.1:" + sys.argv[1], 1, 0, cluster_detection_method="deactivate")
state = _jax.distributed.global_state
client = state.client


def shutdown():
    if state.client is not None:
        client.blocking_key_value_get_bytes("never", 700)


slow = Slow()  # goes when nothing of Python is left, and takes longer than the shutdown
state.shutdown = shutdown
_jax._LEAVE_SECONDS = 0.2
_jax.note_missing(True)
raise SystemExit(3)
"""


def test_a_thread_that_returns_while_python_ends_does_not_abort() -> None:
    """JAX's shutdown that was left behind comes back in the last moment of the process."""
    words = [sys.executable, "-c", RETURNS_LATE, str(gcs_server._free_port())]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3, ended.stderr


# Peers.


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and requests, and says nothing: the kernel does, so nothing is read."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield "http://{}:{}".format(*listening.getsockname()[:2])


def test_several_silent_peers_have_one_limit_together() -> None:
    with silent_server() as url:
        places = {n: [PeerPlace(f"{url}/{n}", "token", LIMIT_SECONDS)] for n in range(4)}
        sources = Sources(
            places, preferred_ranks=[], turn=0, context=ts.Context(), timeout_secs=LIMIT_SECONDS
        )
        begun = time.monotonic()
        with pytest.raises(ShareError) as caught:
            sources.plan(None, mesh_of(Run(hosts=[0], mesh=[2, 4])))
        assert LIMIT_SECONDS <= time.monotonic() - begun < LIMIT_SECONDS + 2
        assert f"{url}/0" in str(caught.value)


def test_a_silent_copy_leaves_time_for_another_one() -> None:
    run = Run(hosts=[0], mesh=[2, 4], steps=[STEP])
    with ram_disk() as root, silent_server() as url:
        elastic_jobs.save_alone(str(root), dataclasses.asdict(run))
        silent = [PeerPlace(f"{url}/{n}", "token", LIMIT_SECONDS) for n in range(2)]
        sources = Sources(
            {0: [*silent, LocalPlace(root / "node0" / str(STEP))]},
            preferred_ranks=[0],
            turn=0,
            context=ts.Context(),
            timeout_secs=LIMIT_SECONDS,
        )
        begun = time.monotonic()
        assert not sources.plan(target_of(run), mesh_of(run)).missing
        assert time.monotonic() - begun < LIMIT_SECONDS
        assert len(sources.faults) == 2


SLOW = 2  # the process to which all peers are silent


def test_the_process_with_silent_peers_says_so_itself() -> None:
    """Not a time-out of the others on it, however many peers it asks one after the other."""
    nodes = 4
    saved = Run(hosts=list(range(nodes)), mesh=[4, 2], steps=[STEP])
    with ram_disk() as root:
        run_job(elastic_jobs.save_alone, nodes, str(root), dataclasses.asdict(saved))
        found = run_job(restore_among_the_silent, nodes, str(root))
    assert same(found, "error") == "RestoreError", found
    for process in found:
        assert f"process {SLOW}" in process["message"]
        assert "http://" in process["message"] and "no answer in" in process["message"]
        assert process["took_seconds"] < 2 * LIMIT_SECONDS + 5


def restore_among_the_silent(root: str) -> dict[str, Any]:
    """Each needs the shares of all others."""
    run = Run(hosts=[0, 1, 2, 3], mesh=[1, 8], flags={"timeout_secs": LIMIT_SECONDS})
    with silent_server() as silent:
        if rank() == SLOW:
            _attempt.PeerPlace = (  # type: ignore[misc, assignment, attr-defined]
                lambda url, *rest: PeerPlace(f"{silent}/{url.rpartition('/')[2]}", *rest)
            )
        found = restore_alone(root, run)
        together("all are done")
    return found
