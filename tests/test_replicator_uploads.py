"""The embedded replicator's backups when Cloud Storage answers badly, for a while or for good."""

from __future__ import annotations

import asyncio
import random
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec.config
import gcs_server
import gcsfs
import gcsfs.retry
import pytest
from gcs_proxy import LIST, Fault, FaultyProxy
from replicator_cluster import EmbeddedCluster, Job, eventually

from mtcheckpoint._replicator.backup import retried

pytestmark = pytest.mark.extended

SWAP = [[1], [0]]
UPLOAD = "/upload/"
DATA, META = b".data/", b".meta"
STALL_SECONDS = 5.0

PASSING: dict[str, dict[str, Any]] = {
    "429": {"status": 429},
    "500": {"status": 500},
    "503": {"status": 503},
    "reset": {"harm": "reset"},
    "lost reply": {"harm": "lose"},
    "cut reply": {"harm": "cut"},
    "corrupted": {"harm": "corrupt"},
    "stalled": {"delay_secs": STALL_SECONDS},
    "403 for a moment": {"status": 403},
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with gcs_server.running_server() as url:
        yield url


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """gcsfs waits for half a minute between its six tries; here for a twentieth of that."""
    shortened = types.SimpleNamespace(**vars(asyncio))
    shortened.sleep = lambda seconds: asyncio.sleep(seconds / 20)
    monkeypatch.setattr(gcsfs.retry, "asyncio", shortened)
    limited = {**fsspec.config.conf.get("gcs", {}), "requests_timeout": STALL_SECONDS / 2}
    monkeypatch.setitem(fsspec.config.conf, "gcs", limited)
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield
    gcsfs.GCSFileSystem.clear_instance_cache()


class Backups:
    """A cluster of two whose bucket is behind a proxy with faults."""

    def __init__(self, root: Path, server: str, proxy: str, patch: pytest.MonkeyPatch) -> None:
        self._server = server
        for name, value in gcs_server.environment(proxy).items():
            patch.setenv(name, value)
        self.bucket = gcs_server.make_bucket(server)
        self.cluster = EmbeddedCluster(root, 2, backup_url=f"gs://{self.bucket}")
        self.job = Job(self.cluster.volumes, peers=SWAP)

    def names(self) -> list[str]:
        return gcs_server.object_names(self._server, self.bucket)

    def metas(self) -> set[str]:
        return {Path(name).name for name in self.names() if name.endswith(".meta")}

    def wanted(self, step: int) -> set[str]:
        return {self.job.share(step, rank).meta for rank in range(2)}

    def back_up(self, step: int) -> None:
        self.cluster.let_backup_interval_pass()
        self.job.commit(step)


@pytest.mark.parametrize("what", ["data", "meta"])
@pytest.mark.parametrize("fault", PASSING)
def test_an_upload_is_tried_again(
    volume_root: Path, server: str, monkeypatch: pytest.MonkeyPatch, fault: str, what: str
) -> None:
    body = DATA if what == "data" else META
    harm = Fault(path=UPLOAD, method="POST", body=body, times=2, **PASSING[fault])
    with FaultyProxy(server, harm) as proxy:
        backups = Backups(volume_root, server, proxy.url, monkeypatch)
        with backups.cluster.replicator:
            backups.job.handshake()
            backups.back_up(5)
            eventually(lambda: backups.metas() == backups.wanted(5), "the backup")
            assert harm.hits == 2
            for rank in range(2):
                assert "backup" not in backups.job.errors(rank)
                backups.job.wipe(rank)
            # What is there is whole: it is fetched, with its checksums, from empty memory.
            backups.job.handshake()
            assert [backups.job.restored_step(rank) for rank in range(2)] == [5, 5]


@pytest.mark.parametrize("what", ["data", "meta"])
def test_a_refusal_that_stays_leaves_no_valid_backup_and_stops_nothing(
    volume_root: Path, server: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    body = DATA if what == "data" else META
    harm = Fault(path=UPLOAD, method="POST", body=body, status=403)
    with FaultyProxy(server, harm) as proxy:
        backups = Backups(volume_root, server, proxy.url, monkeypatch)
        job = backups.job
        with backups.cluster.replicator:
            job.handshake()
            backups.back_up(5)
            replicator = backups.cluster.replicator
            eventually(lambda: replicator.replicated_step == 5, "step 5")
            job.commit(6)
            eventually(lambda: replicator.replicated_step == 6, "step 6, meanwhile")

            def told() -> bool:
                backups.cluster.clock.advance(0.5)
                return all("backup" in job.errors(rank) for rank in range(2))

            eventually(told, "the report")
            assert backups.metas() == set()
            job.save(7)
            harm.times = harm.hits  # allowed again
            backups.back_up(8)
            eventually(lambda: backups.metas() == backups.wanted(8), "the next backup")


FETCHES = [
    *(("list", fault) for fault in ("429", "503", "reset", "cut reply", "stalled")),
    *(("data", fault) for fault in ("429", "503", "reset", "cut reply", "corrupted", "stalled")),
]


@pytest.mark.parametrize(("what", "fault"), FETCHES)
def test_a_fetch_is_tried_again(
    volume_root: Path, server: str, monkeypatch: pytest.MonkeyPatch, fault: str, what: str
) -> None:
    path = LIST if what == "list" else r"\.data.*alt=media|/download/.*\.data"
    harm = Fault(path=path, method="GET", times=0, **PASSING[fault])
    with FaultyProxy(server, harm) as proxy:
        backups = Backups(volume_root, server, proxy.url, monkeypatch)
        with backups.cluster.replicator:
            backups.job.handshake()
            backups.back_up(5)
            eventually(lambda: backups.metas() == backups.wanted(5), "the backup")
            for rank in range(2):
                backups.job.wipe(rank)
            harm.times = 2
            backups.job.handshake()
            assert [backups.job.restored_step(rank) for rank in range(2)] == [5, 5]
        assert harm.hits == 2


def test_pauses_grow_are_jittered_and_end() -> None:
    pauses: list[float] = []

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += max(seconds, 1e-6)

    clock = Clock()
    begun = [0.0]

    def fail() -> None:
        pauses.append(clock.now - begun[0])
        begun[0] = clock.now
        raise OSError("no")

    random.seed(7)
    with pytest.raises(OSError, match="no"):
        retried(fail, clock, lambda: None)
    between = pauses[1:]
    assert len(between) == 4
    for number, pause in enumerate(between):
        assert 0.25 * 2**number <= pause <= 0.5 * 2**number + 0.1
    assert len({round(pause / 2**number, 6) for number, pause in enumerate(between)}) == 4
