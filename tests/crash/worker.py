"""What the processes of the crash harness run: a training process, and a replicator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.crash import points

JOB = "job-a"
DEVICES = 4
STEP_SECONDS = 0.01
# Two runs may save the same step: their states differ in every element.
RUN_STRIDE = 10_000


def train(root: str, options: dict[str, Any]) -> None:
    """Restores, tells what came back, and saves all the time until the file ``enough`` is there."""
    import jax

    import mtcheckpoint as mtc
    from mtcheckpoint._shares import spares
    from mtcheckpoint.testing import abstract_state, case_mesh, case_state, report, this_process

    place = this_process()
    assert place is not None
    spares._LEAST_BYTES = 1  # small shares, too, are written into the memory of those before
    points.arm(options["die"] if options["victim"] == place.rank else None)
    if options["full"] is not None and options["victim"] == place.rank:
        points.fill_the_disk(Path(root) / f"node{place.rank}", options["full"])
    every_step_is_backed_up()
    settings = mtc.CheckpointConfig(
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=f"{root}/node{place.rank}",
        multi_tier_checkpointing_backup_interval_minutes=30,
        enable_continuous_checkpointing=True,
        backup_root=f"{root}/backup",
        run_name=JOB,
        timeout_secs=options["timeout_secs"],
        enable_replicator=options["replicated"],
        # A disk that is full for a while, and no more than that.
        on_save_error="warn" if options["full"] is not None else "raise",
        save_error_budget=1000,
        max_num_checkpoints_to_keep=None if options["replicated"] else 2,
    )
    nodes = jax.process_count()
    mesh = case_mesh(min(nodes, 2), DEVICES // min(nodes, 2))
    with mtc.ReplicatedCheckpointManager(settings, mesh=mesh) as manager:
        try:
            restored = manager.restore_latest(abstract_state(case_state(mesh, 0)))
        except mtc.errors.MtCheckpointError as error:
            report("restored", error=type(error).__name__, text=str(error))
            return
        report("restored", **facts(restored))
        first = restored.step + 1 if restored is not None else 0
        train_on(manager, mesh, first, root, options["run"])


def every_step_is_backed_up() -> None:
    """An interval between backups that our configuration does not take."""
    from mtcheckpoint import _topology

    settings = _topology.replicator_settings

    def changed(*arguments: Any) -> dict[str, Any]:
        kept = settings(*arguments)
        del kept["backup-interval-minutes"]
        return {**kept, "backup-interval-steps": 1}

    _topology.replicator_settings = changed


def facts(restored: Any) -> dict[str, Any]:
    """What came back; the elements are compared here, where they are."""
    from mtcheckpoint.testing import assert_state

    if restored is None:
        return {"step": None}
    wrong = ""
    run = restored.extras[0]["run"]
    try:
        assert_state(restored.state, restored.step + RUN_STRIDE * run)
    except AssertionError as error:
        wrong = str(error)
    return {
        "step": restored.step,
        "tier": restored.tier,
        "wrong": wrong,
        "extras": list(restored.extras),
        "passed_over": [[p.step, p.source, p.reason] for p in restored.report.passed_over],
        "left_out": list(restored.report.left_out),
    }


def train_on(manager: Any, mesh: Any, first: int, root: str, run: int) -> None:
    import jax

    from mtcheckpoint._coordination import job_coordinator
    from mtcheckpoint.testing import case_state, report

    coordinator = job_coordinator("enough", timeout_secs=60)
    enough = Path(root) / "enough"
    step_of_training = training_step(mesh)
    told: int | None = None
    for step in range(first, first + 1_000_000):
        if coordinator.lead(f"enough/{step}", enough.exists):
            break
        step_of_training()
        threading.Event().wait(STEP_SECONDS)
        extras = {"rank": jax.process_index(), "step": step, "run": run}
        # Reported before: it may be committed, and this process dead, when `save` returns.
        report("about to save", step=step)
        manager.save(step, case_state(mesh, step + RUN_STRIDE * run), extras=extras)
        latest = manager.latest_step()
        if latest is not None and latest != told and latest >= first:
            told = latest
            report("committed", step=latest)
    manager.wait_until_finished()
    report("committed", step=manager.latest_step())


def training_step(mesh: Any) -> Callable[[], None]:
    """A step for which all processes are needed, so that none runs ahead."""
    import jax
    import jax.numpy as jnp

    spread = jax.NamedSharding(mesh, jax.P(("data", "model")))
    ones = jax.make_array_from_callback((DEVICES,), spread, lambda index: jnp.ones(1))
    total = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, jax.P()))

    def step() -> None:
        assert int(total(ones)) == DEVICES

    return step


def replicate(directories: list[str], backup: str, die: list[Any] | None) -> int:
    from mtcheckpoint._replicator.main import run

    points.arm(die)
    return run(directories, backup, False, 30.0)
