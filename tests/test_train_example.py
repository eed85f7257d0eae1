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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mtcheckpoint import EmbeddedReplicator
from mtcheckpoint._clock import Deadline, wait_for

EXAMPLE = Path(__file__).parents[1] / "examples" / "train.py"
PROCESSES = 2
LIMIT_SECONDS = 90.0
INTERVAL = "--multi_tier_checkpointing_backup_interval_minutes=30"

Log = list[dict[str, Any]]


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

    def logged(self, rank: int) -> Log:
        """The whole lines of a process's log; a kill can cut the last one short."""
        text = self._logs[rank].read_text() if self._logs[rank].exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def output(self, rank: int) -> str:
        return self._outputs[rank].read_text()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        def look() -> bool | None:
            assert all(child.poll() is None for child in self._children), self.output(0)
            return condition() or None

        wait_for(look, Deadline.after(LIMIT_SECONDS), what)

    def wait_for_lines(self, count: int) -> None:
        self.wait_until(lambda: len(self.logged(0)) >= count, f"{count} lines in the log")

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
            [sys.executable, str(EXAMPLE), "--run_name=example", *flags],
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


def test_killed_run_goes_on_as_if_nothing_had_happened(volume_root: Path) -> None:
    killed_root, whole_root = volume_root / "killed", volume_root / "whole"
    before, restored_step, resumed = _killed_and_resumed(killed_root, random.Random(7))
    steps = resumed[0][-1]["step"] + 1
    with (
        EmbeddedReplicator(nodes_under(whole_root)),
        running(whole_root, PROCESSES, INTERVAL, f"--steps={steps}") as run,
    ):
        run.finish()
        whole = [run.logged(rank) for rank in range(PROCESSES)]
    for rank in range(PROCESSES):
        # Batch, loss and every byte of the state, from the first step to the last.
        assert [line["step"] for line in whole[rank]] == list(range(steps))
        assert before[rank][: restored_step + 1] + resumed[rank] == whole[rank]
        assert whole[rank][-1]["loss"] < whole[rank][0]["loss"]
    first, second = ({line["batch"] for line in log} for log in whole)
    assert not first & second, "two processes trained on the same batch"


def _killed_and_resumed(root: Path, chance: random.Random) -> tuple[list[Log], int, list[Log]]:
    """The logs before the kill, the step that came back, and the logs after it."""
    with EmbeddedReplicator(nodes_under(root)) as replicator:
        with running(root, PROCESSES, INTERVAL, "--steps=1000000") as run:
            run.wait_until(lambda: replicator.replicated_step is not None, "a step on all nodes")
            run.wait_for_lines(len(run.logged(0)) + chance.randint(1, 40))
            run.kill()
            before = [run.logged(rank) for rank in range(PROCESSES)]
        for rank in range(PROCESSES):
            _drop_cut_line(root / f"log-{rank}.jsonl")
        reached = max(log[-1]["step"] for log in before)
        with running(root, PROCESSES, INTERVAL, f"--steps={reached + 50}") as run:
            run.finish()
            logs = [run.logged(rank) for rank in range(PROCESSES)]
            resumed = [log[len(early) :] for log, early in zip(logs, before, strict=True)]
            restored_step = int(resumed[0][0]["step"]) - 1
            assert 0 <= restored_step <= reached
            for rank in range(PROCESSES):
                assert f"restored step {restored_step} from local" in run.output(rank)
    return before, restored_step, resumed


def test_one_process_without_a_replicator_resumes(volume_root: Path) -> None:
    node = volume_root / "node-0"
    node.mkdir()
    flags = ("--enable_replicator=false", "--max_num_checkpoints_to_keep=2")
    with running(volume_root, 1, *flags, "--steps=1000000") as run:
        run.wait_until(lambda: any(name.isdigit() for name in os.listdir(node)), "a checkpoint")
        run.kill()
        _drop_cut_line(volume_root / "log-0.jsonl")
        before = run.logged(0)
    last = before[-1]["step"] + 50
    with running(volume_root, 1, *flags, f"--steps={last + 1}") as run:
        run.finish()
        resumed = run.logged(0)[len(before) :]
    restored_step = resumed[0]["step"] - 1
    assert [line["step"] for line in resumed] == list(range(restored_step + 1, last + 1))
    repeated = before[restored_step + 1 :]
    assert resumed[: len(repeated)] == repeated, "steps that were trained twice differ"
    kept = [name for name in os.listdir(node) if name.isdigit()]
    assert str(last) in kept and len(kept) <= 2


def _drop_cut_line(path: Path) -> None:
    whole, newline, _ = path.read_bytes().rpartition(b"\n")
    path.write_bytes(whole + newline)
