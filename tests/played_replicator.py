"""A replicator played on real files, slower or later than a real one, for one volume.

It keeps the published order: takes the YAML, answers "nothing to restore", and from some moment on
takes each directory of digits that is *moved in* while it watches. What came before it never sees.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import handshake_peer
from inotify import MOVED_TO, Watch

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint._handshake import files

LIMIT_SECONDS = 60.0


class PlayedReplicator:
    """Serves one volume in a thread until it is left.

    Args:
        volume: the volume.
        node_rank: its rank.
        job: name of the job.
        watch_after: seconds from the answer until it begins to watch.
        seconds_a_step: how long it takes to hash a step that it has taken.

    Attributes:
        taken: the steps that it took, in order.
        least_free_bytes: the least free space of the volume that it saw.
    """

    def __init__(
        self,
        volume: Path,
        node_rank: int,
        *,
        job: str = "job-a",
        watch_after: float = 0.0,
        seconds_a_step: float = 0.0,
    ) -> None:
        self.taken: list[int] = []
        self.least_free_bytes = 1 << 62
        self._volume = volume
        self._node_rank = node_rank
        self._job = job
        self._watch_after = watch_after
        self._seconds_a_step = seconds_a_step
        self._leave = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="played-replicator", daemon=True)

    def __enter__(self) -> PlayedReplicator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join(LIMIT_SECONDS)
        assert not self._thread.is_alive()
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        try:
            self._answer()
            self._leave.wait(self._watch_after)
            with Watch(self._volume) as watch:
                while not self._leave.is_set():
                    self._take_all(watch)
        except BaseException as fault:
            self._fault = fault

    def _answer(self) -> None:
        yaml = self._volume / files.REPLICATOR_YAML
        wait_for(
            lambda: yaml.exists() or self._leave.is_set() or None,
            Deadline.after(LIMIT_SECONDS),
            "the client's YAML",
        )
        if self._leave.is_set():
            return
        handshake_peer.take_yaml(self._volume)
        (self._volume / files.PRERESTORE_FILE).write_text("{}")
        (self._volume / self._share(0).restore).touch()

    def _share(self, step: int) -> files.ShareName:
        return files.ShareName(job=self._job, step=step, node_rank=self._node_rank)

    def _take_all(self, watch: Watch) -> None:
        for change in watch.changes(timeout_secs=0.02):
            if change.mask & MOVED_TO and files.is_step_name(change.name):
                self._take(int(change.name))
        self._note_free_bytes()

    def _take(self, step: int) -> None:
        share = self._share(step)
        # Raises when somebody has deleted or renamed the step: that ends a real one too.
        os.rename(self._volume / str(step), self._volume / share.save)
        self.taken.append(step)
        left = Deadline.after(self._seconds_a_step)
        while not left.passed() and not self._leave.wait(min(0.02, left.remaining())):
            self._note_free_bytes()
        digest = f"D{step:064x}"
        os.rename(self._volume / share.save, self._volume / files.data_name(digest))
        (self._volume / share.meta).write_text(digest)
        for old in [*self._volume.glob("*.data"), *self._volume.glob("*.meta")]:
            if old.name not in (files.data_name(digest), share.meta):
                shutil.rmtree(old) if old.is_dir() else old.unlink()

    def _note_free_bytes(self) -> None:
        found = os.statvfs(self._volume)
        self.least_free_bytes = min(self.least_free_bytes, found.f_bavail * found.f_frsize)


@contextmanager
def played_replicators(
    volumes: Sequence[Path], *, watch_after: Sequence[float] = (), seconds_a_step: float = 0.0
) -> Iterator[list[PlayedReplicator]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                PlayedReplicator(
                    volume,
                    rank,
                    watch_after=watch_after[rank] if watch_after else 0.0,
                    seconds_a_step=seconds_a_step,
                )
            )
            for rank, volume in enumerate(volumes)
        ]
