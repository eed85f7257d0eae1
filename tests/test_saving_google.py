"""A save at once after the restore, opposite Google's replicator, over several restarts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import saving_jobs
from google_replicator import SOURCE_VARIABLE, GoogleCluster, google_cluster

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint._handshake import files
from mtcheckpoint.testing import run_processes

pytestmark = [
    pytest.mark.google_replicator,
    pytest.mark.skipif(SOURCE_VARIABLE not in os.environ, reason=f"{SOURCE_VARIABLE} is not set"),
]


def test_the_first_step_is_taken_by_both_nodes_each_time(volume_root: Path) -> None:
    with google_cluster(volume_root, 2) as cluster:
        previous = None
        for step in (1, 11, 21, 31, 41):
            restored = run_processes(
                saving_jobs.save_once, 2, devices=1, args=[str(volume_root), step]
            )
            assert restored == [previous] * 2
            wait_for(
                lambda s=step: (
                    all(_holds(volume, rank, s) for rank, volume in _numbered(cluster)) or None
                ),
                Deadline.after(30.0),
                f"both nodes to hold step {step}",
                missing=lambda: [str(sorted(os.listdir(volume))) for volume in cluster.volumes],
            )
            previous = step


def _numbered(cluster: GoogleCluster) -> list[tuple[int, Path]]:
    return list(enumerate(cluster.volumes))


def _holds(volume: Path, rank: int, step: int) -> bool:
    meta = volume / files.ShareName(job="job-a", step=step, node_rank=rank).meta
    return meta.exists() and (volume / files.data_name(meta.read_text())).is_dir()
