"""Everything that this library raises, in one tree.

    MtCheckpointError
    ├── ConfigError (ValueError)               a flag, or two that contradict each other
    ├── TopologyError (ValueError)             ranks, slices or replicas that do not fit
    ├── WaitTimeoutError (TimeoutError)        something did not happen in time; says what
    ├── CoordinationError (RuntimeError)       processes that should agree could not
    ├── HandshakeError (RuntimeError)          the replicator's side of the protocol went wrong
    │   ├── ReplicatorFailedError          the replicator wrote ``replicator.failed``
    │   └── MarkerError (ValueError)       an entry of the volume that makes no sense
    ├── SaveError (RuntimeError)               a save failed, on this process or on another
    ├── ShareError (ValueError)                one node's share of a step is damaged or not ours
    ├── RestoreError (RuntimeError)            no candidate could be restored
    │   ├── StepNotFoundError (FileNotFoundError)  an explicit step that is nowhere
    │   ├── TierUnreadableError (OSError)      a place that could not be read
    │   └── StructureMismatchError (ValueError)  the tree or shapes asked for are not the saved ones
    └── ReplicatorConfigError (ValueError)     what the embedded replicator refuses

A message says what happened, where, what was expected and found, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = [
    "ConfigError",
    "CoordinationError",
    "HandshakeError",
    "MarkerError",
    "MtCheckpointError",
    "ReplicatorConfigError",
    "ReplicatorFailedError",
    "RestoreError",
    "SaveError",
    "ShareError",
    "StepNotFoundError",
    "StructureMismatchError",
    "TierUnreadableError",
    "TopologyError",
    "WaitTimeoutError",
]


class MtCheckpointError(Exception):
    """Base of every error of this library."""


class ConfigError(MtCheckpointError, ValueError):
    """A configuration that cannot work.

    Attributes:
        fields: names of the fields at fault, one or two.
    """

    def __init__(self, message: str, *, fields: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.fields = tuple(fields)


class TopologyError(MtCheckpointError, ValueError):
    """Ranks, slices or replicas that do not fit each other."""


class WaitTimeoutError(MtCheckpointError, TimeoutError):
    """Something did not happen in time.

    Attributes:
        what: what was waited for.
        seconds: how long, in seconds.
        missing: the processes, hosts or files that were missing, by name.
    """

    def __init__(
        self, what: str, *, seconds: float, missing: Iterable[str] = (), hint: str = ""
    ) -> None:
        self.what = what
        self.seconds = seconds
        self.missing = tuple(missing)
        names = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        tail = f". {hint}" if hint else ""
        super().__init__(f"waited {seconds:.1f} s for {what}{names}{tail}")


class CoordinationError(MtCheckpointError, RuntimeError):
    """The processes of the job could not agree.

    Attributes:
        processes: indices of the processes at fault.
    """

    def __init__(self, message: str, *, processes: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.processes = tuple(processes)


class HandshakeError(MtCheckpointError, RuntimeError):
    """The replicator's side of the protocol went wrong."""


class ReplicatorFailedError(HandshakeError):
    """The replicator wrote ``replicator.failed``: it stopped working.

    Attributes:
        text: what the replicator wrote there, possibly empty.
    """

    def __init__(self, message: str, *, text: str) -> None:
        super().__init__(message)
        self.text = text


class MarkerError(HandshakeError, ValueError):
    """An entry of the volume that cannot be a valid answer of the replicator.

    Attributes:
        entry: name of the entry.
    """

    def __init__(self, message: str, *, entry: str) -> None:
        super().__init__(message)
        self.entry = entry


class SaveError(MtCheckpointError, RuntimeError):
    """A save failed.

    Attributes:
        step: the step that was being saved.
        processes: indices of the processes on which it failed.
    """

    def __init__(self, message: str, *, step: int, processes: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.processes = tuple(processes)


class ShareError(MtCheckpointError, ValueError):
    """One node's share of a step is damaged, incomplete or not ours.

    Attributes:
        place: where the share lies.
    """

    def __init__(self, message: str, *, place: str) -> None:
        super().__init__(message)
        self.place = place


class RestoreError(MtCheckpointError, RuntimeError):
    """No candidate could be restored."""


class StepNotFoundError(RestoreError, FileNotFoundError):
    """A step that was asked for is nowhere.

    Attributes:
        step: the step asked for.
        available: the steps that are there, oldest first.
    """

    def __init__(self, message: str, *, step: int, available: Sequence[int]) -> None:
        super().__init__(message)
        self.step = step
        self.available = tuple(available)


class TierUnreadableError(RestoreError, OSError):
    """A place could not be read, so nobody knows whether it holds a checkpoint.

    Attributes:
        place: the folder or URL.
    """

    def __init__(self, message: str, *, place: str) -> None:
        super().__init__(message)
        self.place = place


class StructureMismatchError(RestoreError, ValueError):
    """The tree or the shapes asked for are not the saved ones.

    Attributes:
        paths: the leaves that differ.
    """

    def __init__(self, message: str, *, paths: Sequence[str]) -> None:
        super().__init__(message)
        self.paths = tuple(paths)


class ReplicatorConfigError(MtCheckpointError, ValueError):
    """A ``replicator.yaml`` that the embedded replicator refuses.

    Attributes:
        key: the key at fault, if it is one.
    """

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key
