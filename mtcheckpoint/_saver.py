"""The background thread that writes shares, commits them, and watches what becomes of them.

The training thread only hands over a snapshot. All processes save the same steps in the same order,
so their threads can agree with each other: first that everybody has the same step, then that
everybody has written its share. Only then does each rename its own into place. When all have, the
save is done, and only then may an older step go.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import queue
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mtcheckpoint import _events
from mtcheckpoint._clock import POLL_SECONDS, Deadline, wait_for
from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._orbax import ShareWriter
from mtcheckpoint._reports import Reports
from mtcheckpoint._shares.identity import (
    EXTRAS_FILE,
    IDENTITY_FILE,
    Identity,
    identity_to_json,
    new_save_id,
)
from mtcheckpoint._shares.seal import SEAL_FILE, Summary
from mtcheckpoint._shares.sealing import NO_SUMMARY, OpenSeal, sealed_files
from mtcheckpoint._shares.volume import STAGING_FOLDER, CommittedSteps, size_bytes
from mtcheckpoint._snapshot import Snapshot
from mtcheckpoint.errors import (
    CoordinationError,
    MtCheckpointError,
    ReplicatorFailedError,
    SaveError,
    WaitTimeoutError,
)

__all__ = ["SaveRequest", "Saver"]

_LOG = logging.getLogger("mtcheckpoint.saver")
_IDLE_POLL_SECONDS = 0.2

# The coordinator ends a wait of its own and says on whom; only a thread that hangs takes longer.
_GRACE_SECONDS = 5.0
# A step that the replicator missed is announced again after less than this.
_LAST_LOOK_SECONDS = 5.0

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """What the training thread hands over."""

    step: int
    snapshot: Snapshot
    extras: Any
    custom_metadata: Mapping[str, Any] | None
    # Of a state that was restored and is saved anew: the extras that came with it.
    all_extras: Sequence[Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Save:
    """What all processes know of a save when they begin it."""

    save_id: str
    # In rank order.
    extras: Sequence[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Sealed:
    """A share that is written and waits for its commit."""

    path: Path
    seal: OpenSeal
    size_bytes: int


class Saver:
    """Writes and commits one share at a time, in a thread of its own."""

    def __init__(
        self,
        *,
        steps: CommittedSteps,
        open_writer: Callable[[Path], ShareWriter],
        coordinator: Coordinator,
        reports: Reports,
        look_ahead: Callable[..., bool] = lambda **_: False,
        identity: Identity,
        commit_not_before: float,
        timeout_secs: float,
        check_replicator: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            steps: the committed steps of this volume, and who takes or deletes them.
            open_writer: makes the writer for a staging folder.
            coordinator: agreement with the threads of the other processes.
            reports: what the processes say of themselves; this thread tells and listens.
            look_ahead: called in between, with the steps whose saves have ``failed`` and the number
                of ``commits``; returns whether to call again in a moment.
            identity: who this process is; step and id are filled in at each save.
            commit_not_before: on the monotonic clock: a step that appears while the replicator is
                still tidying up after the restore is missed.
            timeout_secs: limit of each wait for the others.
            check_replicator: raises `ReplicatorFailedError` when the replicator has stopped.
        """
        self._steps = steps
        self._staging = steps.volume / STAGING_FOLDER
        self._open_writer = open_writer
        self._coordinator = coordinator
        self._reports = reports
        self._look_ahead = look_ahead
        self._is_looking_ahead = False
        self._identity = identity
        self._commit_not_before = commit_not_before
        self._timeout_secs = timeout_secs
        self._check_replicator = check_replicator
        self._fault: str | None = None
        self._committed: int | None = None
        self._commits = 0
        self._phase = ("", 0.0)
        self._requests: queue.Queue[SaveRequest | None] = queue.Queue()
        self._idle = threading.Event()
        self._idle.set()
        self._errors: list[SaveError] = []
        self._failed: list[int] = []
        self._writer: ShareWriter | None = None
        self._thread = threading.Thread(target=self._run, name="mtcheckpoint-saver", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True from the hand-over until the step is committed, or has failed."""
        return not self._idle.is_set()

    @property
    def committed(self) -> int | None:
        """The newest step that was committed on all processes."""
        return self._committed

    @property
    def commits(self) -> int:
        """How many saves were committed on all processes."""
        return self._commits

    @property
    def failed(self) -> tuple[int, ...]:
        """The steps whose saves failed, in order."""
        return tuple(self._failed)

    def start(self, request: SaveRequest) -> None:
        """Hands over a save; the one before must be finished."""
        assert self._idle.is_set(), "one snapshot at a time: memory for two is not there"
        self._enter("the background thread to begin it")
        self._idle.clear()
        self._requests.put(request)

    def wait(self) -> None:
        """Waits until no save is in progress.

        Raises:
            WaitTimeoutError: one part of it took longer than the limit of a single wait.
        """
        while not self._idle.wait(_IDLE_POLL_SECONDS):
            what, begun = self._phase
            seconds = time.monotonic() - begun
            if seconds > self._timeout_secs + _GRACE_SECONDS:
                raise WaitTimeoutError(
                    f"the save in progress, namely for {what}",
                    seconds=seconds,
                    missing=self._coordinator.names([self._coordinator.process]),
                )

    def take_errors(self) -> list[SaveError]:
        """The errors since the last call, oldest first."""
        errors, self._errors = self._errors, []
        return errors

    def close(self) -> None:
        """Finishes what was handed over, and ends the thread."""
        self._requests.put(None)
        self._thread.join(self._timeout_secs)
        shutil.rmtree(self._staging, ignore_errors=True)

    # Everything below runs in the thread.

    def _run(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=self._idle_seconds())
            except queue.Empty:
                self._watch()
                continue
            if request is None:
                break
            self._save(request)
            # When a save is over on process 0, it knows so of all.
            self._ask_the_store(self._reports.listen)
            del request  # as long as it is there, training cannot have the memory of its arrays
            self._idle.set()
            self._ask_the_store(self._prepare_the_next_decision)
            self._steps.sweep()  # nobody waits for it
        self._look_at_the_first_step()
        if self._writer is not None:
            self._writer.close()

    def _idle_seconds(self) -> float:
        busy = self._steps.pending or self._reports.awaited or self._is_looking_ahead
        return POLL_SECONDS if busy else _IDLE_POLL_SECONDS

    def _watch(self) -> None:
        """Looks at the volume, and tells the deciding process when there is something new."""
        news = False
        try:
            news = self._steps.look()
            self._check_replicator()
        except (ReplicatorFailedError, OSError) as error:
            news = news or self._fault is None
            self._fault = str(error)
        if news:
            self._report()
        self._ask_the_store(self._reports.listen_when_due)
        self._ask_the_store(self._prepare_the_next_decision)

    def _look_at_the_first_step(self) -> None:
        """Before the end: only this thread can announce a step again that was missed."""
        deadline = Deadline.after(_LAST_LOOK_SECONDS)
        while self._steps.unseen and self._fault is None and not deadline.passed():
            deadline.clock.sleep(POLL_SECONDS)
            self._watch()

    def _finished(self, step: int) -> None:
        self._steps.finished(step)
        self._report()

    def _report(self) -> None:
        try:
            self._reports.tell(self._steps.report() | {"fault": self._fault})
        except (CoordinationError, OSError) as error:
            # The deciding process hears nothing, so nothing more is saved: training goes on.
            _LOG.warning("cannot report to the deciding process: %s", error)

    def _prepare_the_next_decision(self) -> None:
        self._is_looking_ahead = False  # also when this fails
        self._is_looking_ahead = self._look_ahead(failed=self.failed, commits=self.commits)

    def _ask_the_store(self, question: Callable[[], None]) -> None:
        """For what the training thread would else ask itself, and then hears of the error."""
        try:
            question()
        except MtCheckpointError as error:
            _LOG.warning("cannot learn of the other processes: %s", error)

    def _save(self, request: SaveRequest) -> None:
        begun = time.monotonic()
        try:
            size = self._write_and_commit(request)
        except Exception as error:
            self._undo(request.step)
            self._failed.append(request.step)
            _let_go_of_the_snapshot(error)
            self._errors.append(self._translated(request.step, error))
            _events.happened("save/failed", step=request.step, error=type(error).__name__)
            self._finished(request.step)
        else:
            self._committed = request.step
            self._commits += 1
            seconds = time.monotonic() - begun
            _events.happened("save/committed", step=request.step, bytes=size, seconds=seconds)

    def _write_and_commit(self, request: SaveRequest) -> int:
        self._enter("the other processes to begin it")
        save = self._agree_on(request)
        share, told = self._together(
            "write", lambda: self._write(request, save), tell=self._summary
        )
        ranks = [summary for _, summary in sorted(told)]
        self._together("commit", lambda: self._commit(share, request.step, ranks))
        self._steps.tidy()
        return share.size_bytes

    def _summary(self, share: _Sealed) -> tuple[int, Summary]:
        return self._identity.node_rank, share.seal.summary

    def _together(
        self, what: str, attempt: Callable[[], _T], tell: Callable[[_T], Any] = lambda _: None
    ) -> tuple[_T, tuple[Any, ...]]:
        """Does one part of a save here; returns when all processes have done it.

        Returns:
            The own result, and what all processes tell of theirs.
        """

        def here() -> _T:
            self._enter(f"this process to {what} its share")
            try:
                return attempt()
            finally:
                self._enter(f"the other processes to {what} theirs")

        return self._coordinator.share(
            f"save/{what}", here, tell=tell, timeout_secs=self._timeout_secs
        )

    def _enter(self, phase: str) -> None:
        self._phase = (phase, time.monotonic())

    def _agree_on(self, request: SaveRequest) -> _Save:
        """What all must know of the save; all processes must be saving the same step."""
        told = self._coordinator.gather(
            "save/begin",
            [request.step, new_save_id(), request.extras],
            timeout_secs=self._timeout_secs,
        )
        steps = [step for step, *_ in told]
        if len(set(steps)) > 1:
            raise SaveError(
                f"the processes save different steps: {dict(enumerate(steps))}. Call save with the"
                " same steps on every process",
                step=request.step,
                processes=[p for p, step in enumerate(steps) if step != steps[0]],
            )
        return _Save(
            save_id=told[0][1],
            extras=request.all_extras or [extras for _, _, extras in told],
        )

    def _write(self, request: SaveRequest, save: _Save) -> _Sealed:
        self._await_taken()
        self._steps.prepare(request.step, request.snapshot.size_bytes)
        try:
            return self._write_share(request, save)
        except Exception as error:
            if not _is_full(error):
                raise
            self._discard()
            raise self._steps.full() from error

    def _await_taken(self) -> None:
        """A forced save: the replicator gets one step after the other.

        When one node is given the next step while it has not seen the one before, the nodes wait
        for each other for ever.
        """
        if not self._steps.pending:
            return

        def look() -> bool | None:
            self._check_replicator()
            self._watch()
            return None if self._steps.pending else True

        # Less than the others wait for this process, so that they hear why.
        wait_for(
            look,
            Deadline.after(self._timeout_secs / 2),
            f"the replicator to take step {self._steps.newest}",
            missing=lambda: [str(self._steps.volume / str(self._steps.newest))],
            hint="Is the replicator running? Its log says what it does",
        )

    def _write_share(self, request: SaveRequest, save: _Save) -> _Sealed:
        if self._writer is None:
            self._writer = self._open_writer(self._staging)
        self._staging.mkdir(exist_ok=True)
        written = self._writer.write(
            request.step,
            request.snapshot.tree,
            request.custom_metadata,
            open_file=self._steps.spares.open,
        )
        share = written.path
        identity = dataclasses.replace(
            self._identity,
            step=request.step,
            save_id=save.save_id,
            kinds=request.snapshot.kinds,
        )
        _write_text(share / IDENTITY_FILE, identity_to_json(identity))
        _write_text(share / EXTRAS_FILE, json.dumps(list(save.extras)))
        seal = written.seal_form.seal(
            written.checksums,
            step=request.step,
            save_id=save.save_id,
            files=sealed_files(share),
        )
        # As large as it will be: what is added when all have written finds its place.
        _write_text(share / SEAL_FILE, seal.text((NO_SUMMARY,) * self._identity.nodes))
        return _Sealed(path=share, seal=seal, size_bytes=size_bytes(share))

    def _commit(self, share: _Sealed, step: int, ranks: Sequence[Summary]) -> None:
        self._hold_first_commit()
        _write_over(share.path / SEAL_FILE, share.seal.text(ranks))
        self._steps.commit(share.path, step, share.size_bytes)
        # Before the others are told, so that process 0 hears it as soon as the save is over.
        self._finished(step)

    def _hold_first_commit(self) -> None:
        if self._steps.newest is None:
            settled = Deadline.after(max(0.0, self._commit_not_before - time.monotonic()))
            wait_for(
                lambda: settled.passed() or None, Deadline.after(60.0), "the replicator to settle"
            )

    def _undo(self, step: int) -> None:
        self._discard()
        try:
            self._steps.withdraw(step)
        except OSError as error:
            _LOG.warning("the remains of step %s are still there: %s", step, error)

    def _discard(self) -> None:
        """Removes what a failed save left; the next one starts with a new writer."""
        writer, self._writer = self._writer, None
        shutil.rmtree(self._staging, ignore_errors=True)
        if writer is not None:
            try:
                writer.close()
            except Exception:  # it failed already, and that is what is reported
                _LOG.debug("while closing the writer of a failed save", exc_info=True)

    def _translated(self, step: int, error: Exception) -> SaveError:
        if isinstance(error, SaveError):
            return error
        own = self._coordinator.process
        failed = error.processes if isinstance(error, CoordinationError) else (own,)
        notes = " ".join(getattr(error, "__notes__", ()))
        translated = SaveError(
            f"step {step} was not saved: {type(error).__name__}: {error} {notes}".rstrip()
            + ". The step before it is still the newest",
            step=step,
            processes=failed,
        )
        translated.__cause__ = error
        return translated


def _let_go_of_the_snapshot(error: BaseException | None) -> None:
    """Until the error is taken nothing of the save may stay: the frames it went through hold it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_full(error: Exception) -> bool:
    """Whether a volume without space is the reason, however deep below."""
    said = "".join(traceback.format_exception(error))
    return "ENOSPC" in said or os.strerror(errno.ENOSPC) in said


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _write_over(path: Path, text: str) -> None:
    """Writes into a file that is as long already, which takes no space."""
    with open(path, "r+", encoding="utf-8") as file:
        file.write(text)
        file.truncate()
