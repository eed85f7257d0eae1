"""One process of a job of two that restores a backup; run as a program, to see how it ends.

Usage: hangs_job.py RANK ROOT PORT URL
"""

from __future__ import annotations

import sys
from pathlib import Path

import gcsfs  # noqa: F401 - takes longer than the limit, which is not about that
import jax
from jax.experimental import multihost_utils

import mtcheckpoint as mtc
from mtcheckpoint.testing import case_mesh

LIMIT_SECONDS = 2


def main(rank: int, root: str, port: str, url: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, cluster_detection_method="deactivate")
    volume = Path(root) / f"node{rank}"
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
        backup_root=url,
    )
    mesh = case_mesh(2, 2)
    multihost_utils.sync_global_devices("both are there")
    with mtc.ReplicatedCheckpointManager(config, mesh=mesh) as manager:
        print("begun", flush=True)
        manager.restore_latest(None)
        print("came back", flush=True)


if __name__ == "__main__":
    number, *words = sys.argv[1:]
    main(int(number), *words)
