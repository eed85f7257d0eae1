"""The client's side of the handshake as a table: states, events, transitions. Pure: no I/O.

`client.py` scans the volume, asks `event_of` what the scan means in the present state, looks the
next state up in `TRANSITIONS`, and waits as `WAITS` says. docs/protocol.md shows `diagram()`.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import Literal

from mtcheckpoint._handshake.files import parse_share_name

__all__ = [
    "END_STATES",
    "TRANSITIONS",
    "WAITS",
    "Entry",
    "Event",
    "FileText",
    "Observation",
    "State",
    "Target",
    "Verdict",
    "Wait",
    "diagram",
    "event_of",
    "fresh_text",
    "only_nothing_found",
    "read_markers",
]


class State(enum.Enum):
    """Where the handshake stands. The value explains the state."""

    STALE_YAML = "replicator.yaml of an earlier run may still be there: ours must not overwrite it"
    WRITING = "the place is free: ours is written under another name and renamed"
    CONSUMPTION = "ours lies there until the replicator has taken it"
    REFUSAL = "the replicator wrote replicator.failed instead: a restarted one may yet take ours"
    MARKER = "ours was taken: the cluster agrees on a step, then a .restore marker appears"
    RESTORE = "the marker is a link to this node's share of the step to restore"
    NOTHING = "the marker is empty: the cluster and the backups hold nothing"
    BAD_MARKER = "the marker cannot be a valid answer"
    FAILED = "the replicator stopped working"
    TIMED_OUT = "nothing happened for too long"


class Event(enum.Enum):
    """What a look at the volume means. The value explains the event."""

    YAML_PRESENT = "replicator.yaml is there"
    YAML_ABSENT = "replicator.yaml is gone"
    YAML_WRITTEN = "replicator.yaml was renamed into place"
    FAILED_WRITTEN = "replicator.failed is new, even if empty"
    NO_MARKER = "no .restore marker of this node"
    MARKER_RESTORE = ".restore links to a share"
    MARKER_NOTHING = "an empty .restore of step 0"
    MARKER_BAD = "a .restore that no reader can make sense of"
    DEADLINE = "the wait's time is up"


TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State.STALE_YAML, Event.YAML_PRESENT): State.STALE_YAML,
    (State.STALE_YAML, Event.YAML_ABSENT): State.WRITING,
    (State.STALE_YAML, Event.DEADLINE): State.TIMED_OUT,
    (State.WRITING, Event.YAML_WRITTEN): State.CONSUMPTION,
    (State.CONSUMPTION, Event.YAML_PRESENT): State.CONSUMPTION,
    (State.CONSUMPTION, Event.YAML_ABSENT): State.MARKER,
    (State.CONSUMPTION, Event.FAILED_WRITTEN): State.REFUSAL,
    (State.CONSUMPTION, Event.DEADLINE): State.TIMED_OUT,
    (State.REFUSAL, Event.YAML_PRESENT): State.REFUSAL,
    (State.REFUSAL, Event.YAML_ABSENT): State.MARKER,
    (State.REFUSAL, Event.DEADLINE): State.FAILED,
    (State.MARKER, Event.NO_MARKER): State.MARKER,
    (State.MARKER, Event.MARKER_RESTORE): State.RESTORE,
    (State.MARKER, Event.MARKER_NOTHING): State.NOTHING,
    (State.MARKER, Event.MARKER_BAD): State.BAD_MARKER,
    (State.MARKER, Event.FAILED_WRITTEN): State.FAILED,
    (State.MARKER, Event.DEADLINE): State.TIMED_OUT,
}

END_STATES = frozenset(
    {State.RESTORE, State.NOTHING, State.BAD_MARKER, State.FAILED, State.TIMED_OUT}
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """How long a state may last, and what to say when it lasts longer.

    Attributes:
        what: what is waited for.
        hint: what to check.
        limit_secs: the state's own limit in seconds, if it is shorter than the caller's.
    """

    what: str
    hint: str
    limit_secs: float | None = None

    def seconds(self, timeout_secs: float) -> float:
        return timeout_secs if self.limit_secs is None else min(timeout_secs, self.limit_secs)


WAITS: Mapping[State, Wait] = {
    State.STALE_YAML: Wait(
        what="the replicator to take replicator.yaml of an earlier run",
        hint=(
            "No replicator runs on this node, or it is still busy with the earlier run: check the"
            " replicator's pod. If no replicator will ever come, delete the file"
        ),
    ),
    State.CONSUMPTION: Wait(
        what="the replicator to take replicator.yaml",
        hint="Check that a replicator runs on this node and watches this directory",
    ),
    # A replicator that died with the earlier run is back by then: a container is restarted at
    # once, then after 10 and 20 seconds.
    State.REFUSAL: Wait(
        what="a restarted replicator to take replicator.yaml",
        hint="Check the replicator's version and its log",
        limit_secs=30.0,
    ),
    State.MARKER: Wait(
        what="the replicator's .restore marker",
        hint=(
            "The replicator waits for all nodes without limit: check that every process of the job"
            " runs, that all say the same number of nodes, and the log of the replicator on rank 0"
        ),
    ),
}


class Target(enum.Enum):
    """What a link leads to. The value completes "the link leads to ..."."""

    DIRECTORY = "a directory of the volume"
    FILE = "a file, not a directory"
    MISSING = "nothing: the target does not exist"
    LOOP = "itself"
    OUTSIDE = "a place outside the volume"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry of the volume.

    Attributes:
        kind: what it is, not following links.
        size_bytes: size of a regular file.
        link: the text of a link.
        target: what a link leads to in the end.
        share: the directory that a link leads to, relative to the volume.
    """

    kind: Literal["directory", "file", "link", "other"]
    size_bytes: int = 0
    link: str = ""
    target: Target | None = None
    share: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FileText:
    """A file of error messages.

    Attributes:
        identity: changes whenever the file was replaced or written to.
        text: its content.
    """

    identity: tuple[int, ...]
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What one look at the volume saw.

    The files of errors must be read before the look for replicator.yaml: then, when that is still
    there, they were written before it vanished.

    Attributes:
        entries: the entries whose names end with ``.restore``.
        yaml_present: whether replicator.yaml is there.
        failed: replicator.failed, None when it is not there.
        errors: replicator.errors, None when it is not there.
    """

    entries: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
    yaml_present: bool = False
    failed: FileText | None = None
    errors: FileText | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the markers of a volume mean for one node.

    Attributes:
        event: MARKER_RESTORE, MARKER_NOTHING, MARKER_BAD or NO_MARKER.
        step: the step to restore.
        share: its directory, relative to the volume.
        entry: name of the entry that decided.
        fault: why it is bad.
    """

    event: Event
    step: int | None = None
    share: str = ""
    entry: str = ""
    fault: str = ""


def event_of(
    state: State, seen: Observation, before: Observation, *, job: str, node_rank: int
) -> Event:
    """What `seen` means in `state`.

    Args:
        state: a state that waits.
        seen: the newest look at the volume.
        before: the look that tells stale files of errors from live ones: the last one before ours
            was written, and once it was taken the last one that still saw it.
        job: job name, as written.
        node_rank: rank of this node.
    """
    failed_written = fresh_text(seen.failed, before.failed) is not None
    if state is State.MARKER:
        if failed_written:
            return Event.FAILED_WRITTEN
        return read_markers(seen.entries, job, node_rank).event
    if not seen.yaml_present:
        return Event.YAML_ABSENT
    if state is State.CONSUMPTION and failed_written:
        return Event.FAILED_WRITTEN
    return Event.YAML_PRESENT


def fresh_text(now: FileText | None, before: FileText | None) -> str | None:
    """What was written to a file of errors since `before`; None when nothing was."""
    if now is None or (before is not None and now.identity == before.identity):
        return None
    if before is not None and now.text.startswith(before.text):
        return now.text[len(before.text) :]
    return now.text


def only_nothing_found(errors: str) -> bool:
    """True when replicator.errors only says what it says at every first start."""
    lines = [line for line in errors.splitlines() if line.strip()]
    return all("no valid checkpoints" in line.lower() for line in lines)


# Our job's marker in every spelling that is not today's: step and rank may be negative or no
# numbers, the worker may be a GPU (`-g0`). Names of other shapes are nobody's markers.
_NEARLY_A_MARKER = re.compile(
    r"(?P<job>.+)-s-?[^-]*-n-?[^-]*-(?P<worker>[a-z]-?[0-9]*)\.restore", re.DOTALL
)


def read_markers(entries: Mapping[str, Entry], job: str, node_rank: int) -> Verdict:
    """What the ``.restore`` entries mean for node `node_rank` of `job`.

    This node's marker with the highest step decides, good or bad: an older step beside a bad newer
    one is never taken in silence. Markers of other jobs are not looked at. Those of our job that
    are another node's or misspelt are a fault when this node has no marker of its own.
    """
    own = {
        share.step: name
        for name in sorted(entries)
        if (share := parse_share_name(name, "restore")) is not None
        and (share.job, share.node_rank, share.worker) == (job, node_rank, 0)
        and share.restore == name
    }
    if own:
        step = max(own)
        return _read_own(own[step], step, entries[own[step]])
    for name in sorted(entries):
        fault = _foreign_fault(name, job, node_rank)
        if fault:
            return Verdict(event=Event.MARKER_BAD, entry=name, fault=fault)
    return Verdict(event=Event.NO_MARKER)


def _read_own(name: str, step: int, entry: Entry) -> Verdict:
    if entry.kind == "link" and entry.target is Target.DIRECTORY:
        return Verdict(event=Event.MARKER_RESTORE, step=step, share=entry.share, entry=name)
    if entry.kind == "file" and entry.size_bytes == 0 and step == 0:
        return Verdict(event=Event.MARKER_NOTHING, entry=name)
    return Verdict(event=Event.MARKER_BAD, step=step, entry=name, fault=_own_fault(entry))


def _own_fault(entry: Entry) -> str:
    if entry.kind == "link":
        leads_to = entry.target.value if entry.target is not None else "an unknown place"
        return f"it links to {entry.link!r}, which leads to {leads_to}"
    if entry.kind == "file" and entry.size_bytes == 0:
        return "it is an empty file, which only step 0 can be (nothing to restore)"
    if entry.kind == "file":
        return f"it is a file of {entry.size_bytes} bytes; expected a link, or an empty file"
    return f"it is a {entry.kind}; expected a link to <hash>.data, or an empty file"


def _foreign_fault(name: str, job: str, node_rank: int) -> str:
    """Why a marker that is not this node's is a fault; empty when it is none of our business."""
    expected = f"expected {job}-s<step>-n{node_rank}-w0.restore"
    share = parse_share_name(name, "restore")
    if share is None:
        nearly = _NEARLY_A_MARKER.fullmatch(name)
        ours = nearly is not None and nearly["job"] == job
        return f"it is not a marker's name; {expected}" if ours else ""
    if share.job != job:
        return ""
    if share.node_rank != node_rank:
        return (
            f"it is for node {share.node_rank}; {expected}: two nodes share this volume or a rank"
        )
    return f"it is for worker {share.worker}, or misspelt; {expected}"


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.STALE_YAML.name}"]
    for (state, event), following in TRANSITIONS.items():
        if following is not state:
            lines.append(f"    {state.name} --> {following.name}: {event.name}")
    lines += [f"    {state.name} --> [*]" for state in State if state in END_STATES]
    return "\n".join(lines)
