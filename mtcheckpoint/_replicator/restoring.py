"""The restore phase of a run: choose once for all nodes, fetch, answer, clean up."""

from __future__ import annotations

import dataclasses

from mtcheckpoint._handshake import files
from mtcheckpoint._replicator.backup import BackupStore
from mtcheckpoint._replicator.choice import Candidate, Holdings, merge, newest_complete
from mtcheckpoint._replicator.rendezvous import Run, RunFailedError
from mtcheckpoint._replicator.session import NodeState, Session

__all__ = ["RestoreChoice", "restore"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestoreChoice:
    """What all nodes of a run restore.

    Attributes:
        candidate: the step and each rank's hash; None: nothing was found anywhere.
        backup: name of the backup it comes from; None: from memory.
    """

    candidate: Candidate | None
    backup: str | None = None


def restore(session: Session) -> int | None:
    """Brings the newest complete step into the volume and answers training.

    Returns:
        The restored step, None for nothing.
    """
    session.enter_state(NodeState.RESTORING)
    run = session.run
    run.inventories.post(session.rank, session.volume.holdings(run.job))
    inventories = session.wait(run.inventories.all, "what the nodes hold")
    if session.rank == 0:
        # One decision for all: a second look at the backups could see another one.
        run.choice.post(0, _choose(session, dict(inventories)))
    choice: RestoreChoice = session.wait(run.choice.all, "the choice of the step")[0]
    if choice.candidate is None:
        _answer_nothing(session)
        return None
    _answer_step(session, choice, choice.candidate, dict(inventories))
    return choice.candidate.step


def _choose(session: Session, inventories: dict[int, Holdings]) -> RestoreChoice:
    run, store = session.run, session.options.store
    forced = _forced_folder(session)
    if forced is not None and store is not None:
        candidate = _complete_backup(store, run, forced)
        if candidate is None:
            raise RunFailedError(_bad_version_text(store, run, forced))
        return RestoreChoice(candidate=candidate, backup=forced)
    candidate = newest_complete(merge(inventories), nodes=run.nodes, replicas=run.replicas)
    if candidate is not None or store is None:
        return RestoreChoice(candidate=candidate)
    return _newest_backup(store, run)


def _forced_folder(session: Session) -> str | None:
    store = session.options.store
    try:
        return store.forced_folder(session.run.job) if store else None
    except OSError as error:
        session.voice.error(f"cannot read {files.FORCED_RESTORE_FILE}, going on without: {error}")
        return None


def _newest_backup(store: BackupStore, run: Run) -> RestoreChoice:
    try:
        for folder in store.folders(run.job):
            if candidate := _complete_backup(store, run, folder):
                return RestoreChoice(candidate=candidate, backup=folder)
    except OSError as error:
        # Not knowing is not the same as nothing: an empty start would lose the backups' steps.
        raise RunFailedError(
            f"no complete step in memory, and backups under {store.url} cannot be read: {error}."
            " Make them readable and restart all nodes"
        ) from error
    return RestoreChoice(candidate=None)


def _complete_backup(store: BackupStore, run: Run, folder: str) -> Candidate | None:
    holdings = store.holdings(run.job, folder)
    return newest_complete(holdings, nodes=run.nodes, replicas=run.replicas)


def _bad_version_text(store: BackupStore, run: Run, forced: str) -> str:
    there = ", ".join(store.folders(run.job)) or "none"
    return (
        f"{files.FORCED_RESTORE_FILE} names {forced!r}, which is no complete backup of job"
        f" {run.job} for {run.nodes} nodes; under {store.url} are: {there}. Correct or remove the"
        " file and restart all nodes"
    )


def _answer_nothing(session: Session) -> None:
    session.voice.error("no valid checkpoints found anywhere: nothing to restore")
    session.volume.write_prerestore({})
    session.volume.write_nothing_to_restore(session.run.job, session.rank)
    session.volume.collect_garbage(session.run.job, keep_steps=())


def _answer_step(
    session: Session, choice: RestoreChoice, candidate: Candidate, inventories: dict[int, Holdings]
) -> None:
    step, digest = candidate.step, candidate.digests[session.rank]
    origin = {} if choice.backup is None else {"restore-backup": choice.backup}
    session.volume.write_prerestore({"restore-step": step, **origin})
    session.volume.write_meta(session.share(step), digest)
    _fetch(session, choice, digest, inventories)
    session.run.fetched.post(session.rank, True)
    # No node cleans up before all have what they need: it may be the one that holds it.
    session.wait(session.run.fetched.all, "all nodes' shares")
    session.volume.link_restore(session.share(step), digest)
    session.voice.info(f"restores step {step} from {choice.backup or 'memory'}")
    session.volume.collect_garbage(
        session.run.job,
        keep_steps={step},
        keep_data_of_rank=None if session.settings.replicas is None else session.rank,
    )


def _fetch(
    session: Session, choice: RestoreChoice, digest: str, inventories: dict[int, Holdings]
) -> None:
    if session.volume.has_data(digest):
        return
    try:
        if _fetch_from_peer(session, digest, inventories):
            return
        if choice.backup is None or session.options.store is None:
            raise FileNotFoundError("no node holds it any more")
        _fetch_from_backup(session, session.options.store, choice.backup, digest)
    except OSError as error:
        session.voice.error(
            f"cannot fetch {files.data_name(digest)}, so the .restore link will dangle: {error}"
        )


def _fetch_from_peer(session: Session, digest: str, inventories: dict[int, Holdings]) -> bool:
    for rank, holdings in sorted(inventories.items()):
        source = session.run.members[rank].volume.data(digest)
        if digest not in holdings.digests:
            continue
        try:
            session.volume.receive(source, session.rank, session.check)
            session.voice.info(f"fetched {source.name} from node rank {rank}")
            return True
        except OSError as error:
            session.voice.error(f"cannot fetch {source}: {error}")
    return False


def _fetch_from_backup(session: Session, store: BackupStore, folder: str, digest: str) -> None:
    with session.volume.staged(files.data_name(digest), session.rank) as staging:
        if staging is not None:
            store.download_data(session.run.job, folder, digest, staging, session.check)
    session.voice.info(f"fetched {files.data_name(digest)} from backup {folder}")
