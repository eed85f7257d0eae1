"""What saving does to the RAM disk: renames that commit, room, retention, missed steps."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import saving_jobs
from inotify import CREATE, MOVED_TO, Change, Watch
from played_replicator import played_replicators

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint._handshake import files
from mtcheckpoint._shares.volume import STAGING_FOLDER, KeptSteps, ReplicatedSteps, free_bytes
from mtcheckpoint.testing import NodeDirectories, ProcessGroup, run_processes

pytestmark = pytest.mark.extended

_MIB = 1 << 20


def test_a_step_is_moved_in_complete_and_only_ours_are_deleted(volume_root: Path) -> None:
    nodes = NodeDirectories(volume_root, 2)
    foreign = [_foreign(node) for node in nodes]
    # The job cannot rename over this one, on one node only.
    (nodes[1] / "9000").mkdir()
    (nodes[1] / "9000" / "theirs").write_text("not ours")
    seen: list[list[tuple[Change, bool]]] = [[], []]
    with ExitStack() as stack:
        watches = [stack.enter_context(Watch(node)) for node in nodes]
        group = stack.enter_context(
            ProcessGroup(saving_jobs.many_saves, 2, devices=1, args=[str(volume_root), 20])
        )

        def look() -> bool | None:
            for changes, watch in zip(seen, watches, strict=True):
                new = [c for c in watch.changes() if files.is_step_name(c.name)]
                changes.extend((c, _is_complete(watch.folder / c.name)) for c in new)
            return all(any(e.name == "refused" for e in group.events(r)) for r in (0, 1)) or None

        wait_for(look, Deadline.after(90.0), "20 saves", poll_seconds=0.001)
        refusals = group.wait_for_all("refused")
        assert group.wait(60) == [19, 19]
    for steps in seen:
        moved = [(c.name, whole) for c, whole in steps if c.mask & MOVED_TO]
        assert moved[:20] == [(str(step), True) for step in range(20)]
        assert not [change for change, _ in steps if change.mask & CREATE]
    for refusal in refusals:
        assert "9000" in refusal["text"] and "process 1 (" in refusal["text"]
    assert [_contents(node / "9000") for node in nodes] == [{}, {"theirs": "not ours"}]
    for node, before in zip(nodes, foreign, strict=True):
        assert {name: _contents(node / name) for name in before} == before
        names = {path.name for path in node.iterdir()} - set(before) - {"9000"}
        assert names == {"19", "20"}


def _foreign(volume: Path) -> dict[str, dict[str, str]]:
    """Another job's step, and directories of digits that nobody knows."""
    (volume / "800").mkdir()
    (volume / "800" / "file").write_text("whose?")
    other = volume / "700"
    (other / "mtcheckpoint").mkdir(parents=True)
    identity = {
        "format": 1,
        "job": "job-b",
        "step": 700,
        "save_id": "s",
        "node_rank": 0,
        "nodes": 2,
        "kinds": {},
    }
    (other / "mtcheckpoint" / "identity.json").write_text(json.dumps(identity))
    return {name: _contents(volume / name) for name in ("700", "800")}


def _contents(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def _is_complete(step: Path) -> bool:
    wanted = ("mtcheckpoint/identity.json", "mtcheckpoint/extras.json", "_CHECKPOINT_METADATA")
    manifests = list(step.glob("state/**/manifest.ocdbt"))
    return bool(manifests) and all((step / name).stat().st_size for name in wanted)


@pytest.fixture
def small_disks(volume_root: Path) -> Iterator[list[Path]]:
    """Two nodes with a RAM disk of three shares of 4 MiB and a little, each a real mount."""
    nodes = list(NodeDirectories(volume_root, 2))
    with ExitStack() as stack:
        for node in nodes:
            _mount(node, 13 * _MIB)
            stack.callback(subprocess.run, ["umount", str(node)], check=True)
        yield nodes


def _mount(folder: Path, size_bytes: int) -> None:
    if shutil.which("mount") is None:
        pytest.skip("a RAM disk of a certain size needs the command mount")
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a RAM disk of a certain size needs the right to mount: {done.stderr.strip()}")


def test_a_slow_replicator_slows_saving_but_not_training(small_disks: list[Path]) -> None:
    with played_replicators(small_disks, seconds_a_step=2.0) as replicators:
        results = run_processes(
            saving_jobs.slow_replicator, 2, devices=1, args=[str(small_disks[0].parent), 6.5]
        )
    first, second = results
    assert first["saved"] == second["saved"]
    assert 3 <= len(first["saved"]) <= 8, first["saved"]
    for result, replicator in zip(results, replicators, strict=True):
        assert replicator.taken == first["saved"][: len(replicator.taken)]
        assert len(replicator.taken) >= len(first["saved"]) - 2
        assert replicator.least_free_bytes > 0
        assert statistics.median(result["skipped"]) < 0.05
        assert max(result["skipped"]) < 1.0
        assert max(result["started"][:-1]) < 1.0


def test_a_full_disk_is_reported_in_bytes_and_cleaned(small_disks: list[Path]) -> None:
    results = run_processes(saving_jobs.full_disk, 2, devices=1, args=[str(small_disks[0].parent)])
    for result in results:
        text, step, processes = result["failure"]
        assert step == 20 and processes == [1]
        assert "process 1 (" in text
        assert f"needs at least {_share_bytes(text)} bytes" in text and "are free" in text
        assert _share_bytes(text) >= 4 * _MIB
        assert result["skipped"], "a save was tried that could not fit"
        assert [name for name in result["left"] if name != "filler"] in (
            ["10"],
            ["10", "mtcheckpoint.staging"],
        )
        assert result["saved"], "saving did not go on when there was room again"


def _share_bytes(text: str) -> int:
    return int(text.split("needs at least ")[1].split()[0])


def test_room_is_news_when_it_comes_and_goes(small_disks: list[Path]) -> None:
    volume = small_disks[0]
    steps = ReplicatedSteps(volume)
    steps.prepare(1, 4 * _MIB)
    steps.report()
    assert not steps.look()
    filler = volume / "filler"
    filler.write_bytes(b"x" * (10 * _MIB))
    assert steps.look()
    assert steps.report()["free_bytes"] == free_bytes(volume) < 4 * _MIB
    assert not steps.look()
    filler.unlink()
    assert steps.look()
    assert steps.report()["free_bytes"] > 4 * _MIB


@pytest.mark.parametrize("saves", [1, 2])
def test_a_step_that_the_replicator_missed_is_announced_again(
    volume_root: Path, saves: int
) -> None:
    nodes = list(NodeDirectories(volume_root, 2))
    # Longer than the manager lets the replicator settle, on one node only: nodes that do not take
    # the same steps wait for each other for ever.
    with played_replicators(nodes, watch_after=[0.0, 2.5]) as replicators:
        run_processes(saving_jobs.save_at_once, 2, devices=1, args=[str(volume_root), saves])
        steps = list(range(saves))
        wait_for(
            lambda: all(replicator.taken == steps for replicator in replicators) or None,
            Deadline.after(5.0),
            f"steps {steps} to be taken by both nodes",
            missing=lambda: [str(replicator.taken) for replicator in replicators],
        )


def _committed(steps: KeptSteps | ReplicatedSteps, step: int, name: str = "share") -> None:
    share = steps.volume / name
    share.mkdir()
    (share / "mtcheckpoint").mkdir()
    identity = {"format": 1, "job": "job-a", "step": step, "save_id": "s", "node_rank": 0}
    text = json.dumps({**identity, "nodes": 1, "kinds": {}})
    (share / "mtcheckpoint" / "identity.json").write_text(text)
    steps.commit(share, step, 1)


def test_older_steps_stay_until_the_new_one_is_everywhere(volume_root: Path) -> None:
    steps = KeptSteps(volume_root, job="job-a", keep=1)
    _committed(steps, 10)
    steps.tidy()
    _committed(steps, 20)
    assert _names(volume_root) == ["10", "20"]
    steps.withdraw(20)
    assert _names(volume_root) == ["10"]
    _committed(steps, 30)
    steps.tidy()
    assert _names(volume_root) == ["30"]


def test_a_step_that_is_saved_again_comes_back_when_that_fails(volume_root: Path) -> None:
    steps = KeptSteps(volume_root, job="job-a", keep=2)
    _committed(steps, 10)
    (volume_root / "10" / "first").touch()
    steps.tidy()
    steps.prepare(10, 1)
    _committed(steps, 10)
    assert not (volume_root / "10" / "first").exists()
    steps.withdraw(10)
    assert _names(volume_root) == ["10"]
    assert (volume_root / "10" / "first").exists()


def test_what_a_kill_left_between_two_renames_goes(volume_root: Path) -> None:
    for name in ("5.deleted", "7.withdrawn.deleted"):
        (volume_root / name).mkdir()
    (volume_root / "users.deleted").mkdir()
    steps = KeptSteps(volume_root, job="job-a", keep=1)
    _committed(steps, 10)
    steps.tidy()
    assert _names(volume_root) == ["10", "users.deleted"]
    assert len([*volume_root.glob(f"{STAGING_FOLDER}/*/*")]) == 2
    steps.sweep()
    assert [*volume_root.glob(f"{STAGING_FOLDER}/*")] == []


def test_a_step_taken_while_it_is_announced_again_is_no_fault(volume_root: Path) -> None:
    steps = ReplicatedSteps(volume_root)
    _committed(steps, 10)
    shutil.rmtree(volume_root / "10")
    steps._announce_again()
    assert steps.look() and steps.taken == 10
    assert _names(volume_root) == []


def _names(folder: Path) -> list[Any]:
    """What lies there, but for the folder of what is begun and what is deleted."""
    return sorted(path.name for path in folder.iterdir() if path.name != STAGING_FOLDER)
