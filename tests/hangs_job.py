"""One process of a job of two that restores a backup; run as a program, to see how it ends.

Usage: hangs_job.py RANK ROOT PORT URL
"""

from __future__ import annotations

import sys

import gcsfs  # noqa: F401 - takes longer than the limit, which is not about that
from jax.experimental import multihost_utils
from programs import begin

import mtcheckpoint as mtc


def main(rank: int, root: str, port: str, url: str) -> None:
    config, mesh = begin(rank, root, port, backup_root=url)
    multihost_utils.sync_global_devices("both are there")
    with mtc.ReplicatedCheckpointManager(config, mesh=mesh) as manager:
        print("begun", flush=True)
        manager.restore_latest(None)
        print("came back", flush=True)


if __name__ == "__main__":
    number, *words = sys.argv[1:]
    main(int(number), *words)
