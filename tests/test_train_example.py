"""The example: killed at any moment and started again, it does what it would have done anyway."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mtcheckpoint import EmbeddedReplicator
from mtcheckpoint._clock import Deadline, wait_for

EXAMPLE = Path(__file__).parents[1] / "examples" / "train.py"
PROCESSES = 2
STEPS = 400
LIMIT_SECONDS = 90.0


class Run:
    """One start of the example on all nodes, with the logs of earlier starts going on."""

    def __init__(self, root: Path, process_count: int, *flags: str) -> None:
        coordinator = f"127.0.0.1:{_free_port()}"
        self._logs = [root / f"log-{rank}.jsonl" for rank in range(process_count)]
        self._outputs = [root / f"output-{rank}.txt" for rank in range(process_count)]
        several = [f"--coordinator_address={coordinator}", f"--num_processes={process_count}"]
        self._children = [
            _start(
                [
                    f"--local_checkpoint_directory={root / f'node-{rank}'}",
                    f"--log={self._logs[rank]}",
                    *(([*several, f"--process_id={rank}"]) if process_count > 1 else []),
                    *flags,
                ],
                self._outputs[rank],
            )
            for rank in range(process_count)
        ]

    def logged(self, rank: int) -> list[dict[str, Any]]:
        """The whole lines of a process's log; a kill can cut the last one short."""
        text = self._logs[rank].read_text() if self._logs[rank].exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def output(self, rank: int) -> str:
        return self._outputs[rank].read_text()

    def wait_until_logged(self, lines: int) -> None:
        def look() -> bool | None:
            assert all(child.poll() is None for child in self._children), self.output(0)
            return len(self.logged(0)) >= lines or None

        wait_for(look, Deadline.after(LIMIT_SECONDS), f"{lines} lines in the log")

    def finish(self) -> None:
        for rank, child in enumerate(self._children):
            assert child.wait(LIMIT_SECONDS) == 0, self.output(rank)

    def kill(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            child.wait()


@contextlib.contextmanager
def running(root: Path, process_count: int, *flags: str) -> Iterator[Run]:
    run = Run(root, process_count, *flags)
    try:
        yield run
    finally:
        run.kill()


def _start(flags: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    with open(output, "ab") as file:
        return subprocess.Popen(
            [sys.executable, str(EXAMPLE), "--run_name=example", f"--steps={STEPS}", *flags],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def nodes_under(root: Path) -> list[Path]:
    nodes = [root / f"node-{rank}" for rank in range(PROCESSES)]
    for node in nodes:
        node.mkdir(parents=True)
    return nodes


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The logs of a run that nothing happens to."""
    root = tmp_path_factory.mktemp("uninterrupted")
    interval = "--multi_tier_checkpointing_backup_interval_minutes=30"
    with EmbeddedReplicator(nodes_under(root)), running(root, PROCESSES, interval) as run:
        run.finish()
        return [run.logged(rank) for rank in range(PROCESSES)]


def test_uninterrupted_run_is_whole(uninterrupted: list[list[dict[str, Any]]]) -> None:
    for log in uninterrupted:
        assert [line["step"] for line in log] == list(range(STEPS))
        assert len({line["batch"] for line in log[:64]}) == 64
        assert log[-1]["loss"] < log[0]["loss"]
    first, second = ([line["batch"] for line in log] for log in uninterrupted)
    assert not set(first) & set(second), "two processes trained on the same batch"


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_run_goes_on_as_if_nothing_had_happened(
    uninterrupted: list[list[dict[str, Any]]], volume_root: Path, seed: int
) -> None:
    interval = "--multi_tier_checkpointing_backup_interval_minutes=30"
    killed_after = random.Random(seed).randint(100, STEPS - 50)
    with EmbeddedReplicator(nodes_under(volume_root)):
        with running(volume_root, PROCESSES, interval) as run:
            run.wait_until_logged(killed_after)
            run.kill()
            before = [run.logged(rank) for rank in range(PROCESSES)]
        for rank in range(PROCESSES):
            _drop_cut_line(volume_root / f"log-{rank}.jsonl")
        with running(volume_root, PROCESSES, interval) as run:
            run.finish()
            for rank in range(PROCESSES):
                resumed = run.logged(rank)[len(before[rank]) :]
                restored_step = resumed[0]["step"] - 1
                assert 0 <= restored_step <= before[rank][-1]["step"]
                assert f"restored step {restored_step} from local" in run.output(rank)
                # Batch, loss and every byte of the state, step by step to the end.
                kept = before[rank][: restored_step + 1]
                assert kept + resumed == uninterrupted[rank]


def test_one_process_without_a_replicator_resumes(volume_root: Path) -> None:
    (volume_root / "node-0").mkdir()
    flags = ("--enable_replicator=false", "--max_num_checkpoints_to_keep=2")
    with running(volume_root, 1, *flags) as run:
        run.wait_until_logged(100)
        run.kill()
    _drop_cut_line(volume_root / "log-0.jsonl")
    with running(volume_root, 1, *flags) as run:
        run.finish()
        steps = [line["step"] for line in run.logged(0)]
        resumed_at = next(i for i in range(1, len(steps)) if steps[i] != steps[i - 1] + 1)
        assert steps[resumed_at] > 0
        assert steps[resumed_at:] == list(range(steps[resumed_at], STEPS))
        assert str(STEPS - 1) in os.listdir(volume_root / "node-0")


def _drop_cut_line(path: Path) -> None:
    whole, newline, _ = path.read_bytes().rpartition(b"\n")
    path.write_bytes(whole + newline)
