"""The demo, as people run it: once from start to end, and once interrupted."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint._demo.screen import rendered, sparkline
from mtcheckpoint._demo.summary import checkpoint_distances, summary_tables
from mtcheckpoint._demo.view import NodeView, Recovery, View

# Well under two minutes on two idle cores; this is for machines that have much else to do.
LIMIT_SECONDS = 300.0
MEMORY = Path("/dev/shm")


class Demo:
    """A running demo whose folders are its own to make, so that what it leaves can be seen."""

    def __init__(self, root: Path, *arguments: str) -> None:
        self.folders = root / "folders"
        self.folders.mkdir()
        self.output = root / "output.txt"
        with open(self.output, "wb") as output:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "mtcheckpoint", "demo", *arguments],
                env={**os.environ, "TMPDIR": str(self.folders), "COLUMNS": "80"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text()

    def children(self) -> list[int]:
        """The processes that the demo has started."""
        path = Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def wait_for_text(self, text: str) -> None:
        def look() -> bool | None:
            assert self.child.poll() is None, self.text()
            return text in self.text() or None

        wait_for(look, Deadline.after(LIMIT_SECONDS), repr(text))

    def wait_until_ended(self) -> None:
        wait_for(
            self.child.poll,
            Deadline.after(LIMIT_SECONDS),
            "the end of the demo",
            missing=lambda: [f"what it has said so far:\n{self.text()}"],
        )

    def left_behind(self) -> list[str]:
        """Folders and files of the demo that are still there."""
        in_memory = MEMORY.glob(f"mtcheckpoint-demo-{self.child.pid}-*")
        return [str(path) for path in (*in_memory, *self.folders.iterdir())]


@pytest.mark.timeout(360)
def test_the_job_comes_back_from_every_loss(tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    demo = Demo(tmp_path, "--json", str(result_file))
    try:
        demo.wait_until_ended()
    finally:
        _end(demo)
    assert demo.child.returncode == 0, demo.text()
    result = json.loads(result_file.read_text())

    assert set(result) == {"ok", "recoveries", "checkpoint_interval_p50_steps"}
    assert result["ok"] is True
    assert isinstance(result["checkpoint_interval_p50_steps"], float)
    assert 1 <= result["checkpoint_interval_p50_steps"] < 100
    found = [(r["scenario"], r["tier"]) for r in result["recoveries"]]
    assert found == [
        ("process-killed", "local"),
        ("node-lost", "peer"),
        ("all-memory-lost", "backup"),
    ]
    for recovery in result["recoveries"]:
        assert set(recovery) == {
            "scenario",
            "last_committed_step",
            "restored_step",
            "tier",
            "state_matches",
            "recovery_seconds",
        }
        assert recovery["state_matches"] is True
        assert type(recovery["restored_step"]) is type(recovery["last_committed_step"]) is int
        assert 0 < recovery["restored_step"] <= recovery["last_committed_step"]
        assert 0 < recovery["recovery_seconds"] < 90
    restored = [r["restored_step"] for r in result["recoveries"]]
    assert restored == sorted(restored), "the job fell back behind an earlier recovery"

    lines = demo.text().splitlines()
    assert max(map(len, lines)) <= 80, "wider than a terminal"
    assert len(lines) < 40, "not quiet"
    assert not [
        line for line in lines if "WARNING" in line or "ERROR" in line or "Traceback" in line
    ]
    assert demo.left_behind() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    demo = Demo(tmp_path)
    try:
        demo.wait_for_text("starting")
        wait_for(
            lambda: len(demo.children()) == 4 or None,
            Deadline.after(LIMIT_SECONDS),
            "its four processes",
        )
        workers = demo.children()
        assert demo.left_behind(), "the test would see nothing"
        os.kill(demo.child.pid, number)
        assert demo.child.wait(30) == 128 + number
    finally:
        _end(demo)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert demo.left_behind() == []
    assert "Traceback" not in demo.text()


def _end(demo: Demo) -> None:
    if demo.child.poll() is None:
        demo.child.terminate()  # so that a failed test leaves no folders
        demo.child.wait(LIMIT_SECONDS)


# What is shown, without a job.


def view(step: int | None) -> View:
    nodes = [
        NodeView(
            rank=rank,
            state="training" if step else "starting",
            step=step,
            saved_step=step,
            held={rank: step, (rank + 2) % 4: step} if step else {},
        )
        for rank in range(4)
    ]
    return View(
        act="training, until all nodes are lost",
        seconds=3599.0,
        nodes=nodes,
        losses=[4.0 - 0.001 * i for i in range(3000)] if step else [],
        backup_step=step,
    )


@pytest.mark.parametrize("step", [None, 123_456])
def test_live_view_fits_80_columns(step: int | None) -> None:
    text = shown(rendered(view(step)))
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 12
    assert (f"own share {step}" in text) == (step is not None)


def test_a_step_counts_as_replicated_when_every_node_has_a_copy() -> None:
    assert view(7).replicated_step == 7
    assert view(None).replicated_step is None
    nodes = list(view(7).nodes)
    behind = dataclasses.replace(nodes[3], held={3: 7, 1: 4})
    assert dataclasses.replace(view(7), nodes=[*nodes[:3], behind]).replicated_step == 4
    alone = dataclasses.replace(nodes[3], held={3: 7})
    assert dataclasses.replace(view(7), nodes=[*nodes[:3], alone]).replicated_step is None


def test_summary_fits_80_columns_and_names_the_fixed_period() -> None:
    recovery = Recovery(
        scenario="all-memory-lost",
        reached_step=123_456,
        last_committed_step=123_450,
        restored_step=123_400,
        tier="backup",
        expected_tier="backup",
        state_matches=False,
        recovery_seconds=123.4,
    )
    text = shown(summary_tables([recovery] * 3, [2, 4, 6]))
    assert max(map(len, text.splitlines())) <= 80
    assert "DIFFER" in text
    assert "4 steps" in text and "2 steps" in text
    assert "100 steps" in text and "50 steps" in text


def shown(renderable: RenderableType) -> str:
    output = io.StringIO()
    Console(file=output, width=80).print(renderable)
    return output.getvalue()


def test_distances_do_not_reach_over_a_restart() -> None:
    assert checkpoint_distances([[2, 5, 9], [], [6, 7]]) == [3, 4, 1]


def test_sparkline_evens_out_what_is_too_long() -> None:
    assert sparkline([1.0]) == "▁"
    assert sparkline([3.0, 2.0, 1.0], width=3) == "█▄▁"
    assert len(sparkline([float(i) for i in range(1000)], width=40)) == 40
