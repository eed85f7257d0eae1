"""The ``mtcheckpoint replicator`` command."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Sequence

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint._replicator.embedded import EmbeddedReplicator

__all__ = ["run"]

logger = logging.getLogger("mtcheckpoint.replicator")

_LOOK_SECONDS = 0.1


def run(
    node_directories: Sequence[str | os.PathLike[str]],
    backup: str | None,
    strict: bool,
    timeout_secs: float,
) -> int:
    """Serves the directories until SIGTERM or SIGINT; to be called on the main thread.

    The arguments are those of `EmbeddedReplicator`. Logs one line per event, to standard error
    unless the ``mtcheckpoint`` logger has a handler.

    Returns:
        The exit status: 0 after a signal, 1 when it could not start.
    """
    _log_to_standard_error()
    signalled = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: signalled.set())
    try:
        replicator = EmbeddedReplicator(
            node_directories, backup, strict=strict, timeout_secs=timeout_secs
        )
        replicator.start()
    except (OSError, ValueError) as error:
        logger.error("cannot start: %s", error)
        return 1
    names = ", ".join(os.fspath(directory) for directory in node_directories)
    logger.info("serving %s; backups go to %s", names, backup or "nowhere")
    wait_for(
        lambda: signalled.is_set() or None,
        Deadline.after(math.inf),
        "a signal",
        poll_seconds=_LOOK_SECONDS,
    )
    replicator.stop()
    logger.info("stopped")
    return 0


def _log_to_standard_error() -> None:
    # Not the root logger: what we import sets that up for its own purposes.
    root = logging.getLogger("mtcheckpoint")
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
