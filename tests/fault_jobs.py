"""What the processes run whose replicator fails, at any point and in any way."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import restoring_jobs as jobs

import mtcheckpoint as mtc
from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint._handshake import files
from mtcheckpoint._replicator.hashing import share_digest
from mtcheckpoint.testing import abstract_state, case_mesh, case_state

NODES = 2
# Half of a share: a copy or an upload that somebody has ended in the middle.
HALF = b"half"


def volumes(root: str) -> list[Path]:
    return [Path(root) / f"node{rank}" for rank in range(NODES)]


@contextlib.contextmanager
def replicated(root: str) -> Iterator[None]:
    """A replicator for all nodes, in process 0; left on all processes at once."""
    folders = volumes(root)
    jobs.folder(root).mkdir(parents=True, exist_ok=True)
    jobs.together(f"{root} is there")
    with contextlib.ExitStack() as stack:
        if jobs.rank() == 0:
            stack.enter_context(mtc.EmbeddedReplicator(folders, f"{root}/backup"))
        yield
        jobs.together(f"{root} was left")
    jobs.together(f"{root} has no replicator")


def settings(root: str, **flags: Any) -> mtc.CheckpointConfig:
    changes = {"enable_continuous_checkpointing": True, "local_checkpoint_period": 0}
    return jobs.config(root, **{**changes, **flags})


def target() -> Any:
    return abstract_state(case_state(case_mesh(), 0))


class Lines(logging.Handler):
    """What the library has logged, as lines of level and text."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    @classmethod
    @contextlib.contextmanager
    def of_library(cls) -> Iterator[list[str]]:
        handler = cls()
        logging.getLogger("mtcheckpoint").addHandler(handler)
        try:
            yield handler.lines
        finally:
            logging.getLogger("mtcheckpoint").removeHandler(handler)


# The replicator stops in mid-training.


def stopped_in_training(root: str) -> dict[str, Any]:
    return {
        "raise": train_until_failure(f"{root}/raise", "raise"),
        "warn": train_until_failure(f"{root}/warn", "warn"),
        "seldom": train_until_failure(
            f"{root}/seldom",
            "raise",
            enable_continuous_checkpointing=False,
            local_checkpoint_period=1_000_000,
        ),
    }


def train_until_failure(root: str, on_save_error: str, **flags: Any) -> dict[str, Any]:
    """Process 1's replicator writes its last words after step 5; training goes on to step 300."""
    config = settings(root, on_save_error=on_save_error, **flags)
    found: dict[str, Any] = {"error": None, "saved": []}
    with replicated(root), Lines.of_library() as lines:
        try:
            with jobs.open_manager(config) as manager:
                manager.restore_latest(None)
                for step in range(300):
                    found["step"] = step
                    if manager.save(step, case_state(case_mesh(), step)):
                        found["saved"].append(step)
                    if step == 5:
                        manager.wait_until_finished()
                        fail_on_process_1(root)
                    # Steps of training need all processes.
                    jobs.together(f"{root} step {step}")
        except mtc.errors.ReplicatorFailedError as error:
            found["error"] = str(error)
        jobs.together(f"{root} over")
        found["lines"] = [line for line in lines if "has stopped" in line]
    return found


def fail_on_process_1(root: str) -> None:
    if jobs.rank() == 1:
        (jobs.folder(root) / files.FAILED_FILE).write_text("cannot reach the coordinator")


# The replicator dies at a named point of its work on step 2, and all come back.

Stage = Callable[[str], None]


def come_back(root: str, names: list[str]) -> dict[str, Any]:
    return {name: die_and_come_back(f"{root}/{n}", STAGES[name]) for n, name in enumerate(names)}


def die_and_come_back(root: str, stage: Stage) -> dict[str, Any]:
    """Step 1 is replicated, step 2 committed; then the replicator's work on it ends at `stage`."""
    with replicated(root), jobs.open_manager(settings(root)) as manager:
        assert manager.restore_latest(target()) is None
        jobs.save_all(manager, [1])
        wait_until_held(root, 1)
        jobs.together(f"{root} holds 1")
    with held_back(root):
        stage(root)
        jobs.together(f"{root} is as the replicator left it")
    with replicated(root), jobs.open_manager(settings(root)) as manager:
        found = jobs.outcome(lambda: jobs.summary(manager.restore_latest(target())))
        jobs.save_all(manager, [3])
        wait_until_held(root, 3)
        jobs.together(f"{root} holds 3")
        wait_for(
            lambda: not leftovers(root) or None,
            Deadline.after(30.0),
            "the clean-up",
            missing=lambda: leftovers(root),
        )
    return found


@contextlib.contextmanager
def held_back(root: str) -> Iterator[None]:
    """Step 2, committed by a run of the same job that no replicator serves."""
    config = settings(root, enable_replicator=False, max_num_checkpoints_to_keep=1)
    own = jobs.folder(root)
    with jobs.open_manager(config) as manager:
        jobs.save_all(manager, [2])
    assert (own / "2").is_dir()
    yield


def wait_until_held(root: str, step: int) -> None:
    """Until both nodes hold both shares."""

    def look() -> bool | None:
        found = [
            (v / files.data_name((v / share(step, r).meta).read_text())).is_dir()
            for v in volumes(root)
            for r in range(NODES)
            if (v / share(step, r).meta).exists()
        ]
        return True if found == [True] * NODES * NODES else None

    wait_for(look, Deadline.after(60.0), f"step {step} on both nodes of {root}")


def leftovers(root: str) -> list[str]:
    """What is neither a share nor a file of the protocol nor the newest step's."""
    own = jobs.folder(root)
    staged = [path.name for path in own.glob("mtcheckpoint.staging/*")]
    assert staged in ([], ["spare"]), "the memory for the next share may be there, nothing else"
    metas = {share(3, rank).meta for rank in range(NODES)}
    kept = {*metas, *(files.data_name((own / meta).read_text()) for meta in metas)}
    return [p.name for p in own.iterdir() if p.name not in kept and not is_of_protocol(p.name)]


def is_of_protocol(name: str) -> bool:
    return name.startswith(("replicator.", "mtcheckpoint.staging")) or name.endswith(".restore")


def share(step: int, rank: int) -> files.ShareName:
    return files.ShareName(job=jobs.JOB, step=step, node_rank=rank)


def hash_it(root: str) -> None:
    own = jobs.folder(root)
    os.rename(own / "2", own / share(2, jobs.rank()).save)


def name_it(root: str) -> str:
    """Gives the share its final name; nothing says yet whose it is."""
    own = jobs.folder(root)
    hash_it(root)
    save = own / share(2, jobs.rank()).save
    digest = share_digest(save, "orbax")
    os.rename(save, own / files.data_name(digest))
    return digest


def take_it(root: str) -> None:
    own = jobs.folder(root)
    (own / share(2, jobs.rank()).meta).write_text(name_it(root))


def take_it_on_one(root: str) -> None:
    take_it(root) if jobs.rank() == 0 else hash_it(root)


def copy_half(root: str) -> None:
    take_it(root)
    jobs.together(f"{root} taken")
    if jobs.rank() == 0:
        own, peer = volumes(root)
        data = files.data_name((own / share(2, 0).meta).read_text())
        staging = peer / f"{data}.n0.tmp"
        staging.mkdir()
        (staging / "manifest.ocdbt").write_bytes(HALF)


def copy_on_one(root: str) -> None:
    take_it(root)
    jobs.together(f"{root} taken")
    if jobs.rank() == 0:
        own, peer = volumes(root)
        meta = share(2, 0).meta
        data = files.data_name((own / meta).read_text())
        shutil.copytree(own / data, peer / data)
        shutil.copyfile(own / meta, peer / meta)


def back_up_half(root: str) -> None:
    """Half of a backup: one node's data is there, the other's is cut, and no ``.meta``."""
    take_it(root)
    own = jobs.folder(root)
    data = files.data_name((own / share(2, jobs.rank()).meta).read_text())
    backup = Path(root) / "backup" / jobs.JOB / "2026-01-01_00-00"
    shutil.copytree(own / data, backup / data)
    if jobs.rank() == 0:
        for path in (backup / data).rglob("*"):
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)


def replay_old(root: str) -> None:
    """Step 2 is whole; on one node a volume of long ago comes back beside it: only step 1."""
    replay = Path(root) / f"replay-{jobs.rank()}"
    own = jobs.folder(root)
    replay.mkdir()
    for path in [*own.glob("*.meta"), *own.glob("*.data")]:
        path.rename(replay / path.name)
    copy_on_one(root)
    jobs.together(f"{root} has step 2 only")
    if jobs.rank() == 1:
        for path in replay.iterdir():
            path.rename(own / path.name)


STAGES: dict[str, Stage] = {
    "before it takes the step": lambda root: None,
    "while it hashes": hash_it,
    "after the data, before the .meta": lambda root: name_it(root) and None,
    "one node is further": take_it_on_one,
    "during the copy to the peer": copy_half,
    "one node has its copy": copy_on_one,
    "during a backup": back_up_half,
    "an old volume comes back": replay_old,
}
