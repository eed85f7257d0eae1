"""The other side of the handshake for tests: a clock to walk through, and a scripted replicator."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint._handshake.files import KEPT_PATTERNS, REPLICATOR_YAML

PEER_LIMIT_SECONDS = 20.0


@contextlib.contextmanager
def ram_directory() -> Iterator[Path]:
    """A directory on a real tmpfs where there is one."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="mtc-", dir=parent) as path:
        yield Path(path)


class StepClock:
    """A clock that only moves when someone sleeps, and then does what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[[], object]]] = []

    def at(self, moment: float, action: Callable[[], object]) -> None:
        """Has `action` done once `moment` (seconds) is reached."""
        self._due.append((moment, action))
        self._due.sort(key=lambda pair: pair[0])

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        # Time must pass even where a wait has next to nothing left of it.
        self.now += max(seconds, 1e-6)
        while self._due and self._due[0][0] <= self.now:
            self._due.pop(0)[1]()


def clear(volume: Path) -> None:
    """Clears a volume as mercilessly as the replicator does at the start of a run."""
    for path in volume.iterdir():
        if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in KEPT_PATTERNS):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def take_yaml(volume: Path) -> str:
    """Reads the YAML, clears the volume and deletes the YAML, in the replicator's order."""
    text = (volume / REPLICATOR_YAML).read_text()
    clear(volume)
    (volume / REPLICATOR_YAML).unlink()
    return text


class ThreadedReplicator:
    """Takes one YAML from a real volume in a thread of its own, then answers by `answer`.

    Attributes:
        text: the YAML that was taken.
        answered_at: when `answer` had returned, on the monotonic clock.
    """

    def __init__(self, volume: Path, answer: Callable[[Path], object], *, after: float = 0.0):
        self.text = ""
        self.answered_at = 0.0
        self._volume = volume
        self._answer = answer
        self._after = after
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="replicator")

    def __enter__(self) -> ThreadedReplicator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(PEER_LIMIT_SECONDS)
        assert not self._thread.is_alive()
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        try:
            yaml = self._volume / REPLICATOR_YAML
            deadline = Deadline.after(PEER_LIMIT_SECONDS)
            wait_for(lambda: yaml.exists() or None, deadline, "the client's YAML")
            threading.Event().wait(self._after)
            self.text = take_yaml(self._volume)
            self._answer(self._volume)
            self.answered_at = time.monotonic()
        except BaseException as fault:
            self._fault = fault


def make_share(volume: Path, name: str) -> Path:
    """A directory with a complete share, as far as the handshake looks."""
    share = volume / name
    (share / "state").mkdir(parents=True)
    (share / "state" / "manifest.ocdbt").write_bytes(b"x")
    return share


def lay_out(volume: Path, entries: dict[str, str]) -> None:
    """Makes the entries of a row of cases/markers.yaml."""
    for name, kind in entries.items():
        path = volume / name
        if kind == "dir":
            make_share(volume, name)
        elif kind.startswith("file:"):
            path.write_bytes(b"x" * int(kind.removeprefix("file:")))
        else:
            assert kind.startswith("link:")
            path.symlink_to(kind.removeprefix("link:").replace("{volume}", str(volume)))
