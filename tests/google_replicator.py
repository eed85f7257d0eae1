"""Google's public replicator on loopback: nodes of one machine, each its own process.

As a script it keeps one node running: ``google_replicator.py SOURCE ROOT RANK JOB PORT``. What the
platform does in a cluster (addresses, mounts) is replaced: peers are symbolic links to the other
nodes' volumes, and the coordinator's address lies in a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint.errors import WaitTimeoutError

SOURCE_VARIABLE = "MTCHECKPOINT_REPLICATOR_SRC"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CHILD_VARIABLE = "GOOGLE_REPLICATOR_CHILD"


class GoogleCluster:
    """Nodes served by one process each; the job's name is fixed at the start."""

    def __init__(self, root: Path, nodes: int, job: str) -> None:
        self.volumes = [root / f"node{index}" for index in range(nodes)]
        self.backup = root / "backup"
        self._root = root
        self._job = job
        self._port = _free_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for volume in [*self.volumes, self.backup / self._job, self._root / "run"]:
            volume.mkdir(parents=True, exist_ok=True)
        for rank in range(len(self.volumes)):
            arguments = [os.environ[SOURCE_VARIABLE], self._root, rank, self._job, self._port]
            with open(self._root / "run" / f"{rank}.log", "wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, *map(str, arguments)],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(timeout=30)
        self._processes = []

    def wait_until_watching(self, volumes: Sequence[Path]) -> None:
        from replicator_cluster import eventually

        for rank in (self.volumes.index(volume) for volume in volumes):
            eventually(lambda r=rank: self._watches(r) >= 2, f"rank {rank} to watch")

    def settings(self, *, backups: bool = False) -> dict[str, object]:
        # It takes fractions of a minute, so a backup is always due.
        minutes = 0.0001 if backups else 30
        return {"backup-interval-minutes": minutes, "master-port": self._port}

    def let_backup_interval_pass(self) -> None:
        """Always passed."""

    def _watches(self, rank: int) -> int:
        """How many directories the node watches: one for the YAML, one for steps."""
        try:
            pid = int((self._root / "run" / f"{rank}.pid").read_text())
            infos = list(Path(f"/proc/{pid}/fdinfo").iterdir())
            return sum(info.read_text().count("inotify wd:") for info in infos)
        except (OSError, ValueError):
            return 0


@contextlib.contextmanager
def google_cluster(root: Path, nodes: int, job: str = "job-a") -> Iterator[GoogleCluster]:
    cluster = GoogleCluster(root, nodes, job)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _supervise(pid_file: Path) -> None:
    """Runs the node again whenever it ends, as its container does, children included."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    environment = {**os.environ, _CHILD_VARIABLE: "1"}
    while True:
        child = subprocess.Popen(
            [sys.executable, *sys.argv], env=environment, start_new_session=True
        )
        try:
            pid_file.write_text(str(child.pid))
            child.wait()
        finally:
            _end_group(child)


def _end_group(leader: subprocess.Popen[bytes]) -> None:
    """Ends a process and its children, gently first: killed ones would leave semaphores behind."""

    def is_gone() -> bool | None:
        try:
            # Orphans come to us, because we are their subreaper.
            os.waitpid(-leader.pid, os.WNOHANG)
        except ChildProcessError:
            return True
        return None

    try:
        os.killpg(leader.pid, signal.SIGTERM)
        wait_for(is_gone, Deadline.after(2), "the children of the replicator")
    except ProcessLookupError:
        pass
    except WaitTimeoutError:
        os.killpg(leader.pid, signal.SIGKILL)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _platform(root: Path, rank: int) -> types.ModuleType:
    """The module that the replicator asks about its surroundings."""
    registry, mounts = root / "run" / "coordinator", root / "run" / f"{rank}.mounts"
    api = types.ModuleType("platform_api")

    def register(job: str, address: str) -> None:
        staging = registry.with_suffix(".tmp")
        staging.write_text(address)
        os.rename(staging, registry)

    def look_up(job: str) -> str:
        def look() -> str | None:
            return registry.read_text() if registry.exists() else None

        return wait_for(look, Deadline.after(3600), "the coordinator")

    def mount(name: str, address: str) -> None:
        node = int(address.rsplit(".", 1)[1]) - 1
        (mounts / name).symlink_to(root / f"node{node}", target_is_directory=True)

    def unmount_all() -> None:
        for link in mounts.iterdir():
            link.unlink()

    api.set_config = lambda config: None
    api.get_my_ip = lambda: f"127.0.1.{rank + 1}"
    api.register_coordinator = register
    api.get_coordinator = look_up
    api.unregister_coordinator = lambda job, address: registry.unlink(missing_ok=True)
    api.set_replication_peer = mount
    api.unmount_peer = lambda name: (mounts / name).unlink()
    api.unmount_all_peers = unmount_all
    api.mount_gcs_bucket = lambda job: None
    return api


def _prepare(source: str, root: Path, rank: int, job: str) -> None:
    scratch = {"REPL_VOLUME": "mounts", "PROMETHEUS_MULTIPROC_DIR": "metrics"}
    for variable, kind in scratch.items():
        folder = root / "run" / f"{rank}.{kind}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.environ[variable] = str(folder)
    os.environ["LOCAL_VOLUME"] = str(root / f"node{rank}")
    os.environ["BACKUP_VOLUME"] = str(root / "backup" / job)
    sys.path.insert(0, source)
    sys.modules["platform_api"] = _platform(root, rank)


def _run_node(rank: int) -> None:
    import common_main
    import coordinator
    import restore
    import sync

    bind = coordinator.ZMQAsyncServer.__init__
    coordinator.ZMQAsyncServer.__init__ = lambda self, address: bind(
        self, address.replace("0.0.0.0", f"127.0.1.{rank + 1}")
    )
    common_main.start_http_server = lambda *arguments, **keywords: None
    arguments = common_main.common_main()
    restore.run(*arguments)
    sync.run(*arguments)


def main() -> None:
    source, root, rank, job = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    _die_with_parent()
    if not os.environ.get(_CHILD_VARIABLE):
        _supervise(root / "run" / f"{rank}.pid")
    _prepare(source, root, rank, job)
    try:
        _run_node(rank)
    except Exception:
        import logging

        logging.critical("replicator failed", exc_info=True)
        raise


if __name__ == "__main__":
    main()
