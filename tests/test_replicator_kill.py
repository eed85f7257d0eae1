"""The replicator as a process of its own, killed at any moment and started again."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from replicator_cluster import Job, eventually, names
from shares import commit_step

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint._handshake import files

RING = [[1], [2], [0]]
# A share large enough to be caught while it is hashed and copied: nothing to compress.
LARGE = random.Random(0).randbytes(200_000).hex()

_SCRIPT = """
import sys
from mtcheckpoint._replicator.main import run
backup, *directories = sys.argv[1:]
sys.exit(run(directories, backup, False, 30.0))
"""


class ReplicatorProcess:
    """The replicator's command on some directories."""

    def __init__(self, root: Path) -> None:
        self.volumes = [root / f"node{index}" for index in range(3)]
        self.backup = root / "backup"
        self._log = root / "replicator.log"
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = [sys.executable, "-c", _SCRIPT, str(self.backup), *map(str, self.volumes)]
        self._starts += 1
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(arguments, stdout=log, stderr=log)
        eventually(self._is_up, "the replicator to start")

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        return self.log().count("serving") == self._starts

    def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(timeout=30)

    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
def replicator(volume_root: Path) -> Iterator[ReplicatorProcess]:
    replicator = ReplicatorProcess(volume_root)
    try:
        replicator.start()
        yield replicator
    finally:
        replicator.end(signal.SIGKILL)


def any_name(job: Job, pattern: str) -> bool:
    return any(list(volume.glob(pattern)) for volume in job.volumes)


def newest_complete_step(job: Job) -> int:
    """What the volumes together still hold, read the slow way."""
    found: dict[int, dict[int, str]] = {}
    for volume in job.volumes:
        for path in volume.glob("*.meta"):
            share = files.parse_share_name(path.name, "meta")
            found.setdefault(share.step, {})[share.node_rank] = path.read_text()
    data = {path.name.removesuffix(".data") for v in job.volumes for path in v.glob("*.data")}
    whole = [s for s, digests in found.items() if len(digests) == 3 and data >= {*digests.values()}]
    return max(whole)


MOMENTS: dict[str, Callable[[Job], bool]] = {
    "committed": lambda job: True,
    "being hashed": lambda job: any_name(job, "*.save"),
    "hashed on one node": lambda job: any_name(job, "*-s2-*.meta"),
    "being copied": lambda job: any_name(job, "*.data.*tmp"),
    "all have taken it": lambda job: all(
        job.share(2, rank).meta in job.metas(rank) for rank in range(3)
    ),
    "replicated": lambda job: job.holds_only(0, 2),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_a_step_is_taken(replicator: ReplicatorProcess, moment: str) -> None:
    job = Job(replicator.volumes, peers=RING)
    job.handshake()
    job.save(1)
    for rank, volume in enumerate(job.volumes):
        commit_step(volume, 2, f"{rank}{LARGE}")
    # What is past when it is looked for leaves step 2 alone, which is a moment too.
    wait_for(
        lambda: MOMENTS[moment](job) or job.holds_only(0, 2) or None,
        Deadline.after(30),
        moment,
        poll_seconds=0.0005,
    )
    replicator.end(signal.SIGKILL)
    expected = newest_complete_step(job)

    replicator.start()
    job.handshake()

    for rank, volume in enumerate(job.volumes):
        assert job.restored_step(rank) == expected
        assert expected in (1, 2)
        left = {name for name in names(volume) if name.endswith((".tmp", ".save")) or name == "2"}
        assert left == set()
    job.save(3)


def test_killed_before_it_answers(replicator: ReplicatorProcess) -> None:
    job = Job(replicator.volumes, peers=RING)
    job.handshake()
    job.save(1)
    job.write_yaml(0)
    job.write_yaml(1)
    eventually(lambda: not (job.volumes[1] / files.REPLICATOR_YAML).exists(), "two to be taken")
    replicator.end(signal.SIGKILL)
    replicator.start()

    job.handshake()

    assert [job.restored_step(rank) for rank in range(3)] == [1, 1, 1]


def test_killed_while_training_goes_on_waits_for_a_restart(replicator: ReplicatorProcess) -> None:
    job = Job(replicator.volumes, peers=RING)
    job.handshake()
    job.save(1)
    replicator.end(signal.SIGKILL)
    replicator.start()
    job.commit(2)

    for rank in range(3):
        eventually(lambda r=rank: "Restart the job" in job.errors(r), "the report")
        assert job.metas(rank) == job.expected_metas(rank, 1)

    job.handshake()
    assert [job.restored_step(rank) for rank in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_it_cleanly(replicator: ReplicatorProcess, number: signal.Signals) -> None:
    job = Job(replicator.volumes, peers=RING)
    job.handshake()
    job.save(1)

    assert replicator.end(number) == 0

    log = replicator.log()
    assert "step 1 is replicated" in log
    assert log.rstrip().endswith("stopped")
    assert "Traceback" not in log
