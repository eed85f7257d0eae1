"""Restores against those of Orbax's manager, and against reading the same bytes raw."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import restoring_jobs as jobs
from benchmarks import timing
from benchmarks.agreement import TOPICS
from benchmarks.results import Case, Result, Settings
from benchmarks.sides import JOB
from mtcheckpoint._handshake import files
from mtcheckpoint.testing import ram_disk, run_processes

__all__ = ["CASES"]

_TESTS = Path(__file__).parents[1] / "tests"
_LIMIT_SECONDS = 1800.0
_DEVICES = 4
_DATED = "2026-01-02_03-04"


def restore_vs_orbax_replicator(settings: Settings) -> Result:
    """On the same mesh: everything lies in the own volume."""
    return timing.result_of(
        "restore_vs_orbax_replicator",
        _same(settings),
        "orbax",
        f"{_setting(settings)}, same mesh; from the question for the newest step to arrays on the"
        " devices, ours verified",
    )


def restore_vs_raw_tmpfs(settings: Settings) -> Result:
    """The share of the speed of plain reads."""
    return timing.result_of(
        "restore_vs_raw_tmpfs",
        _same(settings),
        "raw",
        f"{_setting(settings)}, same mesh; raw: each process reads files with its shards into fresh"
        " memory by readinto, with as many threads as it has cores",
    )


def restore_other_mesh(settings: Settings) -> Result:
    """From blocks to columns: half of what a process needs lies at its peer."""
    with ram_disk("mtcheckpoint-bench-") as root:
        _run(jobs.save, 2, str(root), settings.size_bytes, "blocks")
        told = _run(jobs.reshard, 2, str(root), settings.size_bytes, settings.pairs)
    return timing.result_of(
        "restore_other_mesh",
        _times(told),
        "same",
        f"{_setting(settings)}, from 2 by 2 blocks to 4 columns, half of it from the peer over"
        f" HTTP, against the restore into blocks; read: {_tiers(told)}",
    )


def elastic_restore(settings: Settings) -> Result:
    """4 nodes to 2, which hold copies of the shares of those that are gone."""
    with ram_disk("mtcheckpoint-bench-") as root:
        four, two = root / "four", root / "two"
        _run(jobs.save, 4, str(four), settings.size_bytes, "rows")
        for rank in range(4):
            _take(four, rank)
        for rank in (2, 3):
            _move(four, rank, to=rank - 2)
        _run(jobs.save, 2, str(two), settings.size_bytes, "rows")
        told = _run(jobs.elastic, 2, str(four), str(two), settings.size_bytes, settings.pairs)
    for process in told:
        assert set(process["topics"]) == TOPICS, set(process["topics"]) ^ TOPICS
    return timing.result_of(
        "elastic_restore",
        _times(told),
        "same",
        f"{settings.size_mib} MiB, 4 processes to 2, half of it from the peer over HTTP, against"
        f" 2 to 2 on the same mesh; read: {_tiers(told)}",
    )


def backup_restore(settings: Settings) -> Result:
    """Memory is gone; from Cloud Storage, a server on loopback."""
    gcs_server = _gcs_server()
    with ram_disk("mtcheckpoint-bench-") as root, gcs_server.running_server() as server:
        bucket = gcs_server.make_bucket(server)
        _run(jobs.save, 2, str(root), settings.size_bytes, "rows")
        names = [_take(root, rank) for rank in range(2)]
        os.environ.update(jobs.environment(server))
        _upload(root, bucket, server)
        objects = gcs_server.object_names(server, bucket)
        urls = [
            [jobs.object_url(server, bucket, o) for o in objects if f"/{name}/" in o and "/d/" in o]
            for name in names
        ]
        with ram_disk("mtcheckpoint-bench-") as empty:
            told = _run(
                jobs.backup,
                2,
                str(empty),
                f"gs://{bucket}",
                urls,
                settings.size_bytes,
                settings.pairs,
            )
    return timing.result_of(
        "backup_restore",
        _times(told),
        "raw",
        f"{_setting(settings)} from a Cloud Storage server on loopback; raw: its objects by plain"
        f" requests, {jobs.PARALLEL_REQUESTS} at a time in each process; read: {_tiers(told)}",
    )


CASES: dict[str, Case] = {
    "restore_vs_orbax_replicator": restore_vs_orbax_replicator,
    "restore_vs_raw_tmpfs": restore_vs_raw_tmpfs,
    "restore_other_mesh": restore_other_mesh,
    "elastic_restore": elastic_restore,
    "backup_restore": backup_restore,
}


# Running.


@functools.cache
def _same(settings: Settings) -> timing.Told:
    """One run of all sides in turns, which several cases look at."""
    with ram_disk("mtcheckpoint-bench-") as root:
        told = _run(jobs.same, 2, str(root), settings.size_bytes, settings.pairs)
    assert all(set(process["bytes_by_tier"]) == {"local"} for process in told)
    return _times(told)


def _run(target: Any, processes: int, *arguments: Any) -> list[Any]:
    return run_processes(
        target,
        processes,
        devices=_DEVICES // processes,
        args=arguments,
        timeout_secs=_LIMIT_SECONDS,
    )


def _setting(settings: Settings) -> str:
    return f"{settings.size_mib} MiB, 2 processes of {_DEVICES // 2} devices"


def _times(told: Sequence[dict[str, Any]]) -> timing.Told:
    return [process["times"] for process in told]


def _tiers(told: Sequence[dict[str, Any]]) -> str:
    """What our side read, in all processes."""
    tiers: dict[str, int] = {}
    for process in told:
        for tier, count in process["bytes_by_tier"].items():
            tiers[tier] = tiers.get(tier, 0) + count
    return ", ".join(f"{count / 2**20:.0f} MiB {tier}" for tier, count in sorted(tiers.items()))


# What a replicator makes of the shares, without one.


def _take(root: Path, rank: int) -> str:
    """Names a node's share as a replicator does; returns the name of its data."""
    volume = _volume(root, rank)
    _, name = _named(rank)
    (volume / str(jobs.STEP)).rename(volume / name)
    _write_meta(volume, rank)
    return name


def _move(root: Path, rank: int, *, to: int) -> None:
    """The share as a copy in another node's volume."""
    _, name = _named(rank)
    (_volume(root, rank) / name).rename(_volume(root, to) / name)
    _write_meta(_volume(root, to), rank)


def _volume(root: Path, rank: int) -> Path:
    return root / f"node{rank}" / "ours"


def _write_meta(volume: Path, rank: int) -> None:
    digest, _ = _named(rank)
    share = files.ShareName(job=JOB, step=jobs.STEP, node_rank=rank)
    (volume / share.meta).write_text(digest)


def _named(rank: int) -> tuple[str, str]:
    digest = f"{rank:x}" * 64
    return digest, files.data_name(digest)


def _upload(root: Path, bucket: str, server: str) -> None:
    import fsspec

    remote = fsspec.filesystem("gs", skip_instance_cache=True, endpoint_url=server, token="anon")
    for rank in range(2):
        remote.put(f"{_volume(root, rank)}/", f"{bucket}/{JOB}/{_DATED}/", recursive=True)


def _gcs_server() -> Any:
    """The server that the tests use."""
    if str(_TESTS) not in sys.path:
        sys.path.append(str(_TESTS))
    return importlib.import_module("gcs_server")
