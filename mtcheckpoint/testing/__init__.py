"""What you need to test your own training loop on one machine: real processes, real failures.

Start the loop with `ProcessGroup` or `run_processes`, give its processes `NodeDirectories` in
memory as RAM disks, kill what you like, and check what comes back with `assert_state`.
"""

from __future__ import annotations

from mtcheckpoint.testing._directories import NodeDirectories, ram_disk
from mtcheckpoint.testing._process import Event, ProcessFailedError
from mtcheckpoint.testing._processes import ProcessGroup, run_processes
from mtcheckpoint.testing._reports import ChildProcess, report, this_process
from mtcheckpoint.testing._starting import preload
from mtcheckpoint.testing._states import abstract_state, assert_state, case_mesh, case_state

__all__ = [
    "ChildProcess",
    "Event",
    "NodeDirectories",
    "ProcessFailedError",
    "ProcessGroup",
    "abstract_state",
    "assert_state",
    "case_mesh",
    "case_state",
    "preload",
    "ram_disk",
    "report",
    "run_processes",
    "this_process",
]
