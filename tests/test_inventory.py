"""What is found in a volume, whatever state a replicator left it in."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from synthetic_saves import SyntheticSave

from mtcheckpoint._shares.inventory import PIN_FOLDER, HeldShare, pin, take_inventory

JOB = "train-a"
DIGEST = "D" + "ab" * 32


def share_in(volume: Path, name: str, **fields: object) -> Path:
    """A whole share, under some name of the volume."""
    save = SyntheticSave(
        values={"g.w": np.arange(8.0)}, specs={"g.w": ((),)}, mesh={"x": 1}, ranks=1, **fields
    )  # type: ignore[arg-type]
    volume.mkdir(exist_ok=True)
    (made,) = save.write(volume / "making")
    os.rename(made, volume / name)
    shutil.rmtree(volume / "making")
    return volume / name


def found(volume: Path) -> list[tuple[int, int, str | None]]:
    shares = take_inventory(volume, JOB).shares
    return sorted((share.step, share.node_rank, share.digest) for share in shares)


@pytest.mark.parametrize("name", ["5", "5.again", f"{JOB}-s5-n0-w0.save", f"{DIGEST}.data"])
def test_a_share_is_found_at_every_stage_of_being_taken(volume_root: Path, name: str) -> None:
    share_in(volume_root, name)
    digest = DIGEST if name.endswith(".data") else None
    assert found(volume_root) == [(5, 0, digest)]


def test_a_meta_tells_the_step_that_the_data_stand_for(volume_root: Path) -> None:
    share_in(volume_root, f"{DIGEST}.data")
    (volume_root / f"{JOB}-s7-n3-w0.meta").write_text(DIGEST)
    inventory = take_inventory(volume_root, JOB)
    assert [(s.step, s.node_rank, s.save_id) for s in inventory.shares] == [(7, 3, "")]
    assert inventory.metas == ((7, 3, DIGEST),)


def test_other_jobs_and_unfinished_directories_are_left_out(volume_root: Path) -> None:
    share_in(volume_root, "5", job="train-b")
    share_in(volume_root, f"{DIGEST}.data", job="train-b")
    (volume_root / "6" / "state").mkdir(parents=True)
    (volume_root / f"{JOB}-s8-n0-w0.meta").write_text(DIGEST[:-2] + "zz")
    inventory = take_inventory(volume_root, JOB)
    assert inventory.shares == ()
    assert [step for step, _, _ in inventory.metas] == [8], "and its data is not there"


def test_a_meta_that_names_nothing_is_known_to_be_there(volume_root: Path) -> None:
    share_in(volume_root, f"{DIGEST}.data")
    (volume_root / f"{JOB}-s7-n0-w0.meta").write_text("../../etc")
    (volume_root / f"{JOB}-s7-n1-w0.meta").mkdir()
    inventory = take_inventory(volume_root, JOB)
    assert inventory.metas == ((7, 0, ""), (7, 1, ""))
    assert [share.digest for share in inventory.shares] == [DIGEST]


def test_damaged_identities_are_named(volume_root: Path) -> None:
    share = share_in(volume_root, "5")
    (share / "mtcheckpoint" / "identity.json").write_text('{"format": 1, "job":')
    inventory = take_inventory(volume_root, JOB)
    assert inventory.shares == ()
    assert len(inventory.damaged) == 1
    assert "identity.json" in inventory.damaged[0]
    assert inventory.damaged_paths == (share,)


def test_a_step_whose_identity_is_gone_is_damaged(volume_root: Path) -> None:
    share = share_in(volume_root, "5")
    (share / "mtcheckpoint" / "seal.json").write_text("{}")
    (share / "mtcheckpoint" / "identity.json").unlink()
    inventory = take_inventory(volume_root, JOB)
    assert inventory.shares == ()
    assert inventory.damaged_paths == (share,)


def test_nothing_is_overlooked_while_a_replicator_renames(volume_root: Path) -> None:
    """A thread takes the step as a replicator does, again and again, while we look."""
    share_in(volume_root, "5")
    stages = ["5", f"{JOB}-s5-n0-w0.save", f"{DIGEST}.data"]
    stop = threading.Event()

    def take_and_give_back() -> None:
        while not stop.is_set():
            for old, new in zip(stages, [*stages[1:], stages[0]], strict=True):
                os.rename(volume_root / old, volume_root / new)
                stop.wait(0.003)

    thread = threading.Thread(target=take_and_give_back)
    thread.start()
    try:
        looks = [take_inventory(volume_root, JOB) for _ in range(50)]
    finally:
        stop.set()
        thread.join()
    assert all(len(look.shares) == 1 for look in looks)


def test_a_pinned_share_outlives_its_directory(volume_root: Path) -> None:
    share_in(volume_root, "5")
    (held,) = take_inventory(volume_root, JOB).shares
    pinned = pin(held, volume_root)
    files = sorted(p.relative_to(held.path) for p in held.path.rglob("*") if p.is_file())
    shutil.rmtree(held.path)
    assert sorted(p.relative_to(pinned.path) for p in pinned.path.rglob("*") if p.is_file()) == (
        files
    )
    assert pinned.path.parent.name == PIN_FOLDER
    assert pin(held, volume_root) == pinned, "held already"


def test_what_is_moved_while_it_is_held_is_said(
    volume_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replicator takes the step when half of its files are linked."""
    share = share_in(volume_root, "5")
    (held,) = take_inventory(volume_root, JOB).shares
    link, links = os.link, []

    def link_and_take(source: str, target: str, **options: object) -> None:
        link(source, target, **options)  # type: ignore[arg-type]
        links.append(source)
        if len(links) == 2:
            os.rename(share, volume_root / f"{JOB}-s5-n0-w0.save")

    monkeypatch.setattr(os, "link", link_and_take)
    with pytest.raises(FileNotFoundError, match="was moved while it was linked"):
        pin(held, volume_root)
    monkeypatch.undo()
    assert list((volume_root / PIN_FOLDER).iterdir()) == []
    (held,) = take_inventory(volume_root, JOB).shares
    assert pin(held, volume_root).path.is_dir()


def test_what_was_moved_before_it_could_be_held_is_said(volume_root: Path) -> None:
    gone = HeldShare(
        step=5, save_id="x", node_rank=0, nodes=1, digest=None, path=volume_root / "gone"
    )
    with pytest.raises(FileNotFoundError):
        pin(gone, volume_root)
