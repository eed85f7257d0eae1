"""The harness that the multi-process tests stand on: results, failures, signals, clean-up."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from warm import start_warm

import mtcheckpoint.testing as mtt
from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint.errors import WaitTimeoutError
from mtcheckpoint.testing import _starting


@pytest.fixture(autouse=True, scope="module")
def warm_in_this_environment() -> None:
    """Imports of other tests may have set variables since: then nothing would be forked."""
    start_warm()


# Run in children.


def identity(extra: str) -> dict[str, Any]:
    place = mtt.this_process()
    assert place is not None
    return {
        "rank": place.rank,
        "process": jax.process_index(),
        "devices": jax.device_count(),
        "local": jax.local_device_count(),
        "extra": extra,
        "platform": jax.default_backend(),
    }


def sum_over_all_processes() -> float:
    mesh = mtt.case_mesh(2, 2)
    return float(mtt.case_state(mesh, 3)["b"].sum())


def fail_on_one() -> None:
    print("about to look")
    if jax.process_index() == 1:
        raise KeyError("the missing one")
    sleep_for_ever()


def end_without_a_result() -> None:
    if jax.process_index() == 1:
        os._exit(7)
    sleep_for_ever()


def sleep_for_ever() -> None:
    mtt.report("asleep")
    while True:
        time.sleep(60)


def leave_a_thread_behind() -> str:
    threading.Thread(target=sleep_for_ever).start()
    return "done"


def crash_on_leaving() -> str:
    atexit.register(os._exit, 3)
    return "done"


def count_until_told(stop: str) -> int:
    step = 0
    while not os.path.exists(stop):
        mtt.report("step", step=step)
        step += 1
        time.sleep(0.01)
    return step


def restored_elsewhere() -> None:
    mtt.assert_state(mtt.case_state(mtt.case_mesh(2, 4), 9), 9)


def own_coordinator() -> list[Any]:
    place = mtt.this_process()
    assert place is not None
    started = jax.distributed.is_initialized()
    jax.distributed.initialize(place.coordinator, place.processes, place.process_id)
    return [started, jax.process_count()]


def surroundings() -> dict[str, Any]:
    return {
        "folder": os.getcwd(),
        "ancestor": os.getppid(),
        "color": os.environ.get("COLOR"),
        "sets": hash("a seed of its own"),
        "random": float(np.random.random()),
        "session": os.getsid(0) == os.getpid(),
        "safe path": sys.flags.safe_path,
    }


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int) -> None:
    wait_for(lambda: not alive(pid) or None, Deadline.after(10), f"the end of process {pid}")


# Each way in which a process can start; a variable that is not the tests' own tells them apart.
WAYS = pytest.mark.parametrize("env", [{}, {"COLOR": "red"}], ids=["forked", "new interpreter"])


# Results.


def test_results_come_in_the_order_of_ranks_whatever_the_process_ids() -> None:
    results = mtt.run_processes(identity, 2, devices=3, args=["x"], process_ids=[1, 0])
    assert results == [
        {"rank": 0, "process": 1, "devices": 6, "local": 3, "extra": "x", "platform": "cpu"},
        {"rank": 1, "process": 0, "devices": 6, "local": 3, "extra": "x", "platform": "cpu"},
    ]


def test_collectives_work_and_all_get_the_same() -> None:
    first, second = mtt.run_processes(sum_over_all_processes, 2)
    assert first == second > 0


def test_a_target_may_start_distributed_jax_itself() -> None:
    assert mtt.run_processes(own_coordinator, 2, distributed=False) == [[False, 2]] * 2


def test_a_target_can_be_named() -> None:
    assert mtt.run_processes("os.path:basename", 1, args=["a/b"], distributed=False) == ["b"]


def test_a_function_inside_another_is_refused() -> None:
    with pytest.raises(ValueError, match="top of its module"):
        mtt.ProcessGroup(lambda: None, 1)


def test_process_ids_must_be_a_permutation() -> None:
    with pytest.raises(ValueError, match=r"numbers 0 to 1 in some order: \[1, 2\]"):
        mtt.ProcessGroup(identity, 2, process_ids=[1, 2])


# Failures.


@WAYS
def test_an_error_shows_the_process_its_traceback_and_the_outputs(env: dict[str, str]) -> None:
    with pytest.raises(mtt.ProcessFailedError) as caught:
        mtt.run_processes(fail_on_one, 2, env=env)
    text = str(caught.value)
    assert text.startswith("process 1 raised KeyError: 'the missing one'")
    assert "in fail_on_one" in text
    assert "--- output of process 0 ---" in text
    assert "--- output of process 1 ---\nabout to look" in text
    assert caught.value.rank == 1


@WAYS
def test_an_end_without_a_result_is_an_error(env: dict[str, str]) -> None:
    with pytest.raises(
        mtt.ProcessFailedError, match="process 1 ended with exit code 7 and without"
    ):
        mtt.run_processes(end_without_a_result, 2, env=env)


@WAYS
def test_a_hang_shows_where_it_is(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    monkeypatch.setattr("mtcheckpoint.testing._processes._SECONDS_TO_DUMP", 20.0)
    with mtt.ProcessGroup(sleep_for_ever, 1, distributed=False, env=env) as group:
        group.wait_for("asleep")
        with pytest.raises(WaitTimeoutError, match="missing: process 0") as caught:
            group.wait(0.1)
    assert "in sleep_for_ever" in "".join(caught.value.__notes__)


def test_a_thread_that_keeps_a_process_from_ending_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mtcheckpoint.testing._processes._SECONDS_TO_LEAVE", 1.0)
    monkeypatch.setattr("mtcheckpoint.testing._processes._SECONDS_TO_DUMP", 20.0)
    with pytest.raises(WaitTimeoutError, match="to end after their results") as caught:
        mtt.run_processes(leave_a_thread_behind, 1, distributed=False)
    assert "in sleep_for_ever" in "".join(caught.value.__notes__)


@WAYS
def test_a_crash_after_the_result_is_noticed(env: dict[str, str]) -> None:
    with pytest.raises(mtt.ProcessFailedError, match="result, but then ended with exit code 3"):
        mtt.run_processes(crash_on_leaving, 1, distributed=False, env=env)


def test_waiting_for_an_event_ends_when_the_process_does() -> None:
    with (
        mtt.ProcessGroup("os:getpid", 1, distributed=False) as group,
        pytest.raises(mtt.ProcessFailedError, match="process 0 ended without the event 'saved'"),
    ):
        group.wait_for("saved", rank=0)


# Signals and clean-up.


@WAYS
def test_a_group_is_watched_frozen_and_killed(tmp_path: Path, env: dict[str, str]) -> None:
    stop = tmp_path / "stop"
    with mtt.ProcessGroup(
        count_until_told, 3, args=[str(stop)], distributed=False, env=env
    ) as group:
        assert [event.rank for event in group.wait_for_all("step")] == [0, 1, 2]
        assert group.wait_for("step", rank=0)["step"] == 1
        assert group.wait_for("step", rank=0, where=lambda event: event["step"] > 5)["step"] == 6
        group.kill(1)
        group.stop(2)
        assert group.poll() == [None, -signal.SIGKILL, None]
        frozen_at = len(group.events(2))
        group.wait_for("step", rank=0, where=lambda event: event["step"] > 30)
        assert len(group.events(2)) - frozen_at <= 1
        group.cont(2)
        stop.touch()
        counted, killed, frozen = group.wait(30)
    assert killed is None
    assert counted > 30 and frozen >= frozen_at


@WAYS
def test_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with mtt.ProcessGroup(sleep_for_ever, 2, distributed=False, env=env) as group:
        pids = [group.pid(rank) for rank in range(2)]
        assert all(alive(pid) for pid in pids)
        assert os.listdir(tmp_path)
    assert not any(alive(pid) for pid in pids)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("preloaded", [(), ("json",)], ids=["new interpreter", "forked"])
def test_children_die_with_a_parent_that_was_killed(
    tmp_path: Path, preloaded: tuple[str, ...]
) -> None:
    script = (
        "import sys, mtcheckpoint.testing as mtt\n"
        f"mtt.preload(*{preloaded})\n"
        f"group = mtt.ProcessGroup({__file__ + ':count_until_told'!r}, 1, args=['/nowhere'],"
        " distributed=False)\n"
        "group.wait_for('step', rank=0)\n"
        "print(group.pid(0), flush=True)\n"
        "group.wait(60)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    wait_until_gone(child)


def test_a_report_without_a_parent_does_nothing() -> None:
    assert mtt.this_process() is None
    mtt.report("saved", step=1)


# Ways to start.


def test_a_forked_process_is_as_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second, third = mtt.run_processes(surroundings, 3, distributed=False)
    assert first["ancestor"] == third["ancestor"] not in (second["ancestor"], os.getpid())
    assert first["folder"] == str(tmp_path)
    assert first["session"] and first["safe path"]
    # Neither the order of sets nor what is drawn is the same on neighbours.
    assert first["sets"] != second["sets"]
    assert len({process["random"] for process in (first, second, third)}) == 3


def test_another_environment_gets_a_new_interpreter() -> None:
    (found,) = mtt.run_processes(surroundings, 1, distributed=False, env={"COLOR": "red"})
    assert found["ancestor"] == os.getpid()
    assert found["color"] == "red"


def test_a_changed_environment_gets_a_new_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOR", "blue")
    (found,) = mtt.run_processes(surroundings, 1, distributed=False)
    assert (found["ancestor"], found["color"]) == (os.getpid(), "blue")


def test_a_process_ends_with_the_one_that_forked_it_and_others_start_all_the_same() -> None:
    (found,) = mtt.run_processes(surroundings, 1, distributed=False)
    assert found["ancestor"] != os.getpid(), "it was not forked"
    with mtt.ProcessGroup(sleep_for_ever, 1, distributed=False) as group:
        group.wait_for("asleep")
        os.kill(found["ancestor"], signal.SIGKILL)
        wait_until_gone(group.pid(0))
        with pytest.raises(mtt.ProcessFailedError, match="ended with SIGKILL and without"):
            group.wait(10)
    (after,) = mtt.run_processes(surroundings, 1, distributed=False)
    assert after["ancestor"] not in (found["ancestor"], os.getpid())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import threading, time; threading.Thread(target=time.sleep, args=[60]).start()",
            "threads",
        ),
        ("raise ValueError('not today')", "not today"),
    ],
)
def test_what_cannot_be_preloaded_says_so(
    tmp_path: Path, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unfit.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    pool = _starting.Pool(["unfit"])
    monkeypatch.setattr(_starting, "_pool", pool)
    with pytest.raises(RuntimeError, match=said):
        mtt.run_processes(surroundings, 1, distributed=False)


# Folders.


def test_node_directories_are_counted_and_wiped(volume_root: Path) -> None:
    nodes = mtt.NodeDirectories(volume_root, 2)
    (nodes[0] / "5" / "d").mkdir(parents=True)
    (nodes[0] / "5" / "d" / "chunk").write_bytes(bytes(100))
    (nodes[0] / "x.restore").symlink_to("5")
    assert nodes.entries(0) == ["5", "x.restore"]
    assert [nodes.size_bytes(rank) for rank in range(len(nodes))] == [100, 0]
    nodes.wipe(0)
    assert nodes[0].is_dir() and nodes.entries(0) == [] and nodes.size_bytes(0) == 0


def test_a_ram_disk_is_gone_afterwards() -> None:
    with mtt.ram_disk() as folder:
        (folder / "a").mkdir()
    assert not folder.exists()


# The state.


def test_the_state_has_the_leaves_of_a_training_state() -> None:
    state = mtt.case_state(mtt.case_mesh(), 5)
    kinds = {
        jax.tree_util.keystr(path): (leaf.shape, str(leaf.dtype), leaf.sharding.spec)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    P = jax.sharding.PartitionSpec
    w, b = ((16, 32), "bfloat16", P("data", "model")), ((32,), "float32", P("model"))
    scalar = ((), "int32", P())
    assert kinds == {
        "['w']": w,
        "['b']": b,
        "['step']": scalar,
        "['key']": ((), "key<fry>", P()),
        "['opt'][0].count": scalar,
        "['opt'][0].mu['w']": w,
        "['opt'][0].mu['b']": b,
        "['opt'][0].nu['w']": w,
        "['opt'][0].nu['b']": b,
    }
    assert mtt.abstract_state(state)["w"].sharding == state["w"].sharding


def test_the_state_is_checked_on_every_process() -> None:
    mtt.run_processes(restored_elsewhere, 4)


@pytest.mark.parametrize("leaf", ["w", "b", "step", "key"])
def test_a_wrong_leaf_is_named(leaf: str) -> None:
    mesh = mtt.case_mesh()
    state = mtt.case_state(mesh, 5)
    mtt.assert_state(state, 5)
    mixed = {**state, leaf: mtt.case_state(mesh, 6)[leaf]}
    with pytest.raises(AssertionError, match=rf"\['{leaf}'\]: .* differ from step 5"):
        mtt.assert_state(mixed, 5)


def test_one_wrong_element_is_found() -> None:
    state = mtt.case_state(mtt.case_mesh(), 5)
    values = np.array(state["w"])
    values[9, 20] += 1
    state["w"] = jax.device_put(values, state["w"].sharding)
    with pytest.raises(AssertionError, match=r"\['w'\]: 1 of 64 .* first at \(1, 4\) of the box"):
        mtt.assert_state(state, 5)


def test_a_missing_leaf_is_an_error() -> None:
    state = mtt.case_state(mtt.case_mesh(), 5)
    del state["opt"]
    with pytest.raises(AssertionError, match="leaves differ"):
        mtt.assert_state(state, 5)
