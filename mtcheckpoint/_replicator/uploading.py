"""A node's part of one backup, in the background."""

from __future__ import annotations

import dataclasses
import datetime
import threading

from mtcheckpoint._handshake.files import backup_folder_name
from mtcheckpoint._replicator.choice import uploads_data
from mtcheckpoint._replicator.rendezvous import RunSignal
from mtcheckpoint._replicator.session import Session

__all__ = ["BackupPlan", "Upload", "next_folder"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackupPlan:
    """Which step goes into which folder."""

    step: int
    folder: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _DataReport:
    """Whether a node's data of a backup is in place."""

    plan: BackupPlan
    done: bool


def next_folder() -> str:
    """The name of a backup that begins now."""
    return backup_folder_name(datetime.datetime.now(datetime.UTC))


class Upload(threading.Thread):
    """Uploads this node's share, and its ``.meta`` when all nodes' data is there.

    Errors go to ``replicator.errors``; they never stop replication.
    """

    def __init__(self, session: Session, plan: BackupPlan, digest: str) -> None:
        super().__init__(name=f"backup-{session.rank}-{plan.folder}", daemon=True)
        self._session = session
        self._plan = plan
        self._digest = digest

    def run(self) -> None:
        session, plan = self._session, self._plan
        try:
            done = self._upload_data()
            session.run.uploaded.post(session.rank, _DataReport(plan=plan, done=done))
            # With inference, one rank's .meta can make a backup valid that lacks another's data.
            if session.wait(self._all_done, f"data of backup {plan.folder}"):
                self._upload_meta()
        except RunSignal as reason:
            session.voice.info(f"backup {plan.folder} given up: {reason}")
        except Exception as error:
            session.voice.error(f"backup {plan.folder} of step {plan.step} failed: {error!r}")

    def _upload_data(self) -> bool:
        session, store = self._session, self._session.options.store
        if store is None or not uploads_data(session.settings):
            return store is not None
        data = session.volume.data(self._digest)
        try:
            store.upload_data(session.run.job, self._plan.folder, data, session.rank, session.check)
        except RunSignal:
            raise
        except Exception as error:
            # The next run's clean-up may have taken the data away; then this is not a fault.
            session.check()
            session.voice.error(
                f"backup {self._plan.folder} of step {self._plan.step}: cannot upload {data.name},"
                f" so this backup stays incomplete: {error}"
            )
            return False
        return True

    def _all_done(self) -> bool | None:
        """Whether every node's data is in place, None while some are still at it."""
        reports = self._session.run.uploaded.all()
        if reports is None or any(report.plan != self._plan for report in reports.values()):
            return None
        return all(report.done for report in reports.values())

    def _upload_meta(self) -> None:
        session, plan, store = self._session, self._plan, self._session.options.store
        assert store is not None
        store.upload_meta(
            session.run.job, plan.folder, session.share(plan.step), self._digest, session.check
        )
        run = session.run
        run.backed_up.post(session.rank, plan.folder)
        finished = run.backed_up.all()
        if finished is not None and set(finished.values()) == {plan.folder}:
            session.voice.info(f"backup {plan.folder} of step {plan.step} is complete")
