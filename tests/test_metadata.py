"""What a step says of itself, as Orbax's managers tell it, wherever the step lies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest
from elastic_jobs import JOB, lay_out
from restoring_clusters import run_job, same
from restoring_jobs import alone, folder, open_manager, outcome, rank, together

import mtcheckpoint as mtc
from mtcheckpoint.testing import case_mesh, case_state, ram_disk

pytestmark = pytest.mark.extended

NODES = 2
CUSTOM = {"commit": "abc", "tokens": [1, 2], "nested": {"a": None}}


def save_state(root: str) -> None:
    mesh = case_mesh()
    with open_manager(alone(root)) as manager:
        for step in (1, 2):
            metadata = {**CUSTOM, "step": step}
            assert manager.save(step, case_state(mesh, step), force=True, custom_metadata=metadata)
        manager.wait_until_finished()
        assert manager.metadata(2).custom_metadata == {**CUSTOM, "step": 2}


def told(manager: Any, step: int) -> dict[str, Any]:
    found = manager.metadata(step)
    assert isinstance(found, ocp.metadata.StepMetadata)
    assert manager.item_metadata(step).state.tree.keys() == found.item_metadata.state.tree.keys()
    whole = found.item_metadata.state.tree["w"]
    return {
        "custom": found.custom_metadata,
        "committed": found.commit_timestamp_nsecs is not None,
        "leaves": sorted(found.item_metadata.state.tree),
        "w": [list(whole.shape), str(whole.dtype), list(whole.sharding.partition_spec)],
        "place": str(whole.directory),
    }


def tell(root: str, step: int = 2, **flags: Any) -> dict[str, Any]:
    def attempt() -> dict[str, Any]:
        with open_manager(alone(root, **flags)) as manager:
            return told(manager, step)

    return outcome(attempt)


def tell_of_all(root: str, backup: str) -> dict[str, Any]:
    save_state(f"{root}/saved")
    together("saved")
    found = {"memory": tell(f"{root}/saved"), "older": tell(f"{root}/saved", step=1)}
    found["nowhere"] = tell(f"{root}/saved", step=7)
    if rank() == 0:
        for node in range(NODES):
            share = Path(f"{root}/saved/node{node}/2")
            lay_out(share, f"{backup}/{JOB}/2031-01-01_00-00", step=2, node_rank=node)
        shutil.rmtree(folder(f"{root}/saved") / "2")
    together("process 0 has lost its share")
    found["one lost it"] = tell(f"{root}/saved")
    found["backup"] = tell(f"{root}/empty", backup_root=backup)
    found["empty"] = tell(f"{root}/empty")
    return found


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, list[dict[str, Any]]]]:
    with ram_disk() as root:
        (root / "backup").mkdir()
        results = run_job(tell_of_all, NODES, str(root), str(root / "backup"))
        yield {name: [process[name] for process in results] for name in results[0]}


@pytest.mark.parametrize("where", ["memory", "older", "one lost it", "backup"])
def test_custom_metadata_comes_back(found: dict[str, Any], where: str) -> None:
    step = 1 if where == "older" else 2
    assert same(found[where], "custom") == {**CUSTOM, "step": step}
    assert same(found[where], "committed", "w") == [True, [[16, 32], "bfloat16", ["data", "model"]]]
    assert ("backup" in found[where][0]["place"]) == (where == "backup")
    assert "node1" in found[where][0]["place"] or where != "one lost it"
    assert "/state" in same(found[where], "place")


@pytest.mark.parametrize("where", ["nowhere", "empty"])
def test_a_step_that_is_nowhere(found: dict[str, Any], where: str) -> None:
    assert same(found[where], "error") == "StepNotFoundError"


def test_it_is_what_orbax_tells(volume_root: Path, tmp_path: Path) -> None:
    """The same state saved by Orbax's own manager: the same tree, shapes, types, shardings."""
    state = {name: leaf for name, leaf in case_state(case_mesh(), 3).items() if name != "key"}
    state |= {"words": "text", "none": None, "number": 3}
    with ocp.CheckpointManager(tmp_path, item_names=("state",)) as orbax:
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state))
        orbax.save(3, args=args, custom_metadata=CUSTOM)
        orbax.wait_until_finished()
        theirs = orbax.metadata(3)
        assert isinstance(orbax.metadata(), ocp.metadata.RootMetadata)
    settings = alone_at(volume_root)
    with open_manager(settings) as manager:
        assert manager.save(3, args=args, force=True, custom_metadata=CUSTOM)
        manager.wait_until_finished()
        ours = manager.metadata(3)
        assert isinstance(manager.metadata(), ocp.metadata.RootMetadata)
    assert ours.custom_metadata == theirs.custom_metadata == CUSTOM
    trees = [found.item_metadata.state.tree for found in (ours, theirs)]
    assert jax.tree.structure(trees[0]) == jax.tree.structure(trees[1])
    for one, other in zip(*map(jax.tree.leaves, trees), strict=True):
        assert described(one) == described(other)


def alone_at(root: Path) -> Any:
    return mtc.CheckpointConfig(
        enable_multi_tier_checkpointing=True,
        enable_replicator=False,
        max_num_checkpoints_to_keep=2,
        multi_tier_checkpointing_backup_interval_minutes=30,
        local_checkpoint_directory=str(root),
        local_checkpoint_period=1,
        run_name=JOB,
    )


def described(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return (
        leaf.name,
        getattr(leaf, "shape", None),
        str(getattr(leaf, "dtype", None)),
        tuple(getattr(sharding, "partition_spec", ())),
    )


def test_metrics_are_refused_with_what_to_do_instead(volume_root: Path) -> None:
    with open_manager(alone_at(volume_root)) as manager:
        with pytest.raises(NotImplementedError, match="custom_metadata"):
            manager.metrics(3)
        with pytest.raises(NotImplementedError, match="latest_step"):
            manager.best_step()
