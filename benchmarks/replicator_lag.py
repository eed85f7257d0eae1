"""Seconds from a commit to the copies on all nodes: the embedded replicator against Google's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from benchmarks import replicators, sides
from benchmarks.results import Case, Pair, Result, Settings, compared
from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint._handshake import files
from mtcheckpoint.testing import ram_disk

__all__ = ["CASES"]

_NODES = 2
_ARRAYS = 16  # of a share, so that each is a value of its own in the store
_POLL_SECONDS = 0.001
_LIMIT_SECONDS = 300.0
# Google's mounts its peers after its answer, and then begins to watch.
_SETTLE_SECONDS = 3.0


def replicator_lag(settings: Settings) -> Result:
    """Shares of a whole state."""
    return _result("replicator_lag", settings, settings.size_bytes, settings.pairs)


def replicator_lag_small(settings: Settings) -> Result:
    """Small shares: what a step costs before its bytes count."""
    return _result("replicator_lag_small", settings, 1 << 20, 2 * settings.pairs)


CASES: dict[str, Case] = {
    "replicator_lag": replicator_lag,
    "replicator_lag_small": replicator_lag_small,
}


def _result(case: str, settings: Settings, size_bytes: int, pairs: int) -> Result:
    starts = {kind: replicators.running(kind) for kind in replicators.KINDS}
    with ExitStack() as stack:
        runs = []
        for start in starts.values():
            root = stack.enter_context(ram_disk("mtcheckpoint-bench-"))
            runs.append(_Run(root, stack.enter_context(start(root, _NODES, sides.JOB))))
        seconds = [[run.lag(step, size_bytes // _NODES) for run in runs] for step in _steps(pairs)]
    return compared(
        case,
        [Pair(*both) for both in seconds[1:]],
        f"{size_bytes >> 20} MiB, {_NODES} nodes that copy to each other, on one tmpfs: from the"
        " rename on all nodes until each holds its own and the other's data and .meta; other:"
        " Google's replicator, a process for each node",
    )


def _steps(pairs: int) -> Iterator[int]:
    """One more than measured, which goes before."""
    return iter(range(10, 10 * (pairs + 2), 10))


class _Run:
    """A job's side of one run, on all nodes."""

    def __init__(self, root: Path, settings: dict[str, object]) -> None:
        job = replicators.from_tests("replicator_cluster").Job
        volumes = [root / f"node{rank}" for rank in range(_NODES)]
        peers = [[(rank + 1) % _NODES] for rank in range(_NODES)]
        self._job: Any = job(volumes, name=sides.JOB, peers=peers, settings=settings)
        self._job.handshake()
        self._settled = Deadline.after(_SETTLE_SECONDS)

    def lag(self, step: int, share_bytes: int) -> float:
        """Commits a step of random shares on all nodes; seconds until all copies are there."""
        staged = [
            _write_share(volume / f".staging-{step}", share_bytes, seed=step * _NODES + rank)
            for rank, volume in enumerate(self._job.volumes)
        ]
        wait_for(
            lambda: self._settled.passed() or None,
            Deadline.after(_LIMIT_SECONDS),
            "the replicator to watch",
        )
        begun = time.perf_counter()
        for folder in staged:
            os.rename(folder, folder.parent / str(step))
        wait_for(
            lambda: self._is_everywhere(step) or None,
            Deadline.after(_LIMIT_SECONDS),
            f"all copies of step {step}",
            poll_seconds=_POLL_SECONDS,
        )
        seconds = time.perf_counter() - begun
        self._job.wait_until_only(step)  # the clean-up is not part of it
        return seconds

    def _is_everywhere(self, step: int) -> bool:
        return all(
            self._is_there(volume, meta)
            for rank, volume in enumerate(self._job.volumes)
            for meta in self._job.expected_metas(rank, step)
        )

    def _is_there(self, volume: Path, meta: str) -> bool:
        try:
            digest = (volume / meta).read_text()
        except FileNotFoundError:
            return False
        return (volume / files.data_name(digest)).exists()


def _write_share(folder: Path, size_bytes: int, *, seed: int) -> Path:
    """A share as Orbax lays it out, with about one file for each array."""
    base = folder / "state"
    base.mkdir(parents=True)
    store = ts.KvStore.open(
        {
            "driver": "ocdbt",
            "base": f"file://{base}/",
            "target_data_file_size": size_bytes // _ARRAYS,
        }
    ).result()
    random = np.random.default_rng(seed)
    with ts.Transaction() as transaction:
        bound = store.with_transaction(transaction)
        for number in range(_ARRAYS):
            bound[f"w{number}/c/0"] = random.bytes(size_bytes // _ARRAYS)
    replicators.from_tests("shares").write_commit_time(folder, 1)
    return folder
