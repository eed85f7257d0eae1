"""What a process of a `ProcessGroup` knows about itself, and how it reports to the parent."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from typing import Any

__all__ = ["ChildProcess", "report", "this_process"]

PLACE_VARIABLE = "MTCHECKPOINT_TESTING_PROCESS"

_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChildProcess:
    """One process of a group.

    Attributes:
        rank: its place in the group, from 0: that of its result, and of its node directory.
        process_id: the id it has for ``jax.distributed``; other than `rank` when permuted.
        processes: size of the group.
        coordinator: ``host:port`` for ``jax.distributed``.
        events: the file that its reports go to.
    """

    rank: int
    process_id: int
    processes: int
    coordinator: str
    events: str


def this_process() -> ChildProcess | None:
    """This process' place in its group; None when it is not in one."""
    place = os.environ.get(PLACE_VARIABLE)
    return ChildProcess(**json.loads(place)) if place else None


def report(name: str, **fields: Any) -> None:
    """Reports an event to the parent, which may wait for it with `ProcessGroup.wait_for`.

    Without a parent it does nothing, so a loop may keep its reports when it runs by itself.

    Args:
        name: what happened.
        fields: details that JSON can carry.

    Example:
        >>> report("saved", step=20)
    """
    place = this_process()
    if place is None:
        return
    line = json.dumps({"name": name, "fields": fields}) + "\n"
    with _lock, open(place.events, "a", encoding="utf-8") as events:
        events.write(line)
