"""The demo, as people run it: once from start to end, and once interrupted."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console, RenderableType

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint._demo.interrupts import Interrupts
from mtcheckpoint._demo.job import Job
from mtcheckpoint._demo.ledger import Ledger, differences
from mtcheckpoint._demo.screen import PlainScreen, rendered, sparkline
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
        # Each process' devices hold what two did before, one of them on the other node.
        ("cluster-shrunk", "peer"),
        ("cluster-grown", "peer"),
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


@pytest.mark.timeout(360)
def test_survivors_that_do_not_hold_everything_use_the_backup_and_say_what_is_gone() -> None:
    """Nodes 0 and 2 hold each other's copies; of their shares nothing is left."""
    with Interrupts() as interrupts, Job(interrupts) as job:
        job.start()
        watch(job, lambda: job.has_backup and job.saves >= 3, "a backup")
        job.end()
        for rank in (0, 2):
            job.wipe(rank)
        job.start(2)
        watch(job, lambda: job.is_compared, "the comparison")
        assert (job.tier, job.state_matches) == ("backup", True)
        assert job.restored_step is not None and job.restored_step > 0
        # The very newest may lack other shares too, of processes that had not finished it.
        reasons = [reason for _, reason in job.passed_over]
        assert any("the shares of its ranks 0, 2 are gone" in reason for reason in reasons), reasons


def watch(job: Job, condition: Callable[[], bool], what: str) -> None:
    def look() -> bool | None:
        job.check()
        return condition() or None

    wait_for(look, Deadline.after(LIMIT_SECONDS), what)


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
        act="5/5 lost nodes 2 and 3 and their memory: starting again",
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
    gone = dataclasses.replace(nodes[3], state="gone", held={})
    assert dataclasses.replace(view(7), nodes=[*nodes[:3], gone]).replicated_step == 7


def test_summary_fits_80_columns_and_names_the_fixed_period() -> None:
    recovery = Recovery(
        scenario="all-memory-lost",
        reached_step=123_456,
        last_committed_step=123_450,
        restored_step=123_400,
        tier="backup",
        expected_tiers=("backup",),
        state_matches=False,
        recovery_seconds=123.4,
    )
    text = shown(summary_tables([recovery] * 5, [2, 4, 6]))
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


# The ledger, which the demo's word depends on.


def mesh_of(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, ("data", "model"))


def state_on(mesh: Mesh, **changed: float) -> dict[str, Any]:
    """A matrix split over both axes, a vector that is replicated over one, and a scalar."""
    specs = {"w": ("data", "model"), "v": ("data",), "count": ()}
    values = {"w": np.arange(32.0).reshape(4, 8), "v": np.arange(4.0), "count": np.array(3.0)}
    for name, value in changed.items():
        values[name].flat[-1] = value
    return {
        name: jax.device_put(values[name], NamedSharding(mesh, PartitionSpec(*spec)))
        for name, spec in specs.items()
    }


def test_ledger_compares_across_meshes(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.write(1, 5, 0, state_on(mesh_of(4, 2)))
    saved = ledger.read(1, 5)
    for sizes in ((4, 2), (2, 2), (1, 4), (1, 1)):
        mesh = mesh_of(*sizes)
        assert differences(saved, state_on(mesh), mesh) == []
        for name in ("w", "v", "count"):
            (wrong,) = differences(saved, state_on(mesh, **{name: -1.0}), mesh)
            assert name in wrong


def test_ledger_sees_what_is_missing_or_was_never_written_down(tmp_path: Path) -> None:
    mesh = mesh_of(4, 2)
    ledger = Ledger(tmp_path)
    ledger.write(1, 5, 0, {"w": state_on(mesh)["w"]})
    assert len(differences(ledger.read(1, 5), state_on(mesh), mesh)) == 2
    assert len(differences(ledger.read(1, 6), state_on(mesh), mesh)) == 3
    halved = {"['w']": dict(list(ledger.read(1, 5)["['w']"].items())[:4])}
    (wrong,) = differences(halved, {"w": state_on(mesh)["w"]}, mesh)
    assert "no process wrote down" in wrong


def test_ledger_sees_one_wrong_copy_of_a_replicated_part(tmp_path: Path) -> None:
    mesh = mesh_of(4, 2)
    ledger = Ledger(tmp_path)
    good = {"v": state_on(mesh)["v"]}
    ledger.write(1, 5, 0, good)
    parts = [shard.data for shard in good["v"].addressable_shards]
    parts[3] = parts[3] + 1
    bad = jax.make_array_from_single_device_arrays((4,), good["v"].sharding, parts)
    assert differences(ledger.read(1, 5), {"v": bad}, mesh)


def test_long_lines_are_wrapped_beside_the_clock() -> None:
    output = io.StringIO()
    PlainScreen(Console(file=output, width=80)).say("passed over: " + "a reason, " * 20, 61.0)
    first, *others = output.getvalue().splitlines()
    assert first.startswith("1:01  passed over") and len(others) >= 2
    assert all(line.startswith(" " * 6) and line.strip() for line in others)
    assert max(map(len, [first, *others])) <= 80
