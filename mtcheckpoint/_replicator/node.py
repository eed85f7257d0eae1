"""One node's side of the protocol, from one ``replicator.yaml`` to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from mtcheckpoint._clock import Deadline
from mtcheckpoint._handshake import files
from mtcheckpoint._replicator.rendezvous import (
    Lobby,
    Member,
    Run,
    RunEndedError,
    RunFailedError,
    StoppedError,
)
from mtcheckpoint._replicator.restoring import restore
from mtcheckpoint._replicator.saving import StepLoop
from mtcheckpoint._replicator.session import (
    NodeState,
    Options,
    Session,
    Voice,
    wait_without_limit,
)
from mtcheckpoint._replicator.settings import RunSettings, parse_settings
from mtcheckpoint._replicator.volume import FileStamp, Volume
from mtcheckpoint.errors import ReplicatorConfigError

__all__ = ["Node", "NodeStatus"]

# A step directory that lies untaken for this long while no run is on will stay so.
_UNPROTECTED_SECONDS = 2.0
# All nodes of a run get their new replicator.yaml within this time of each other.
_SECONDS_TO_NOTICE = 2.0

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """What one node's replicator is at.

    Attributes:
        directory: the node's directory.
        state: name of the state, such as ``"watching"``.
        job: the run's job, None without a run.
        node_rank: the node's rank there, None without a run.
        newest_taken_step: newest step whose share of this node is in place.
        replicated_step: newest step that all nodes of the run hold, with its copies.
        newest_backup: folder name of the newest backup that this run completed.
    """

    directory: str
    state: str
    job: str | None = None
    node_rank: int | None = None
    newest_taken_step: int | None = None
    replicated_step: int | None = None
    newest_backup: str | None = None


class Node:
    """Serves one node directory; `serve` is the body of its thread."""

    def __init__(self, volume: Volume, lobby: Lobby, options: Options) -> None:
        self._volume = volume
        self._lobby = lobby
        self._options = options
        self._state = NodeState.STOPPED
        self._voice = Voice(volume=volume, who=f"node {volume}")
        self._member: Member | None = None
        self._run: Run | None = None
        self._loop: StepLoop | None = None
        self._restored: int | None = None
        self._handled: FileStamp | None = None
        # Why the last run ended without this node's doing; None when there is nothing to say.
        self._abandoned: str | None = None
        self._restarted_alone = False

    def serve(self) -> None:
        """Serves one run after the other until the replicator is stopped."""
        try:
            while True:
                self._serve_one_run()
        except StoppedError:
            self._end_run("the replicator is being stopped")
        finally:
            self._enter_state(NodeState.STOPPED)

    def status(self) -> NodeStatus:
        """A snapshot; may be called from any thread."""
        member, run, loop = self._member, self._run, self._loop
        if member is None or run is None or run.is_over():
            return NodeStatus(directory=str(self._volume), state=self._state.value)
        finished = run.backed_up.all() or {}
        folders = set(finished.values())
        return NodeStatus(
            directory=str(self._volume),
            state=self._state.value,
            job=run.job,
            node_rank=member.rank,
            newest_taken_step=loop.newest_taken_step if loop else None,
            replicated_step=run.replicated_step,
            newest_backup=folders.pop() if len(folders) == 1 else None,
        )

    def _serve_one_run(self) -> None:
        try:
            settings = self._next_settings()
            self._make_ready()
            while self._takes_part_in_vain(settings):
                pass
        except RunEndedError as reason:
            self._leave(str(reason))
        except (RunFailedError, ReplicatorConfigError) as error:
            self._fail(str(error))
        except StoppedError:
            raise
        except Exception as error:
            # A fault of one run must not become a loop of crashes: training decides what next.
            self._fail(f"unexpected {type(error).__name__}: {error}")

    def _takes_part_in_vain(self, settings: RunSettings) -> bool:
        """Takes part in one run; True when another node began anew before any step was taken.

        A job that died when only some of its nodes had written their YAML leaves a run that waits
        for the rest. When it comes back, the others may join that run before those nodes end it.
        Their training waits, or has its answer, and will not write its YAML again: so they join
        the new run with the old YAML. As nothing was saved, it chooses the same step.
        """
        self._loop = None
        try:
            session = self._join(settings)
            # Before training has its answer, which may then make a step at once.
            began_at = self._options.clock.monotonic()
            session.run.replicated_step = self._restored = restore(session)
            self._loop = StepLoop(session, self._restored, began_at=began_at)
            self._loop.run()
        except RunEndedError as reason:
            if self._volume.yaml_stamp() is not None or self._has_steps():
                raise
            self._voice.info(f"joins again: {reason}")
        return True

    def _has_steps(self) -> bool:
        taken = self._loop.newest_taken_step if self._loop is not None else self._restored
        return taken != self._restored or bool(self._volume.untaken_steps())

    # Between two runs.

    def _next_settings(self) -> RunSettings:
        if self._state is not NodeState.REFUSED:
            self._enter_state(NodeState.WAITING)
        self._handled = self._wait_for_yaml()
        self._voice = Voice(volume=self._volume, who=f"node {self._volume}")
        text = self._volume.read_yaml()
        if not text:
            self._volume.remove_yaml()
            raise RunEndedError(f"{files.REPLICATOR_YAML} is empty")
        return parse_settings(text)

    def _wait_for_yaml(self) -> FileStamp:
        remarks = _Remarks(self._volume, self._voice, self._options, self._abandoned)

        def look() -> FileStamp | None:
            stamp = self._volume.yaml_stamp()
            if stamp is None:
                self._handled = None
            elif stamp != self._handled:
                return stamp
            remarks.make()
            return None

        def look_if_there() -> FileStamp | None:
            try:
                # A node that was lost with its directory comes back with an empty one.
                self._volume.create()
                return look()
            except OSError as error:
                remarks.make_unusable(error)
                return None

        return self._wait(look_if_there, files.REPLICATOR_YAML)

    def _leave(self, reason: str) -> None:
        self._restarted_alone = self._is_restarted_alone()
        self._end_run(reason)
        self._abandoned = None if self._volume.yaml_stamp() is not None else reason
        self._voice.info(f"run ended: {reason}")

    def _is_restarted_alone(self) -> bool:
        run = self._run
        return run is not None and run.is_complete() and not run.is_over() and run.nodes > 1

    def _fail(self, text: str) -> None:
        if self._run is not None:
            self._run.fail(text)
        self._abandoned = None
        self._enter_state(NodeState.REFUSED)
        self._voice.failed(text)

    def _end_run(self, reason: str) -> None:
        if self._run is not None:
            self._run.end(reason)

    # The beginning of a run.

    def _make_ready(self) -> None:
        self._enter_state(NodeState.JOINING)
        if (last := self._run) is not None:
            # Its copies into this volume have to end before the clean-up.
            self._wait(lambda: last.is_quiet() or None, "the end of the last run's copies")
        self._volume.clean_for_run()
        self._volume.remove_yaml()

    def _join(self, settings: RunSettings) -> Session:
        self._enter_state(NodeState.JOINING)
        member = Member(volume=self._volume, settings=settings)
        who = f"job={settings.job_name} node={member.rank}/{settings.nodes} {self._volume}"
        self._voice = Voice(volume=self._volume, who=who)
        self._member, self._run = member, None
        run = self._run = self._enter_lobby(member)
        session = Session(
            member=member,
            run=run,
            voice=self._voice,
            options=self._options,
            enter_state=self._enter_state,
        )
        session.wait(
            lambda: run.is_complete() or None,
            f"the other nodes of job {run.job}",
            lambda: self._tell_missing(run),
        )
        self._restarted_alone = False
        self._voice.info(f"all {run.nodes} nodes are there")
        return session

    def _enter_lobby(self, member: Member) -> Run:
        # Those who wait may have a replicator.yaml of before, which was left when all were killed.
        patience = Deadline.after(_SECONDS_TO_NOTICE, self._options.clock)
        return self._wait(
            lambda: self._lobby.enter(member, is_late=patience.passed()),
            "nodes that contradict this one to get another replicator.yaml",
        )

    def _tell_missing(self, run: Run) -> None:
        ranks = ", ".join(map(str, run.missing_ranks()))
        alone = f"{self._member} restarted alone: " if self._restarted_alone else ""
        self._voice.error(
            f"{alone}waited {self._options.timeout_secs:.1f} s for node rank {ranks} of job"
            f" {run.job} with {run.nodes} nodes to write {files.REPLICATOR_YAML}. All nodes of a"
            " job must restart together"
        )
        self._lobby.fail_mismatched(run)

    def _enter_state(self, state: NodeState) -> None:
        self._state = state

    def _wait(self, look: Callable[[], _T | None], what: str) -> _T:
        def look_or_stop() -> _T | None:
            if self._options.is_stopping():
                raise StoppedError
            return look()

        return wait_without_limit(look_or_stop, what, self._options.clock)


class _Remarks:
    """What a node without a run says once while it waits for its next one."""

    def __init__(
        self, volume: Volume, voice: Voice, options: Options, abandoned: str | None
    ) -> None:
        self._volume = volume
        self._voice = voice
        self._clock = options.clock
        self._timeout_secs = options.timeout_secs
        self._abandoned = abandoned
        self._limit = Deadline.after(options.timeout_secs, options.clock)
        self._unprotected: Deadline | None = None
        self._has_told_unprotected = False
        self._has_told_unusable = False

    def make(self) -> None:
        if self._abandoned is not None and self._limit.passed():
            self._voice.error(
                f"the run ended because {self._abandoned}, and {self._timeout_secs:.1f} s later"
                f" this node still has no new {files.REPLICATOR_YAML}. All nodes of a job must"
                " restart together"
            )
            self._abandoned = None
        if not self._has_told_unprotected:
            self._look_for_unprotected()

    def make_unusable(self, error: OSError) -> None:
        if not self._has_told_unusable:
            self._has_told_unusable = True
            self._voice.error(f"cannot use the directory: {error}")

    def _look_for_unprotected(self) -> None:
        steps = self._volume.untaken_steps()
        if not steps:
            self._unprotected = None
        elif self._unprotected is None:
            self._unprotected = Deadline.after(_UNPROTECTED_SECONDS, self._clock)
        elif self._unprotected.passed():
            self._has_told_unprotected = True
            self._voice.error(
                f"nobody takes the saved steps {', '.join(steps)}: this replicator has no run for"
                " them. Restart the job on all nodes, so that it is protected again"
            )
