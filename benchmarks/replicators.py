"""Replicators for the benchmarks: the embedded one and Google's, each in processes of its own."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import NotInstalledError
from mtcheckpoint._clock import Deadline, wait_for

__all__ = ["KINDS", "Start", "from_tests", "running"]

KINDS = ("embedded", "google")

_TESTS = Path(__file__).parents[1] / "tests"
_LIMIT_SECONDS = 60.0

# Starts a replicator for so many nodes below a folder, `node0` and on; the settings that a
# `replicator.yaml` for it needs.
Start = Callable[[Path, int, str], contextlib.AbstractContextManager[dict[str, object]]]


def running(kind: str) -> Start:
    """What starts a replicator of one of the `KINDS`.

    Raises:
        NotInstalledError: Google's, and there is no checkout of it.
    """
    if kind == "embedded":
        return _embedded
    variable = from_tests("google_replicator").SOURCE_VARIABLE
    if variable not in os.environ:
        raise NotInstalledError(
            f"{variable} does not name the sources of Google's replicator"
            " (GoogleCloudPlatform/checkpoint-replicator)"
        )
    return _google


def from_tests(name: str) -> Any:
    """A helper that the tests have."""
    if str(_TESTS) not in sys.path:
        sys.path.append(str(_TESTS))
    return importlib.import_module(name)


@contextlib.contextmanager
def _embedded(root: Path, nodes: int, job: str) -> Iterator[dict[str, object]]:
    folders = [part for rank in range(nodes) for part in ("--node", str(root / f"node{rank}"))]
    with open(root / "replicator.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mtcheckpoint", "replicator", *folders],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_for("serving", root / "replicator.log")
        yield {"backup-interval-minutes": 30}
    finally:
        process.terminate()
        process.wait(_LIMIT_SECONDS)


@contextlib.contextmanager
def _google(root: Path, nodes: int, job: str) -> Iterator[dict[str, object]]:
    with from_tests("google_replicator").google_cluster(root, nodes, job) as cluster:
        wait_for(
            lambda: all(map(cluster._watches, range(nodes))) or None,
            Deadline.after(_LIMIT_SECONDS),
            "Google's replicator to watch its volumes",
        )
        yield cluster.settings()


def _wait_for(word: str, log: Path) -> None:
    wait_for(
        lambda: word in log.read_text() or None,
        Deadline.after(_LIMIT_SECONDS),
        f"the replicator to say {word!r} in {log}",
    )
