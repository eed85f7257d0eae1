"""One process of a job of two in which one freezes; run as a program, to see how it ends.

Usage: waits_job.py RANK ROOT PORT PHASE FROZEN
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import jax

import mtcheckpoint as mtc
from mtcheckpoint.testing import abstract_state, case_mesh, case_state

LIMIT_SECONDS = 2


def main(rank: int, root: str, port: str, phase: str, frozen: int) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, cluster_detection_method="deactivate")
    volume = Path(root) / f"node-{rank}"
    volume.mkdir()
    config = mtc.CheckpointConfig(
        enable_multi_tier_checkpointing=True,
        enable_replicator=False,
        max_num_checkpoints_to_keep=2,
        multi_tier_checkpointing_backup_interval_minutes=30,
        local_checkpoint_directory=str(volume),
        enable_continuous_checkpointing=True,
        run_name="job-a",
        timeout_secs=LIMIT_SECONDS,
    )
    mesh = case_mesh(2, 2)
    with mtc.ReplicatedCheckpointManager(config, mesh=mesh) as manager:
        manager.save(0, case_state(mesh, 0), force=True)
        manager.wait_until_finished()
        print("saved", flush=True)
        if rank == frozen:
            os.kill(os.getpid(), signal.SIGSTOP)
        if phase == "restore":
            manager.restore_latest(abstract_state(case_state(mesh, 0)))
        elif phase == "save":
            manager.save(1, case_state(mesh, 1), force=True)
            manager.wait_until_finished()
        else:
            for step in range(1, 10_000):
                manager.save(step, case_state(mesh, step))


if __name__ == "__main__":
    number, *words = sys.argv[1:]
    main(int(number), *words[:3], int(words[3]))
