"""The replicator for nodes on one machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from mtcheckpoint._clock import Clock, SystemClock
from mtcheckpoint._replicator.backup import BackupStore
from mtcheckpoint._replicator.node import Node, NodeStatus
from mtcheckpoint._replicator.rendezvous import Lobby
from mtcheckpoint._replicator.session import Options
from mtcheckpoint._replicator.volume import Volume

__all__ = ["EmbeddedReplicator", "NodeStatus"]

# A stopping node ends at its next look or between two files.
_STOP_SECONDS = 60.0


class EmbeddedReplicator:
    """Plays the replicator of multi-tier checkpointing for nodes on one machine.

    Each directory stands for the RAM disk of one node. Jobs talk to it only through files in these
    directories, so they may run in other processes. A run takes as many of the directories as its
    ``replicator.yaml`` files say, so several jobs can run at once. It can be killed at any moment
    and started again; jobs have to restart then.

    Use it as a context manager, or call `start` and `stop`.

    Args:
        node_directories: one directory a node, made if missing.
        backup: fsspec URL or local path of the bucket's root; backups of job J go to
            ``<backup>/J/<YYYY-MM-DD_HH-MM>/``. None: no backups are made or read.
        strict: step directories are taken as soon as they are seen, as the public replicator does,
            even half-written ones. By default one that is made in place is left alone until it is
            finished or has not changed for a second.
        timeout_secs: seconds that nodes wait for each other before ``replicator.errors`` says on
            whom: at the start of a run, for equal steps, after a lone restart. They go on waiting.
        clock: time, for tests.

    Raises:
        ValueError: no directory, one twice, or a limit that is not positive.
    """

    def __init__(
        self,
        node_directories: Sequence[str | os.PathLike[str]],
        backup: str | None = None,
        *,
        strict: bool = False,
        timeout_secs: float = 300.0,
        clock: Clock | None = None,
    ) -> None:
        paths = [Path(directory).absolute() for directory in node_directories]
        if not paths or len(set(paths)) != len(paths):
            raise ValueError(
                f"node_directories: wanted at least one, each once, found {list(map(str, paths))}"
            )
        if timeout_secs <= 0:
            raise ValueError(f"timeout_secs: must be more than 0, found {timeout_secs}")
        clock = clock or SystemClock()
        self._stopping = threading.Event()
        options = Options(
            clock=clock,
            store=None if backup is None else BackupStore(os.fspath(backup), clock),
            strict=strict,
            timeout_secs=timeout_secs,
            is_stopping=self._stopping.is_set,
        )
        lobby = Lobby()
        self._volumes = [Volume(path) for path in paths]
        self._nodes = [Node(volume, lobby, options) for volume in self._volumes]
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Makes the directories and begins to serve them; returns at once.

        Raises:
            OSError: a directory cannot be made.
            RuntimeError: it was started before.
        """
        if self._threads:
            raise RuntimeError("an EmbeddedReplicator can be started once; make a new one")
        for volume in self._volumes:
            volume.create()
        self._threads = [
            threading.Thread(target=node.serve, name=f"replicator-{index}", daemon=True)
            for index, node in enumerate(self._nodes)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends all runs and waits for the threads, at most a minute; safe to call twice.

        Nothing is cleaned up, as after a kill: the next start does that.
        """
        self._stopping.set()
        for thread in self._threads:
            thread.join(_STOP_SECONDS)

    def status(self) -> tuple[NodeStatus, ...]:
        """A snapshot of each node, in the order of the directories."""
        return tuple(node.status() for node in self._nodes)

    @property
    def replicated_step(self) -> int | None:
        """The newest step that all nodes of a run hold; with several runs the oldest of these."""
        steps = [status.replicated_step for status in self.status() if status.job is not None]
        known = [step for step in steps if step is not None]
        return min(known) if known and len(known) == len(steps) else None

    def __enter__(self) -> EmbeddedReplicator:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
