"""Places in the code at which a process can be made to end, as by a loss of power.

A spec is ``[point, before or after, which pass]``. The wrappers are put around the library's own
functions in the process that is to die; nothing of this is in the library.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# By name: module, class ("" for a function of the module), function.
TRAINING = {
    "write": ("mtcheckpoint._orbax", "ShareWriter", "write"),
    "seal": ("mtcheckpoint._saver", "", "sealed_files"),
    "seal of all": ("mtcheckpoint._saver", "", "_write_over"),
    "commit": ("mtcheckpoint._shares.volume", "CommittedSteps", "commit"),
    "finished": ("mtcheckpoint._saver", "Saver", "_finished"),
}
STARTING = {
    "handshake": ("mtcheckpoint._handshake.client", "", "run_handshake"),
    "read": ("mtcheckpoint._attempt", "", "read_state"),
}
# Only where a save is read that the replicator would clear.
SALVAGING = {
    "pin": ("mtcheckpoint._session", "", "pin"),
    "unsafe": ("mtcheckpoint._session", "Session", "mark_unsafe"),
    "safe": ("mtcheckpoint._session", "Session", "mark_safe"),
}
REPLICATOR = {
    "take": ("mtcheckpoint._replicator.volume", "Volume", "take"),
    "meta": ("mtcheckpoint._replicator.volume", "Volume", "write_meta"),
    "receive": ("mtcheckpoint._replicator.volume", "Volume", "receive"),
    "publish": ("mtcheckpoint._replicator.volume", "Volume", "_publish"),
    "link": ("mtcheckpoint._replicator.volume", "Volume", "link_restore"),
    "clean": ("mtcheckpoint._replicator.volume", "Volume", "clean_for_run"),
    "garbage": ("mtcheckpoint._replicator.volume", "Volume", "collect_garbage"),
    "copy": ("mtcheckpoint._replicator.volume", "", "copy_tree"),
    "upload data": ("mtcheckpoint._replicator.backup", "BackupStore", "upload_data"),
    "upload meta": ("mtcheckpoint._replicator.backup", "BackupStore", "upload_meta"),
    "move": ("mtcheckpoint._replicator.backup", "BackupStore", "_move_into_place"),
}
FULL_SECONDS = 0.5
# How often a run comes by, at least, where it starts.
PASSES = {"handshake": 1, "read": 1, "pin": 1, "unsafe": 2, "safe": 1}
ONCE_PER_NODE = ("link", "clean")
ALL = {**TRAINING, **STARTING, **SALVAGING, **REPLICATOR}


def arm(spec: Sequence[Any] | None) -> None:
    """Ends this process by SIGKILL at a point: before or after the function's nth pass."""
    if spec is None:
        return
    point, when, number = spec
    owner, name = place_of(point)
    original = getattr(owner, name)
    passes = iter(range(1, 1_000_000))

    @functools.wraps(original)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        now = next(passes) == number
        if now and when == "before":
            die()
        result = original(*args, **keywords)
        if now:
            die()
        return result

    setattr(owner, name, wrapped)


def place_of(point: str) -> tuple[Any, str]:
    """What a point's function is an attribute of, and its name there."""
    module_name, class_name, name = ALL[point]
    module = importlib.import_module(module_name)
    return (getattr(module, class_name) if class_name else module), name


def fill_the_disk(volume: Path, number: int) -> None:
    """From the nth share on, the volume is full for a while."""
    from mtcheckpoint._orbax import ShareWriter

    original = ShareWriter.write
    passes = iter(range(1, 1_000_000))
    filler = volume / "filler"

    @functools.wraps(original)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        if next(passes) == number:
            fill(filler)
            threading.Timer(FULL_SECONDS, filler.unlink).start()
        return original(*args, **keywords)

    ShareWriter.write = wrapped  # type: ignore[method-assign]


def fill(filler: Path) -> None:
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
