"""Copies that are damaged, missing, foreign or of two saves: passed over, the same on all hosts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import pytest
from handshake_peer import ThreadedReplicator
from replicator_cluster import embedded_cluster
from restoring_clusters import run_job, same, wait_until_backed_up, wait_until_held
from restoring_jobs import (
    JOB,
    alone,
    config,
    folder,
    open_manager,
    outcome,
    rank,
    restore_outcome,
    save_alone,
    summary,
    together,
    train_with_backups,
)

from mtcheckpoint._handshake import files
from mtcheckpoint._shares.places import LocalPlace
from mtcheckpoint.errors import TierUnreadableError
from mtcheckpoint.testing import abstract_state, case_mesh, case_state, ram_disk

NODES = 4
VICTIM = 1  # the rank whose share is damaged


# Kinds of damage.


def truncate_manifest(share: Path) -> None:
    os.truncate(share / "state" / "manifest.ocdbt", 10)


def garble_identity(share: Path) -> None:
    (share / "mtcheckpoint" / "identity.json").write_text("{not json")


def lose_data_file(share: Path) -> None:
    for file in (share / "state").rglob("d/*"):
        file.unlink()


def lose_manifest(share: Path) -> None:
    (share / "state" / "manifest.ocdbt").unlink()


def lose_tree(share: Path) -> None:
    (share / "state" / "_METADATA").unlink()


def lose_all(share: Path) -> None:
    shutil.rmtree(share)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "manifest truncated": truncate_manifest,
    "identity not JSON": garble_identity,
    "data file missing": lose_data_file,
    "manifest missing": lose_manifest,
    "tree missing": lose_tree,
}


# With copies in peers' volumes.


@pytest.fixture(scope="module")
def with_copies() -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Step 2 in all volumes and in a backup, then one scenario after another in one job."""
    with ExitStack() as stack:
        root = stack.enter_context(ram_disk())
        with embedded_cluster(root, NODES, timeout_secs=30.0) as cluster:
            cluster.backup.mkdir()
            interval = {"backup-interval-steps": 1}
            run_job(train_with_backups, NODES, str(root), {}, interval, [2])
            wait_until_held(cluster.volumes, 2)
            wait_until_backed_up(cluster.backup, 2, NODES)
        # From here on the replicator is a scripted one in each process, which checks nothing.
        found = run_job(damage_with_copies, NODES, str(root))
        yield {name: [process[name] for process in found] for name in found[0]}


def assert_victim_is_blamed(found: list[dict[str, Any]], said: str = "") -> None:
    reasons = [f"{source}: {reason}" for _, source, reason in same(found, "passed_over")]
    assert any(f"process {VICTIM}" in reason and said in reason for reason in reasons), reasons


@pytest.mark.parametrize("damage", [*DAMAGES, "link dangling", "share lost after the handshake"])
def test_a_copy_in_a_peers_volume_stands_in(with_copies: dict[str, Any], damage: str) -> None:
    found = with_copies[damage]
    assert same(found, "step", "tier") == [2, "peer"]
    assert same(found, "extras") == [[process, 2, True] for process in range(NODES)]
    # The others read what they have; the victim reads its share from the node that holds the copy.
    assert "peer" in found[VICTIM]["bytes"]


def test_without_a_copy_the_backup_stands_in(with_copies: dict[str, Any]) -> None:
    found = with_copies["both copies, with a backup"]
    assert same(found, "step", "tier") == [2, "backup"]
    assert all(step == 2 and "memory" in source for step, source, _ in same(found, "passed_over"))
    assert_victim_is_blamed(found, "manifest")


def test_without_a_copy_and_a_backup_there_is_an_error(with_copies: dict[str, Any]) -> None:
    found = with_copies["both copies, without a backup"]
    assert same(found, "error") == "RestoreError"
    for process in found:
        assert "step 2 (the cluster's memory)" in process["message"]
        assert f"process {VICTIM}" in process["message"] and "manifest" in process["message"]
        # It was asked, as it offers this very step.
        assert "The replicator has kept what it offered and cleared the rest" in process["message"]


def test_a_backup_that_one_host_cannot_read_is_an_error_on_all(with_copies: Any) -> None:
    found = with_copies["both copies, backup unreadable on one"]
    assert same(found, "error") == "TierUnreadableError"
    assert all("no permission" in process["message"] for process in found)


def test_an_explicit_step_is_not_taken_from_elsewhere(with_copies: dict[str, Any]) -> None:
    found = with_copies["explicit step"]
    assert same(found, "error", "available", "afterwards") == ["StepNotFoundError", [2], 2]
    assert "there are: [2]" in found[0]["message"]


def test_what_other_jobs_have_is_left_alone(with_copies: dict[str, Any]) -> None:
    found = with_copies["another job's files"]
    assert same(found, "step", "tier") == [2, "local"]
    assert same(found, "kept") == [True]


def damage_with_copies(root: str) -> dict[str, Any]:
    """Every scenario begins with the volumes as they were."""
    pristine = folder(root).rename(Path(root) / f"pristine-{rank()}")
    found = {}
    for number, (name, run) in enumerate(scenarios(root).items()):
        shutil.rmtree(folder(root), ignore_errors=True)
        shutil.copytree(pristine, folder(root), symlinks=True)
        together(f"scenario {number}")
        found[name] = run()
    return found


def scenarios(root: str) -> dict[str, Callable[[], dict[str, Any]]]:
    backup = {"backup_root": f"{root}/backup"}
    damaged = {
        name: lambda damage=damage: restored_after(root, damage) for name, damage in DAMAGES.items()
    }
    return {
        **damaged,
        "link dangling": lambda: restored_after(root, lose_all),
        "share lost after the handshake": lambda: restored_after(root, lose_all, late=True),
        "both copies, with a backup": lambda: restored_after(
            root, truncate_manifest, copies=True, **backup
        ),
        "both copies, without a backup": lambda: restored_after(
            root, truncate_manifest, copies=True
        ),
        "both copies, backup unreadable on one": lambda: unreadable_on_one(root, **backup),
        "explicit step": lambda: explicit_step(root),
        "another job's files": lambda: beside_another_job(root),
    }


def restored_after(
    root: str,
    damage: Callable[[Path], None],
    *,
    copies: bool = False,
    late: bool = False,
    **flags: Any,
) -> dict[str, Any]:
    """Restores with the victim's share damaged: on its node, or wherever it lies."""

    def harm() -> None:
        if rank() == VICTIM or copies:
            damage(share_of(folder(root), VICTIM))

    if not late:
        harm_if_there(harm)

    def attempt() -> dict[str, Any]:
        afterwards = harm if late else lambda: None
        with answered(root, afterwards), open_manager(config(root, **flags)) as manager:
            return summary(manager.restore_latest(target()))

    return outcome(attempt)


def unreadable_on_one(root: str, **flags: Any) -> dict[str, Any]:
    read = LocalPlace.read

    def refuse(place: LocalPlace, file: str) -> bytes | None:
        if rank() == VICTIM and place.tier == "backup":
            raise TierUnreadableError(f"no permission for {file}", place=place.name)
        return read(place, file)

    LocalPlace.read = refuse  # type: ignore[method-assign]
    try:
        return restored_after(root, truncate_manifest, copies=True, **flags)
    finally:
        LocalPlace.read = read  # type: ignore[method-assign]


def harm_if_there(harm: Callable[[], None]) -> None:
    try:
        harm()
    except FileNotFoundError:
        pass  # this node has no copy


def share_of(volume: Path, owner: int, step: int = 2) -> Path:
    meta = volume / files.ShareName(job=JOB, step=step, node_rank=owner).meta
    return volume / files.data_name(meta.read_text())


def target() -> Any:
    return abstract_state(case_state(case_mesh(), 0))


def answered(root: str, afterwards: Callable[[], None] = lambda: None) -> ThreadedReplicator:
    """A replicator that offers step 2, whatever became of it."""

    def answer(volume: Path) -> None:
        (volume / files.PRERESTORE_FILE).write_text("restore-step: 2\n")
        share = files.ShareName(job=JOB, step=2, node_rank=rank())
        link = files.data_name((volume / share.meta).read_text())
        (volume / share.restore).symlink_to(link)
        harm_if_there(afterwards)

    return ThreadedReplicator(folder(root), answer)


def explicit_step(root: str) -> dict[str, Any]:
    """Asks for a step that is not there, and then for what is there."""
    with answered(root), open_manager(config(root)) as manager:
        failed = outcome(lambda: {"state": str(type(manager.restore(5)))})
        afterwards = summary(manager.restore_latest(target()))
    return {**failed, "afterwards": afterwards["step"]}


def beside_another_job(root: str) -> dict[str, Any]:
    """Newer steps of another job lie beside ours, in every form in which they may."""
    volume = folder(root)
    digest = "D" + "e" * 64
    shutil.copytree(share_of(volume, rank()), volume / files.data_name(digest))
    (volume / f"job-b-s9-n{rank()}-w0.meta").write_text(digest)
    (volume / f"{JOB}-s9-n0-s8-n{rank()}-w0.meta").write_text(digest)

    def attempt() -> dict[str, Any]:
        with answered(root), open_manager(config(root)) as manager:
            (volume / f"job-b-s9-n{rank()}-w0.restore").symlink_to(files.data_name(digest))
            found = summary(manager.restore_latest(target()))
        kept = (volume / files.data_name(digest)).is_dir()
        return {**found, "kept": [kept and (volume / f"job-b-s9-n{rank()}-w0.meta").exists()]}

    return outcome(attempt)


# Without copies: each node keeps its own share of steps 1 and 2.


@pytest.fixture(scope="module")
def without_copies() -> Iterator[dict[str, list[dict[str, Any]]]]:
    with ram_disk() as root:
        found = run_job(damage_without_copies, NODES, str(root))
        yield {name: [process[name] for process in found] for name in found[0]}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_older_step_stands_in(without_copies: dict[str, Any], damage: str) -> None:
    found = without_copies[damage]
    assert same(found, "step", "tier") == [1, "local"]
    assert {step for step, _, _ in same(found, "passed_over")} <= {2, None}
    assert_victim_is_blamed(found)


def test_all_reasons_are_in_the_error(without_copies: dict[str, Any]) -> None:
    found = without_copies["both steps"]
    assert same(found, "error") == "RestoreError"
    for process in found:
        assert "none of 2 candidates" in process["message"]
        assert "step 2" in process["message"] and "step 1" in process["message"]


def test_one_host_without_the_newest_step_takes_all_back(without_copies: dict[str, Any]) -> None:
    assert same(without_copies["newest step missing on one"], "step") == 1


def test_shares_of_two_saves_of_one_step_are_never_mixed(without_copies: dict[str, Any]) -> None:
    found = without_copies["two saves of one step"]
    assert same(found, "step") == 1
    # Each of the two is whole on no set of nodes.
    assert [step for step, _, _ in same(found, "passed_over")] == [2, 2]


def test_empty_memory_and_an_empty_backup_are_nothing(without_copies: dict[str, Any]) -> None:
    assert without_copies["nothing"] == [
        {"step": None, "took_seconds": process["took_seconds"]}
        for process in without_copies["nothing"]
    ]
    assert same(without_copies["nothing and no backup"], "step") is None
    assert same(without_copies["empty folders"], "step") is None


def test_an_explicit_step_of_an_empty_folder(without_copies: dict[str, Any]) -> None:
    found = without_copies["explicit step of nothing"]
    assert same(found, "error", "available") == ["StepNotFoundError", []]
    assert "there are: none" in found[0]["message"]


def test_an_explicit_older_step(without_copies: dict[str, Any]) -> None:
    assert same(without_copies["explicit older step"], "steps", "restored") == [[1, 2], True]


@pytest.mark.parametrize("kind", ["missing", "a file", "unreadable", "share unreadable"])
def test_an_unreadable_backup_is_never_nothing(without_copies: dict[str, Any], kind: str) -> None:
    found = without_copies[f"backup {kind}"]
    assert same(found, "error") == "TierUnreadableError"
    for process in found:
        assert "backup" in process["message"]


def damage_without_copies(root: str) -> dict[str, Any]:
    save_alone(f"{root}/first", [1, 2])
    save_alone(f"{root}/second", [2])
    together("saved")
    found: dict[str, Any] = {}
    for name, damage in DAMAGES.items():
        found[name] = after(root, name, lambda volume, d=damage: damage_victim(volume / "2", d))
    found["both steps"] = after(root, "both", damage_both)
    found["newest step missing on one"] = after(
        root, "older", lambda volume: damage_victim(volume / "2", lose_all)
    )
    found["two saves of one step"] = after(
        root, "mixed", lambda volume: swap_in_other(root, volume)
    )
    found["explicit older step"] = explicit_older_step(f"{root}/first")
    return {**found, **nothing(root), **unreadable_backups(root)}


def after(root: str, name: str, harm: Callable[[Path], None]) -> dict[str, Any]:
    """How a restore from a damaged copy of the first volumes ends."""
    place = f"{root}/{name.replace(' ', '-')}"
    shutil.copytree(folder(f"{root}/first"), folder(place))
    harm(folder(place))
    together(name)
    return restore_outcome(alone(place))


def damage_victim(share: Path, damage: Callable[[Path], None]) -> None:
    if rank() == VICTIM:
        damage(share)


def damage_both(volume: Path) -> None:
    damage_victim(volume / "1", lose_data_file)
    damage_victim(volume / "2", truncate_manifest)


def swap_in_other(root: str, volume: Path) -> None:
    """The victim has the same step, of another save."""
    if rank() == VICTIM:
        shutil.rmtree(volume / "2")
        shutil.copytree(folder(f"{root}/second") / "2", volume / "2")


def explicit_older_step(root: str) -> dict[str, Any]:
    from orbax.checkpoint import args

    from mtcheckpoint.testing import assert_state

    def attempt() -> dict[str, Any]:
        with open_manager(alone(root)) as manager:
            steps = list(manager.all_steps())
            wanted = args.Composite(state=args.StandardRestore(target()))
            assert_state(manager.restore(1, args=wanted)["state"], 1)
            return {"steps": steps, "restored": True}

    return outcome(attempt)


def nothing(root: str) -> dict[str, Any]:
    empty = Path(root) / "empty-backup"
    (empty / JOB).mkdir(parents=True, exist_ok=True)
    backup = {"backup_root": str(empty)}

    def explicit() -> dict[str, Any]:
        with open_manager(alone(f"{root}/nothing", **backup)) as manager:
            return {"state": str(manager.restore(3))}

    found = {
        "nothing": restore_outcome(alone(f"{root}/nothing", **backup)),
        "nothing and no backup": restore_outcome(alone(f"{root}/nothing")),
        "explicit step of nothing": outcome(explicit),
    }
    (folder(f"{root}/folders") / "7").mkdir(parents=True)
    (empty / JOB / "2026-01-02_03-04").mkdir(exist_ok=True)
    together("empty folders")
    return {**found, "empty folders": restore_outcome(alone(f"{root}/folders", **backup))}


def unreadable_backups(root: str) -> dict[str, Any]:
    roots = {kind: Path(root) / f"backup-{kind}" for kind in ("missing", "file", "loop", "share")}
    if jax.process_index() == 0:
        roots["file"].write_text("")
        # Also root cannot read a link to itself.
        roots["loop"].mkdir()
        (roots["loop"] / JOB).symlink_to(JOB)
        make_backup(roots["share"] / JOB / "2026-01-02_03-04")
    together("backups")

    def of(kind: str) -> dict[str, Any]:
        return restore_outcome(alone(f"{root}/{kind}", backup_root=str(roots[kind])))

    return {
        "backup missing": of("missing"),
        "backup a file": of("file"),
        "backup unreadable": of("loop"),
        "backup share unreadable": of("share"),
    }


def make_backup(backup: Path) -> None:
    """A backup whose names are whole, and whose files cannot be read."""
    for node in range(NODES):
        digest = "D" + f"{node}" * 64
        data = backup / files.data_name(digest)
        (data / "mtcheckpoint").mkdir(parents=True)
        (data / "mtcheckpoint" / "identity.json").symlink_to("identity.json")
        (backup / files.ShareName(job=JOB, step=3, node_rank=node).meta).write_text(digest)
