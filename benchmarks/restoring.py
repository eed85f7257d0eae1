"""Restores against reading the same bytes raw, in the same processes and in turns."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import restoring_jobs as jobs
from benchmarks.agreement import TOPICS
from benchmarks.results import Case, Pair, Result, Settings, compared
from mtcheckpoint._handshake import files
from mtcheckpoint.testing import ram_disk, run_processes

__all__ = ["CASES"]

_TESTS = Path(__file__).parents[1] / "tests"
_LIMIT_SECONDS = 900.0
_DEVICES = 4
_DATED = "2026-01-02_03-04"


def restore_same(settings: Settings) -> Result:
    """On the same mesh: everything lies in the own volume."""
    with ram_disk("mtcheckpoint-bench-") as root:
        _run(jobs.save, 2, str(root), settings.size_bytes, "rows")
        raw = {"folders": [[f"node{rank}/{jobs.STEP}/state"] for rank in range(2)]}
        told = _restore(root, settings, "rows", raw)
    return _result("restore_same", settings, told, "2 processes, same mesh; raw: own files")


def restore_other_mesh(settings: Settings) -> Result:
    """From blocks to columns: half of what a process needs lies at its peer."""
    with ram_disk("mtcheckpoint-bench-") as root:
        _run(jobs.save, 2, str(root), settings.size_bytes, "blocks")
        both = [f"node{rank}/{jobs.STEP}/state" for rank in range(2)]
        told = _restore(root, settings, "columns", {"folders": [both, both]})
    return _result(
        "restore_other_mesh",
        settings,
        told,
        "2 processes, from 2 by 2 blocks to 4 columns, half of it from the peer over HTTP; raw: as"
        " many bytes, from files only",
    )


def restore_fewer(settings: Settings) -> Result:
    """4 nodes to 2, which hold copies of the shares of those that are gone."""
    with ram_disk("mtcheckpoint-bench-") as root:
        _run(jobs.save, 4, str(root), settings.size_bytes, "rows")
        data = {rank: root / f"node{rank}" / _take(root, rank) for rank in range(4)}
        for rank in (2, 3):
            _move(data[rank], rank, root / f"node{rank - 2}")
        # The process needs the shares of two ranks: one lies here, one at its peer.
        here = [f"node{rank}/{data[rank].name}/state" for rank in range(2)]
        there = [f"node{rank - 2}/{data[rank].name}/state" for rank in (2, 3)]
        told = _restore(root, settings, "rows", {"folders": [here, there]})
    for process in told:
        assert set(process["topics"]) == TOPICS, set(process["topics"]) ^ TOPICS
    return _result(
        "restore_fewer",
        settings,
        told,
        "4 processes to 2, half of it from the peer over HTTP; raw: as many bytes, from files only",
    )


def restore_backup(settings: Settings) -> Result:
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
            told = _restore(empty, settings, "rows", {"urls": urls}, f"gs://{bucket}")
    return _result(
        "restore_backup",
        settings,
        told,
        "2 processes from a Cloud Storage server on loopback; raw: its objects by plain requests",
    )


CASES: dict[str, Case] = {
    "restore_same": restore_same,
    "restore_other_mesh": restore_other_mesh,
    "restore_fewer": restore_fewer,
    "restore_backup": restore_backup,
}


# Running.


def _run(target: Any, processes: int, *arguments: Any) -> list[Any]:
    return run_processes(
        target,
        processes,
        devices=_DEVICES // processes,
        args=arguments,
        timeout_secs=_LIMIT_SECONDS,
    )


def _restore(
    root: Path, settings: Settings, layout: str, raw: dict[str, Any], backup_root: str = ""
) -> list[dict[str, Any]]:
    return _run(
        jobs.restore,
        2,
        str(root),
        settings.size_bytes,
        layout,
        settings.pairs,
        raw,
        backup_root,
    )


def _result(case: str, settings: Settings, told: Sequence[dict[str, Any]], notes: str) -> Result:
    # A job goes on when its slowest process does.
    pairs = [
        Pair(max(ours for ours, _ in pair), max(raw for _, raw in pair))
        for pair in zip(*(process["times"] for process in told), strict=True)
    ]
    peak = max(process["peak_over_state"] for process in told)
    tiers: dict[str, int] = {}
    for process in told:
        for tier, count in process["bytes_by_tier"].items():
            tiers[tier] = tiers.get(tier, 0) + count
    read = ", ".join(f"{count / 2**20:.0f} MiB {tier}" for tier, count in sorted(tiers.items()))
    return compared(
        case,
        pairs,
        f"{settings.size_mib} MiB, {notes}; read: {read}; peak memory {peak:.2f} times the part of"
        " the state",
    )


# What a replicator makes of the shares, without one.


def _take(root: Path, rank: int) -> str:
    """Names a node's share as a replicator does; returns the name of its data."""
    volume = root / f"node{rank}"
    _, name = _named(rank)
    (volume / str(jobs.STEP)).rename(volume / name)
    _write_meta(volume, rank)
    return name


def _move(data: Path, rank: int, volume: Path) -> None:
    """The share as a copy in another volume."""
    data.rename(volume / data.name)
    _write_meta(volume, rank)


def _write_meta(volume: Path, rank: int) -> None:
    digest, _ = _named(rank)
    share = files.ShareName(job=jobs.JOB, step=jobs.STEP, node_rank=rank)
    (volume / share.meta).write_text(digest)


def _named(rank: int) -> tuple[str, str]:
    digest = f"{rank:x}" * 64
    return digest, files.data_name(digest)


def _upload(root: Path, bucket: str, server: str) -> None:
    import fsspec

    remote = fsspec.filesystem("gs", skip_instance_cache=True, endpoint_url=server, token="anon")
    for rank in range(2):
        remote.put(f"{root}/node{rank}/", f"{bucket}/{jobs.JOB}/{_DATED}/", recursive=True)


def _gcs_server() -> Any:
    """The server that the tests use."""
    if str(_TESTS) not in sys.path:
        sys.path.append(str(_TESTS))
    return importlib.import_module("gcs_server")
