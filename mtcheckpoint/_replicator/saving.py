"""The saving phase of a run: take a step, copy it to the peers, agree, back it up, clean up."""

from __future__ import annotations

import dataclasses
import errno

from mtcheckpoint._clock import Deadline
from mtcheckpoint._handshake import files
from mtcheckpoint._replicator.choice import backup_due, peers_of, steps_to_keep
from mtcheckpoint._replicator.rendezvous import Member, RunEndedError
from mtcheckpoint._replicator.session import NodeState, Session
from mtcheckpoint._replicator.uploading import BackupPlan, Upload, next_folder

__all__ = ["StepLoop"]

# A directory made in place is taken when nothing inside has changed for this long.
_QUIET_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _CopyReport:
    """What a node says after its copies of a step."""

    step: int
    copied: bool
    is_backing_up: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Decision:
    """Rank 0's answer to all reports about a step."""

    step: int
    replicated: bool
    backup: BackupPlan | None


class StepLoop:
    """One node from its answer to training until the run ends.

    Attributes:
        newest_taken_step: the newest step whose data has its final name here.
    """

    def __init__(self, session: Session, restored_step: int | None, *, began_at: float) -> None:
        """
        Args:
            session: this node in its run.
            restored_step: that training goes on from.
            began_at: of the run, on the replicator's clock: backups are due from there.
        """
        self._session = session
        self._peers = [session.run.members[rank] for rank in peers_of(session.settings)]
        self._upload: Upload | None = None
        self._upload_step: int | None = None
        self._last_backup_at = began_at
        self._last_backup_step = restored_step or 0
        self._is_first_round = True
        self._has_told_unequal = False
        self.newest_taken_step = restored_step

    def run(self) -> None:
        """Handles steps, oldest first, until an error of `Session.check` ends the run."""
        while True:
            self._session.enter_state(NodeState.WATCHING)
            name = self._next_step()
            self._session.enter_state(NodeState.REPLICATING)
            step = int(name)
            digest = self._take(name, step)
            if digest is not None and self._wait_for_equal_steps(step):
                self._replicate(step, digest)

    def _next_step(self) -> str:
        """Name of the oldest step directory that is ready to be taken."""
        session = self._session
        watched: dict[str, tuple[frozenset[tuple[str, int, int]], Deadline]] = {}

        def is_quiet(name: str) -> bool:
            now = session.volume.fingerprint(name)
            before, quiet = watched.get(name, (None, None))
            if quiet is None or before != now:
                watched[name] = (now, Deadline.after(_QUIET_SECONDS, session.options.clock))
                return False
            return quiet.passed()

        def look() -> str | None:
            for name in self._untaken():
                if session.options.strict:
                    return name
                if session.volume.is_finished(name, session.settings.framework) or is_quiet(name):
                    return name
                # Later steps wait behind an unfinished one: steps are taken in their order.
                return None
            return None

        return session.wait(look, "the next step")

    def _untaken(self) -> list[str]:
        try:
            return self._session.volume.untaken_steps()
        except FileNotFoundError as error:
            # The node was lost with its memory.
            raise RunEndedError(f"{self._session.member} lost its directory") from error

    def _take(self, name: str, step: int) -> str | None:
        session = self._session
        share = session.share(step)
        try:
            digest, known = session.volume.take(name, share, session.settings.framework)
        except FileNotFoundError as error:
            session.voice.error(
                f"step directory {name} vanished before it was taken ({error}): nothing may touch"
                " a committed step directory"
            )
            return None
        self._write_meta(share, digest)
        if known:
            session.voice.error(
                f"step {step} has the same data as before ({digest}), so training may not be making"
                f" progress: deleted the new directory, {share.meta} names the old data"
            )
        self.newest_taken_step = step
        session.voice.info(f"took step {step}")
        return digest

    def _write_meta(self, share: files.ShareName, digest: str) -> None:
        """Writes the ``.meta``, as soon as there is room for it."""
        session = self._session
        has_told = False

        def look() -> bool | None:
            nonlocal has_told
            try:
                session.volume.write_meta(share, digest)
                return True
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                if not has_told:
                    session.voice.error(f"{share.meta} waits for room in the volume: {error}")
                has_told = True
                return None

        session.wait(look, f"room for {share.meta}")

    def _wait_for_equal_steps(self, step: int) -> bool:
        """Waits until all nodes took `step`; False when another node is past it."""
        run = self._session.run
        run.taken.post(self._session.rank, step)

        def tell() -> None:
            self._has_told_unequal = True
            self._session.voice.error(_unequal_text(step, dict(run.taken.values()), run.nodes))

        def look() -> bool | None:
            steps = run.taken.all()
            if steps is not None and set(steps.values()) == {step}:
                self._has_told_unequal = False
                return True
            # A node past this step will never save it: given up once that was reported.
            is_behind = max(run.taken.values().values()) > step
            if self._has_told_unequal and is_behind and self._untaken():
                return False
            return None

        return self._session.wait(look, f"step {step} on all nodes", tell)

    def _replicate(self, step: int, digest: str) -> None:
        session = self._session
        copies = [self._copy(step, digest, peer) for peer in self._peers]
        report = _CopyReport(step=step, copied=all(copies), is_backing_up=self._is_backing_up())
        session.run.copied.post(session.rank, report)
        decision = self._decision(step)
        if decision.replicated:
            session.run.replicated_step = step
            session.voice.info(f"step {step} is replicated")
        if decision.backup is not None:
            self._start_upload(decision.backup, digest)
        self._clean_up(step)

    def _copy(self, step: int, digest: str, peer: Member) -> bool:
        session = self._session
        try:
            with session.run.writing():
                if session.settings.replicas is None:
                    source = session.volume.data(digest)
                    peer.volume.receive(source, session.rank, session.check)
                peer.volume.write_meta(session.share(step), digest)
        except OSError as error:
            session.voice.error(f"cannot copy step {step} to {peer}: {error}")
            return False
        return session.settings.replicas is None or self._verify_twin(step, digest, peer)

    def _verify_twin(self, step: int, digest: str, peer: Member) -> bool:
        """With data parallelism the peer must have saved the same data by itself."""
        if peer.volume.has_data(digest):
            return True
        session = self._session
        text = (
            f"step {step}: {session.member} has data {digest}, which {peer} has not, although"
            f" assume-data-parallelism is {session.settings.replicas}: the replicas differ, so"
            " this step has no second copy"
        )
        session.voice.error(text)
        dataclasses.replace(session.voice, volume=peer.volume).error(text)
        return False

    def _decision(self, step: int) -> _Decision:
        session = self._session
        if session.rank == 0:
            reports = session.wait(lambda: self._reports(step), f"copies of step {step}")
            session.run.decision.post(0, self._decide(step, reports))

        def look() -> _Decision | None:
            decision: _Decision | None = session.run.decision.values().get(0)
            return decision if decision is not None and decision.step == step else None

        return session.wait(look, f"rank 0's answer to step {step}")

    def _reports(self, step: int) -> list[_CopyReport] | None:
        reports = self._session.run.copied.all()
        if reports is None or any(report.step != step for report in reports.values()):
            return None
        return list(reports.values())

    def _decide(self, step: int, reports: list[_CopyReport]) -> _Decision:
        if self._is_first_round:
            self._is_first_round = False
            self._remove_forced_version()
        return _Decision(
            step=step,
            replicated=all(report.copied for report in reports),
            backup=self._plan_backup(step, reports),
        )

    def _remove_forced_version(self) -> None:
        """All nodes hold a newer step than the one that was forced on them."""
        store = self._session.options.store
        try:
            if store is not None and store.remove_forced(self._session.run.job):
                self._session.voice.info(f"removed {files.FORCED_RESTORE_FILE}")
        except OSError as error:
            self._session.voice.error(f"cannot remove {files.FORCED_RESTORE_FILE}: {error}")

    def _plan_backup(self, step: int, reports: list[_CopyReport]) -> BackupPlan | None:
        now = self._session.options.clock.monotonic()
        is_due = backup_due(
            self._session.settings,
            seconds_since=now - self._last_backup_at,
            steps_since=step - self._last_backup_step,
        )
        if self._session.options.store is None or not is_due:
            return None
        if any(report.is_backing_up for report in reports):
            self._session.voice.error(
                f"step {step} is due for a backup, but an earlier backup is still running: skipped"
            )
            return None
        self._last_backup_at, self._last_backup_step = now, step
        return BackupPlan(step=step, folder=next_folder())

    def _start_upload(self, plan: BackupPlan, digest: str) -> None:
        self._upload = Upload(self._session, plan, digest)
        self._upload_step = plan.step
        self._upload.start()

    def _is_backing_up(self) -> bool:
        if self._upload is not None and not self._upload.is_alive():
            self._upload = self._upload_step = None
        return self._upload is not None

    def _clean_up(self, step: int) -> None:
        session = self._session
        replicated = session.run.replicated_step
        current = {step} if replicated is None else {step, replicated}
        keep = steps_to_keep(session.settings, current=current, backing_up=self._upload_step)
        session.volume.collect_garbage(session.run.job, keep)


def _unequal_text(step: int, steps: dict[int, int], nodes: int) -> str:
    found = ", ".join(
        f"node rank {rank}: {f'step {steps[rank]}' if rank in steps else 'no step'}"
        for rank in range(nodes)
    )
    return (
        f"waiting for all nodes to save step {step}; last taken are {found}. All nodes must save"
        " the same steps; nothing is replicated until they do"
    )
