"""Jobs of two processes that run as programs, to see how they end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 2


def start(
    program: str,
    words: Sequence[Any],
    output: Path,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts one process; what it writes goes to `output`."""
    with open(output, "wb") as file:
        return subprocess.Popen(
            [sys.executable, program, *map(str, words)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **(environment or {}),
                "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            },
        )


def begin(rank: int, root: str, port: str, **changes: Any) -> tuple[Any, Any]:
    """In such a process: joins the job; the configuration and the mesh of its manager."""
    import jax

    import mtcheckpoint as mtc
    from mtcheckpoint.testing import case_mesh

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
        **changes,
    )
    return config, case_mesh(2, 2)
