"""Bad copies are set aside and not tried again; `strict`; replicas that are not equal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from replicator_cluster import embedded_cluster
from restoring_clusters import run_job, same, wait_until_held
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
    train,
)

import mtcheckpoint as mtc
from mtcheckpoint import cli
from mtcheckpoint._handshake import files
from mtcheckpoint._replicas import unequal_leaves, unequal_twins, uneven_groups
from mtcheckpoint._shares.identity import IDENTITY_FILE
from mtcheckpoint._shares.seal import Seal
from mtcheckpoint._shares.volume import KeptSteps, size_bytes
from mtcheckpoint.testing import abstract_state, case_mesh, case_state, ram_disk

pytestmark = pytest.mark.extended

NODES = 2
VICTIM = 1


def damage_data(share: Path) -> None:
    """Changes every data file, so that nothing of the share can be read."""
    for file in (share / "state").rglob("d/*"):
        file.write_bytes(bytes(len(file.read_bytes())))


def flip_a_bit(share: Path, step: int) -> None:
    """Harms one chunk: the share can be opened, and only who reads it all notices."""
    chunk = np.asarray(case_state(case_mesh(), step)["w"].addressable_shards[0].data).tobytes()
    (file,) = (path for path in (share / "state").rglob("d/*") if chunk in path.read_bytes())
    content = bytearray(file.read_bytes())
    content[content.index(chunk)] ^= 1
    file.write_bytes(content)


NAMELESS: dict[str, Callable[[Path], Any]] = {
    "identity cut": lambda file: file.write_text("{"),
    "identity gone": lambda file: file.unlink(),
}


def names(volume: Path) -> list[str]:
    return sorted(path.name for path in volume.iterdir())


# Without a replicator.


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, list[dict[str, Any]]]]:
    with ram_disk() as root:
        results = run_job(without_a_replicator, NODES, str(root))
        yield {name: [process[name] for process in results] for name in results[0]}


def without_a_replicator(root: str) -> dict[str, Any]:
    save_alone(f"{root}/saved", [1, 2])
    found = {"unequal": unequal_replicas(root)}
    for name in ("strict", "bad"):
        shutil.copytree(folder(f"{root}/saved"), folder(f"{root}/{name}"))
        if rank() == VICTIM:
            damage_data(folder(f"{root}/{name}") / "2")
    together("damaged")
    for victim in range(NODES):
        place = f"{root}/flipped-{victim}"
        shutil.copytree(folder(f"{root}/saved"), folder(place))
        if rank() == victim:
            flip_a_bit(folder(place) / "2", 2)
        together(place)
        found[f"flipped {victim}"] = {**restore_outcome(alone(place)), "left": names(folder(place))}
    for name, harm in NAMELESS.items():
        shutil.copytree(folder(f"{root}/saved"), folder(f"{root}/{name}"))
        if rank() == VICTIM:
            harm(folder(f"{root}/{name}") / "2" / IDENTITY_FILE)
        together(name)
        found[name] = saved_again(f"{root}/{name}", 2)
    found["strict"] = strictly(f"{root}/strict")
    found["first"] = {**restore_outcome(alone(f"{root}/bad")), "left": names(folder(f"{root}/bad"))}
    found["again"] = {**restore_outcome(alone(f"{root}/bad")), "left": names(folder(f"{root}/bad"))}
    return found


def saved_again(root: str, step: int) -> dict[str, Any]:
    """Restores what there is, and saves `step` once more."""
    state = case_state(case_mesh(), step)
    with open_manager(alone(root)) as manager:
        found = summary(manager.restore_latest(abstract_state(state)))
        manager.save(step, state, force=True)
    return {**found, "left": names(folder(root))}


def strictly(root: str) -> dict[str, Any]:
    target = abstract_state(case_state(case_mesh(), 0))

    def attempt() -> dict[str, Any]:
        with open_manager(alone(root)) as manager:
            return summary(manager.restore_latest(target, strict=True))

    return {**outcome(attempt), "left": names(folder(root))}


def test_a_bad_step_directory_is_set_aside(found: dict[str, Any]) -> None:
    assert same(found["first"], "step") == 1
    assert found["first"][VICTIM]["left"] == ["1", "2.condemned"]
    # The share of the other node is good: it stays.
    assert found["first"][0]["left"] == ["1", "2"]


@pytest.mark.parametrize("victim", range(NODES))
def test_a_chunk_that_nobody_else_has_takes_all_back_at_once(
    found: dict[str, Any], victim: int
) -> None:
    """The others have read theirs already, and must not wait for the one that cannot."""
    outcome = found[f"flipped {victim}"]
    assert same(outcome, "step", "tier") == [1, "local"]
    assert outcome[victim]["left"] == ["1", "2.condemned"]
    assert outcome[1 - victim]["left"] == ["1", "2"]
    assert all(process["took_seconds"] < 10 for process in outcome)


@pytest.mark.parametrize("name", NAMELESS)
def test_a_step_directory_that_does_not_say_whose_it_is_makes_room(
    found: dict[str, Any], name: str
) -> None:
    assert same(found[name], "step") == 1
    assert found[name][VICTIM]["left"] == ["1", "2", "2.condemned"]
    assert found[name][1 - VICTIM]["left"] == ["1", "2"]


def test_it_is_not_tried_again(found: dict[str, Any]) -> None:
    assert same(found["again"], "step") == 1
    reasons = [reason for _, _, reason in same(found["again"], "passed_over")]
    assert any("2.condemned was found bad and set aside" in reason for reason in reasons)
    assert not any("damaged" in reason or "not what was saved" in reason for reason in reasons)
    assert found["again"][VICTIM]["left"] == ["1", "2.condemned"]


def test_strict_raises_on_all_and_touches_nothing(found: dict[str, Any]) -> None:
    assert same(found["strict"], "error") == "RestoreError"
    for process in found["strict"]:
        assert "step 2" in process["message"] and f"process {VICTIM}" in process["message"]
        assert process["left"] == ["1", "2"]


def unequal_replicas(root: str) -> dict[str, Any]:
    """The replicas of one leaf differ when they are saved; another leaf is equal."""
    sharding = jax.NamedSharding(case_mesh(), jax.P("model"))
    own = np.arange(8, dtype=np.float32)
    drifted = own + (rank() == VICTIM)

    def array(values: np.ndarray) -> jax.Array:
        places = sharding.addressable_devices_indices_map((8,))
        parts = [jax.device_put(values[index], device) for device, index in places.items()]
        return jax.make_array_from_single_device_arrays((8,), sharding, parts)

    state = {"equal": array(own), "drifted": array(drifted)}
    with open_manager(alone(f"{root}/unequal")) as manager:
        assert manager.save(0, state, force=True)
        manager.wait_until_finished()
    with open_manager(alone(f"{root}/unequal")) as manager:
        restored = manager.restore_latest(abstract_state(state))
        assert restored is not None
        return {"unequal": list(restored.report.unequal_replicas)}


def test_replicas_that_differ_are_named_with_the_leaf(found: dict[str, Any]) -> None:
    assert same(found["unequal"], "unequal") == ["leaf 'drifted': ranks 0, 1 differ"]


def test_what_is_set_aside_is_told_in_bytes_until_it_is_deleted(
    volume_root: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stays, from one start to the next; nothing deletes it by itself."""
    flags = {
        "enable_multi_tier_checkpointing": True,
        "enable_replicator": False,
        "max_num_checkpoints_to_keep": 2,
        "multi_tier_checkpointing_backup_interval_minutes": 30,
        "local_checkpoint_directory": str(volume_root),
        "local_checkpoint_period": 1,
        "run_name": JOB,
    }

    def start(step: int) -> str:
        caplog.clear()
        with open_manager(mtc.CheckpointConfig(**flags)) as manager:
            found = manager.restore_latest(None)
            assert (found.step if found is not None else None) == (1 if step > 1 else None)
            assert manager.save(step, case_state(case_mesh(), step), force=True)
            manager.wait_until_finished()
        return " ".join(caplog.messages)

    held = 0
    assert "set aside hold" not in start(1) + start(2)
    for newest in (2, 3):
        held += size_bytes(volume_root / str(newest))
        damage_data(volume_root / str(newest))
        start(newest + 1)
    told = f"2 that a restore found bad and set aside hold {held:,} bytes"
    damage_data(volume_root / "4")
    assert told in start(5)
    held += size_bytes(volume_root / "4.condemned")
    told = f"3 that a restore found bad and set aside hold {held:,} bytes"
    cli.main(["doctor", "--json", *(f"{name}={value}" for name, value in flags.items())])
    assert any(told in finding["found"] for finding in json.loads(capsys.readouterr().out))
    full = str(KeptSteps(volume_root, job=JOB, keep=2).full())
    assert told in full and f"rm -r {volume_root}/*.condemned" in full
    for path in volume_root.glob("*.condemned"):
        shutil.rmtree(path)
    cli.main(["doctor", *(f"{name}={value}" for name, value in flags.items())])
    assert "set aside" not in capsys.readouterr().out


# With a replicator.


def test_with_a_replicator_a_bad_share_is_noted_and_replaced_at_the_next_start() -> None:
    with ram_disk() as root, embedded_cluster(root, NODES, timeout_secs=30.0) as cluster:
        run_job(train, NODES, str(root), {}, [2])
        wait_until_held(cluster.volumes, 2)
        volume = cluster.volumes[VICTIM]
        meta = volume / files.ShareName(job=JOB, step=2, node_rank=VICTIM).meta
        share = volume / files.data_name(meta.read_text())
        damage_data(share)

        first = run_job(restore_with_replicator, NODES, str(root))
        assert same(first, "step", "tier") == [2, "peer"]
        note = json.loads((volume / "mtcheckpoint.condemned.json").read_text())
        assert meta.read_text() in note["shares"]
        assert not (cluster.volumes[0] / "mtcheckpoint.condemned.json").exists()
        assert share.is_dir(), "it belongs to the replicator"

        again = run_job(restore_with_replicator, NODES, str(root))
        assert same(again, "step", "tier") == [2, "peer"]  # brought anew, by the replicator
        assert again[VICTIM]["bytes"].keys() == {"local"}
        assert not (volume / "mtcheckpoint.condemned.json").exists()
        assert not list(volume.glob("*.condemned")), "the replicator has cleared it"

        third = run_job(restore_with_replicator, NODES, str(root))
        assert same(third, "step", "tier") == [2, "local"]


def restore_with_replicator(root: str) -> dict[str, Any]:
    return restore_outcome(config(root))


def test_a_whole_older_step_in_memory_outlives_a_newer_one_that_is_bad() -> None:
    """The replicator would offer the newer one by its names, and clear the older."""
    with ram_disk() as root, embedded_cluster(root, NODES, timeout_secs=30.0) as cluster:
        run_job(train, NODES, str(root), {}, [1])
        wait_until_held(cluster.volumes, 1)
        kept = [shutil.copytree(volume, root / f"kept-{volume.name}") for volume in cluster.volumes]
        run_job(train, NODES, str(root), {}, [2])
        wait_until_held(cluster.volumes, 2)
        for volume, before in zip(cluster.volumes, kept, strict=True):
            # As it is while step 1 is being backed up.
            for entry in (*before.glob("*.data"), *before.glob("*.meta")):
                entry.rename(volume / entry.name)
            meta = volume / files.ShareName(job=JOB, step=2, node_rank=VICTIM).meta
            damage_data(volume / files.data_name(meta.read_text()))

        found = run_job(train, NODES, str(root), {}, [3])
        assert same(found, "step") == 1
        wait_until_held(cluster.volumes, 3)


def test_a_name_that_cannot_be_read_loses_nothing() -> None:
    """The replicator goes by the names alone, and would clear a step that they do not add up to."""
    with ram_disk() as root, embedded_cluster(root, NODES, timeout_secs=30.0) as cluster:
        run_job(train, NODES, str(root), {}, [2])
        wait_until_held(cluster.volumes, 2)
        meta = files.ShareName(job=JOB, step=2, node_rank=VICTIM).meta
        (cluster.volumes[VICTIM] / meta).write_text("D\x00")

        found = run_job(train, NODES, str(root), {}, [3])
        assert same(found, "step") == 2
        wait_until_held(cluster.volumes, 3)


# Pure.


def seal_of(**chunks: str) -> Seal:
    sealed = {name: {(0,): (4, checksum)} for name, checksum in chunks.items()}
    return Seal(step=1, save_id="a", leaves={}, chunks=sealed, files={})


def test_leaves_are_compared_chunk_by_chunk() -> None:
    seals = {0: seal_of(w="x", b="y"), 2: seal_of(w="z", b="y"), 3: seal_of(b="y")}
    assert unequal_leaves(seals) == {("w", (0, 2))}


def test_twins_are_told_from_summaries() -> None:
    ranks = [("half 0", "x"), ("half 1", "y"), ("half 0", "x"), ("half 1", "z")]
    assert uneven_groups(ranks) == [(1, 3)]
    leaves = {1: {"w": "1", "b": "1"}, 3: {"w": "2", "b": "1"}}
    assert unequal_twins([(1, 3)], leaves) == {("w", (1, 3))}
    # Somebody's seal could not be read: the ranks are named all the same.
    assert unequal_twins([(1, 3)], {1: {"w": "1"}}) == {("?", (1, 3))}
