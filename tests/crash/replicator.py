"""The replicator of all nodes, as the driver holds it: a process that is started and killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint.testing import ProcessGroup
from tests.crash import worker

REPLICATOR_YAML = "replicator.yaml"
SECONDS_TO_START = 60.0
# Tenths of a second without a word.
LOOKS = 10


class Replicator:
    """The replicator of some volumes."""

    def __init__(self, volumes: Sequence[Path], backup: Path) -> None:
        self._volumes = volumes
        self._places = [[str(volume) for volume in volumes], str(backup)]
        self._group: ProcessGroup | None = None
        self._said = ""

    def start(self, die: list[Any] | None) -> None:
        """Starts it; `die`: the point at which it will end."""
        group = ProcessGroup(worker.replicate, 1, args=[*self._places, die], distributed=False)
        self._group = group
        wait_for(
            # It may come by its end at once: at what killed processes have left.
            lambda: "serving" in group.output(0) or not self.is_alive() or None,
            Deadline.after(SECONDS_TO_START),
            "the replicator",
        )
        if any((volume / REPLICATOR_YAML).exists() for volume in self._volumes):
            self._wait_until_it_rests()

    def _wait_until_it_rests(self) -> None:
        """It goes by what killed processes have left, before there is any training, and clears."""
        said = [self.log()]

        def look() -> bool | None:
            said.append(self.log())
            taken = not any((volume / REPLICATOR_YAML).exists() for volume in self._volumes)
            quiet = said[-1] == said[-1 - LOOKS] if len(said) > LOOKS else False
            return (taken and quiet) or not self.is_alive() or None

        wait_for(look, Deadline.after(SECONDS_TO_START), "the replicator to rest", poll_seconds=0.1)

    def is_alive(self) -> bool:
        return self._group is not None and self._group.poll() == [None]

    def kill(self) -> None:
        """Kills it, if it runs."""
        if self._group is not None:
            self._group.kill(0)
            self._said = self.log()
            self._group.close()
            self._group = None

    def log(self) -> str:
        """What it has said in all its lives."""
        return self._said + (self._group.output(0) if self._group is not None else "")
