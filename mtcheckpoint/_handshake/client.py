"""Drives the handshake: scans the volume, writes ``replicator.yaml``, waits for the answer."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mtcheckpoint._clock import Clock, Deadline, SystemClock, wait_for
from mtcheckpoint._handshake import protocol
from mtcheckpoint._handshake.files import (
    ERRORS_FILE,
    FAILED_FILE,
    PRERESTORE_FILE,
    REPLICATOR_YAML,
    yaml_text,
)
from mtcheckpoint._handshake.protocol import Entry, Event, FileText, Observation, State, Target
from mtcheckpoint.errors import (
    HandshakeError,
    MarkerError,
    ReplicatorFailedError,
    WaitTimeoutError,
)

__all__ = ["HandshakeResult", "ReplicatorWatch", "check_volume", "run_handshake"]

_log = logging.getLogger("mtcheckpoint.handshake")

# Messages quote this much of the replicator's text, from its end.
_QUOTED_CHARACTERS = 2000

# replicator.prerestore has a line or two.
_PRERESTORE_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HandshakeResult:
    """The replicator's answer.

    Attributes:
        step: the step to restore; None: there is nothing.
        share: directory of this node's share of it, inside the volume, links resolved.
        restore_backup: name of the backup that it was fetched from, if it was.
        errors: what the replicator wrote to replicator.errors in this handshake. At a first start
            that there are no valid checkpoints: not a fault.
        seconds: time spent, in seconds, by the state that waited.
    """

    step: int | None
    share: Path | None
    restore_backup: str | None
    errors: str
    seconds: Mapping[str, float]


def run_handshake(
    volume: Path,
    settings: Mapping[str, Any],
    *,
    job: str,
    node_rank: int,
    timeout_secs: float,
    clock: Clock | None = None,
) -> HandshakeResult:
    """Hands `settings` to the replicator and waits for the step that the cluster agreed on.

    Call on every process of the job, at about the same time; a node that does so alone breaks the
    run of all. The replicator empties the volume of all but ``*.meta`` and ``*.data``.

    Args:
        volume: the RAM disk.
        settings: keys of replicator.yaml.
        job: the ``job-name`` in it.
        node_rank: the ``node-rank`` in it.
        timeout_secs: limit of each single wait, in seconds.
        clock: the machine's when None.

    Raises:
        HandshakeError: the volume cannot be used; nothing was written.
        ReplicatorFailedError: the replicator wrote replicator.failed in this handshake.
        MarkerError: the replicator's marker makes no sense.
        WaitTimeoutError: the replicator did not answer in time.
    """
    check_volume(volume)
    handshake = _Handshake(volume, settings, job, node_rank, timeout_secs, clock or SystemClock())
    return handshake.run()


def check_volume(volume: Path) -> None:
    """Refuses a volume that is missing, not a directory, or not writable for this process.

    Raises:
        HandshakeError: says which, and what to do.
    """
    hint = "check local_checkpoint_directory and the pod's mount of the RAM disk"
    try:
        mode = volume.stat().st_mode
        read_only = os.statvfs(volume).f_flag & os.ST_RDONLY
    except OSError as error:
        raise HandshakeError(
            f"the RAM disk {volume} cannot be used: {error.strerror}; {hint}"
        ) from error
    if not stat.S_ISDIR(mode):
        raise HandshakeError(f"the RAM disk {volume} is not a directory; {hint}")
    if read_only:
        raise HandshakeError(f"the RAM disk {volume} is mounted read-only: mount it writable")
    if not os.access(volume, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise HandshakeError(
            f"the RAM disk {volume} (mode {stat.S_IMODE(mode):04o}) is not writable for user"
            f" {os.geteuid()}: run the job as the owner of the directory"
        )


class ReplicatorWatch:
    """Looks at the replicator's files of errors during the run. Deletes nothing.

    Make it after the handshake: what lies in the volume then belongs to this run. Not for use from
    several threads at once.
    """

    def __init__(self, volume: Path, *, seen_errors: str = "") -> None:
        """`seen_errors`: what was reported already (`HandshakeResult.errors`)."""
        self._volume = volume
        self._reported = FileText(identity=(), text=seen_errors)

    def check(self) -> None:
        """Logs new text of replicator.errors, once.

        Raises:
            ReplicatorFailedError: replicator.failed is there, even if it is empty.
        """
        self._report_errors()
        failed = _read_text(self._volume / FAILED_FILE, None)
        if failed is not None:
            raise _failed_error(self._volume, failed.text, self._reported.text)

    def _report_errors(self) -> None:
        errors = _read_text(self._volume / ERRORS_FILE, self._reported)
        fresh = protocol.fresh_text(errors, self._reported)
        if errors is None or fresh is None:
            return
        self._reported = errors
        if fresh.strip():
            _log.error("%s: %s", self._volume / ERRORS_FILE, _quoted(fresh))


class _Handshake:
    """One run through the table of `protocol`."""

    def __init__(
        self,
        volume: Path,
        settings: Mapping[str, Any],
        job: str,
        node_rank: int,
        timeout_secs: float,
        clock: Clock,
    ) -> None:
        self._volume = volume
        self._settings = settings
        self._job = job
        self._node_rank = node_rank
        self._timeout_secs = timeout_secs
        self._clock = clock
        self._state = State.STALE_YAML
        self._waited_in = self._state
        self._seconds: dict[str, float] = {}
        self._seen = Observation()
        # What was there before tells stale files of errors from live ones.
        self._before = Observation()

    def run(self) -> HandshakeResult:
        while self._state not in protocol.END_STATES:
            event = self._write() if self._state is State.WRITING else self._wait()
            following = protocol.TRANSITIONS[self._state, event]
            _log.debug("%s: %s, %s", self._state.name, event.name, following.name)
            self._state = following
        return self._conclude()

    def _write(self) -> Event:
        self._before = self._seen
        text = yaml_text(self._settings)
        _log.info("handing replicator.yaml to the replicator in %s:\n%s", self._volume, text)
        _write_renamed(self._volume / REPLICATOR_YAML, text)
        return Event.YAML_WRITTEN

    def _wait(self) -> Event:
        """The event that ends the present state."""
        state, wait = self._state, protocol.WAITS[self._state]
        deadline = Deadline.after(wait.seconds(self._timeout_secs), self._clock)
        start = self._clock.monotonic()
        self._waited_in = state
        try:
            return wait_for(self._look, deadline, wait.what)
        except WaitTimeoutError:
            return Event.DEADLINE
        finally:
            self._seconds[state.name.lower()] = self._clock.monotonic() - start

    def _look(self) -> Event | None:
        """Scans the volume: an event that leads to another state, or None."""
        previous, self._seen = self._seen, _scan(self._volume, self._seen)
        event = protocol.event_of(
            self._state, self._seen, self._before, job=self._job, node_rank=self._node_rank
        )
        if event is Event.YAML_ABSENT and self._state in (State.CONSUMPTION, State.REFUSAL):
            # Whatever comes from now on was written after the replicator had cleaned up.
            self._before = previous
        return event if protocol.TRANSITIONS[self._state, event] is not self._state else None

    def _conclude(self) -> HandshakeResult:
        errors = protocol.fresh_text(self._seen.errors, self._before.errors) or ""
        if self._state is State.FAILED:
            failed = protocol.fresh_text(self._seen.failed, self._before.failed)
            raise _failed_error(self._volume, failed or "", errors, self._refusal_hint())
        if self._state is State.TIMED_OUT:
            raise self._timeout_error(errors)
        verdict = protocol.read_markers(self._seen.entries, self._job, self._node_rank)
        if verdict.event is Event.MARKER_BAD:
            raise _marker_error(self._volume, verdict, errors)
        if errors.strip():
            level = logging.INFO if protocol.only_nothing_found(errors) else logging.WARNING
            _log.log(level, "%s: %s", self._volume / ERRORS_FILE, _quoted(errors))
        return HandshakeResult(
            step=verdict.step,
            share=self._volume.resolve() / verdict.share if verdict.share else None,
            restore_backup=_restore_backup(self._volume / PRERESTORE_FILE),
            errors=errors,
            seconds=self._seconds,
        )

    def _refusal_hint(self) -> str:
        if self._waited_in is not State.REFUSAL:
            return ""
        wait = protocol.WAITS[State.REFUSAL]
        seconds = self._seconds[State.REFUSAL.name.lower()]
        return f" It left {REPLICATOR_YAML} where it is, for {seconds:.1f} s. {wait.hint}."

    def _timeout_error(self, errors: str) -> WaitTimeoutError:
        wait = protocol.WAITS[self._waited_in]
        hint = wait.hint
        missing = []
        if self._waited_in is State.MARKER:
            missing = [f"{self._job}-s<step>-n{self._node_rank}-w0.restore"]
            if self._seen.entries:
                hint += f". Markers of others: {', '.join(sorted(self._seen.entries))}"
        return WaitTimeoutError(
            f"{wait.what}, in {self._volume}",
            seconds=wait.seconds(self._timeout_secs),
            missing=missing,
            hint=f"{hint}.{_quotes(ERRORS_FILE, errors)}",
        )


def _scan(volume: Path, previous: Observation) -> Observation:
    """One look at the volume. The order matters, see `Observation`."""
    failed = _read_text(volume / FAILED_FILE, previous.failed)
    errors = _read_text(volume / ERRORS_FILE, previous.errors)
    try:
        entries = _marker_entries(volume)
    except OSError as error:
        raise HandshakeError(f"the RAM disk {volume} cannot be read: {error}") from error
    yaml_present = os.path.lexists(volume / REPLICATOR_YAML)
    return Observation(entries=entries, yaml_present=yaml_present, failed=failed, errors=errors)


def _marker_entries(volume: Path) -> dict[str, Entry]:
    entries = {}
    with os.scandir(volume) as listing:
        for item in listing:
            if item.name.endswith(".restore"):
                try:
                    entries[item.name] = _entry(volume, item)
                except FileNotFoundError:
                    pass  # Gone since the listing: the replicator is clearing the volume.
    return entries


def _entry(volume: Path, item: os.DirEntry[str]) -> Entry:
    if item.is_symlink():
        target, share = _resolve(volume.resolve(), item.path)
        return Entry(kind="link", link=os.readlink(item.path), target=target, share=share)
    if item.is_dir(follow_symlinks=False):
        return Entry(kind="directory")
    if item.is_file(follow_symlinks=False):
        return Entry(kind="file", size_bytes=item.stat(follow_symlinks=False).st_size)
    return Entry(kind="other")


def _resolve(volume: Path, link: str) -> tuple[Target, str]:
    """What a link leads to, and the directory relative to the volume if that is a share."""
    try:
        end = Path(os.path.realpath(link, strict=True))
    except OSError as error:
        if error.errno == errno.ELOOP:
            return Target.LOOP, ""
        inside = Path(os.path.realpath(link)).is_relative_to(volume)
        return Target.MISSING if inside else Target.OUTSIDE, ""
    if end == volume or not end.is_relative_to(volume):
        return Target.OUTSIDE, ""
    if not end.is_dir():
        return Target.FILE, ""
    return Target.DIRECTORY, str(end.relative_to(volume))


def _read_text(path: Path, previous: FileText | None) -> FileText | None:
    """A file of errors; `previous` when it did not change; None when it is not there."""
    try:
        found = path.stat()
        identity = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if previous is not None and previous.identity == identity:
            return previous
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        # It is there, which is what counts.
        return FileText(identity=(0,), text=f"(cannot be read: {error})")
    return FileText(identity=identity, text=text)


def _write_renamed(path: Path, text: str) -> None:
    """Makes `path` appear with its whole content, by one rename."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise HandshakeError(f"cannot write {path}: {error}; free some space in it") from error


def _restore_backup(path: Path) -> str | None:
    """The backup named in replicator.prerestore; the file is only informative."""
    try:
        with path.open("rb") as file:
            content = yaml.safe_load(file.read(_PRERESTORE_BYTES).decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        _log.warning("%s cannot be read, and is not needed: %s", path, error)
        return None
    backup = content.get("restore-backup") if isinstance(content, dict) else None
    return None if backup is None else str(backup)


def _failed_error(volume: Path, text: str, errors: str, hint: str = "") -> ReplicatorFailedError:
    said = f": {_quoted(text)}" if text.strip() else ", without a word in it"
    return ReplicatorFailedError(
        f"the replicator stopped and wrote {volume / FAILED_FILE}{said}.{hint}"
        f"{_quotes(ERRORS_FILE, errors)} Nothing is replicated any more: restart the job on all"
        " nodes, and see the replicator's log for the cause",
        text=text,
    )


def _marker_error(volume: Path, verdict: protocol.Verdict, errors: str) -> MarkerError:
    return MarkerError(
        f"{volume / verdict.entry} is not a valid answer of the replicator: {verdict.fault}."
        f"{_quotes(ERRORS_FILE, errors)} See the replicator's log on this node",
        entry=verdict.entry,
    )


def _quoted(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _QUOTED_CHARACTERS else f"...{text[-_QUOTED_CHARACTERS:]}"


def _quotes(name: str, text: str) -> str:
    return f" The replicator wrote to {name}: {_quoted(text)}." if text.strip() else ""
