"""One process of a job of two in which one freezes; run as a program, to see how it ends.

Usage: waits_job.py RANK ROOT PORT PHASE FROZEN
"""

from __future__ import annotations

import os
import signal
import sys

from programs import begin

import mtcheckpoint as mtc
from mtcheckpoint.testing import abstract_state, case_state


def main(rank: int, root: str, port: str, phase: str, frozen: int) -> None:
    config, mesh = begin(rank, root, port)
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
