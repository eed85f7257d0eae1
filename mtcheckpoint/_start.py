"""How a run begins: the volume, the handshake with the replicator, and what can be restored."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mtcheckpoint import _topology
from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._handshake import client, files
from mtcheckpoint._restorer import Candidate, PassedOver
from mtcheckpoint._shares.backups import Backup, BackupRoot
from mtcheckpoint._shares.places import LocalPlace, Tier
from mtcheckpoint._shares.volume import STAGING_FOLDER, own_steps
from mtcheckpoint._topology import Topology
from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.errors import MarkerError

__all__ = ["Beginning", "begin", "candidates"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """What this process found when the run began.

    Attributes:
        own: this process's shares in its volume that may be restored, by step.
        served: all shares in the volume that may be restored, by step and name.
        arrived_from: where `own` came from.
        fault: why the replicator's answer could not be used here.
        errors: what the replicator wrote to its error file.
        seconds: by phase.
        finished_at: on the monotonic clock.
    """

    own: Mapping[int, Path]
    served: Mapping[int, Mapping[str, Path]]
    arrived_from: Tier = "local"
    fault: str | None = None
    errors: str = ""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    finished_at: float = dataclasses.field(default_factory=time.monotonic)


def begin(config: CheckpointConfig, topology: Topology, coordinator: Coordinator) -> Beginning:
    """Begins the run in this process's volume. Call on every process.

    Raises:
        HandshakeError: the volume or the replicator is not usable, here or on another process.
        WaitTimeoutError: the replicator did not answer.
    """
    volume = Path(config.local_checkpoint_directory)
    coordinator.agree("look at the volume", lambda: client.check_volume(volume))
    shake = _shake_hands if config.enable_replicator else _take_stock
    found = coordinator.agree("handshake", lambda: shake(config, topology, volume))
    # What a killed save left behind. With a replicator it is gone already.
    shutil.rmtree(volume / STAGING_FOLDER, ignore_errors=True)
    return found


def _take_stock(config: CheckpointConfig, topology: Topology, volume: Path) -> Beginning:
    """Without a replicator: the committed steps that lie in the volume."""
    for leftover in volume.glob("*.deleted"):
        shutil.rmtree(leftover, ignore_errors=True)
    own = own_steps(volume, config.run_name)
    return Beginning(own=own, served={step: {str(step): folder} for step, folder in own.items()})


def _shake_hands(config: CheckpointConfig, topology: Topology, volume: Path) -> Beginning:
    held = {entry.name for entry in volume.glob("*.data")}
    begun = time.monotonic()
    try:
        answer = client.run_handshake(
            volume,
            _topology.replicator_settings(config, topology),
            job=config.run_name,
            node_rank=topology.node_rank,
            timeout_secs=config.timeout_secs,
        )
    except MarkerError as error:
        # The replicator runs; only its answer is of no use here. Others may hold the step.
        seconds = {"handshake": time.monotonic() - begun}
        return Beginning(own={}, served={}, fault=str(error), seconds=seconds)
    seconds = {"handshake": time.monotonic() - begun}
    if answer.step is None or answer.share is None:
        return Beginning(own={}, served={}, errors=answer.errors, seconds=seconds)
    arrived: Tier = "local" if answer.share.name in held else "peer"
    return Beginning(
        own={answer.step: answer.share},
        served={answer.step: _shares_of(volume, config.run_name, answer.step)},
        arrived_from="backup" if answer.restore_backup is not None else arrived,
        errors=answer.errors,
        seconds=seconds,
    )


def _look_again(beginning: Beginning, config: CheckpointConfig, topology: Topology) -> Beginning:
    volume = Path(config.local_checkpoint_directory)
    if not config.enable_replicator:
        return _take_stock(config, topology, volume)
    ours = [
        share
        for meta in volume.glob("*.meta")
        if (share := files.parse_share_name(meta.name, "meta")) is not None
        and (share.job, share.node_rank) == (config.run_name, topology.node_rank)
    ]
    own = {share.step: data for share in ours if (data := _data_of(volume, share)) is not None}
    return dataclasses.replace(
        beginning,
        own=own,
        served={step: _shares_of(volume, config.run_name, step) for step in own},
        arrived_from="local",
        fault=None,
    )


def _data_of(volume: Path, share: files.ShareName) -> Path | None:
    """The directory that a ``.meta`` names; None when one of the two is not there any more."""
    try:
        name = files.data_name((volume / share.meta).read_text(errors="replace").strip())
    except FileNotFoundError:
        return None
    folder = volume / name
    return folder if files.DATA_NAME.fullmatch(name) and folder.is_dir() else None


def _shares_of(volume: Path, job: str, step: int) -> dict[str, Path]:
    """The data of one step in the volume: this node's, and copies of other nodes'."""
    found = {}
    for meta in volume.glob("*.meta"):
        share = files.parse_share_name(meta.name, "meta")
        if share is None or (share.job, share.step) != (job, step):
            continue
        data = _data_of(volume, share)
        if data is not None:
            found[data.name] = data
    return found


def candidates(
    beginning: Beginning,
    config: CheckpointConfig,
    topology: Topology,
    coordinator: Coordinator,
    step: int | None = None,
    *,
    saved_since: bool = False,
) -> Iterator[Candidate | PassedOver]:
    """What can be restored, the best first; the same on all processes. Call on every process.

    Args:
        beginning: what this process found.
        config: `backup_root`, `run_name` and `timeout_secs` are used.
        topology: the nodes of the job.
        coordinator: agreement with the other processes.
        step: only this step; None for all.
        saved_since: this run has saved steps since it began, so that the volumes hold others now.

    Raises:
        TierUnreadableError: the backup could not be read.
    """
    if saved_since:
        beginning = _look_again(beginning, config, topology)
    yield from _in_volumes(beginning, coordinator, step)
    if config.backup_root:
        yield from _in_backups(config, topology, coordinator, step)


def _in_volumes(
    beginning: Beginning, coordinator: Coordinator, wanted: int | None
) -> Iterator[Candidate]:
    told = coordinator.gather(
        "restore/volumes", {"steps": sorted(beginning.own), "fault": beginning.fault}
    )
    steps = sorted({step for t in told for step in t["steps"]}, reverse=True)
    if not steps and any(t["fault"] for t in told):
        steps = [-1]  # nobody knows which step; it is passed over with the reason
    for step in steps:
        if wanted is not None and step != wanted:
            continue
        own = beginning.own.get(step)
        yield Candidate(
            step=step,
            source="the cluster's memory",
            arrived_from=beginning.arrived_from,
            own=LocalPlace(own) if own is not None else None,
            served=beginning.served.get(step, {}),
            fault=beginning.fault,
        )


def _in_backups(
    config: CheckpointConfig, topology: Topology, coordinator: Coordinator, wanted: int | None
) -> Iterator[Candidate | PassedOver]:
    assert config.backup_root is not None
    root = BackupRoot(config.backup_root, timeout_secs=config.timeout_secs)
    listed = coordinator.decide(
        "restore/backups", None, lambda _: [_to_json(b) for b in root.backups(config.run_name)]
    )
    for backup in map(_from_json, listed):
        for step in sorted(backup.metas, reverse=True):
            if wanted is not None and step != wanted:
                continue
            source = f"{config.backup_root}/{config.run_name}/{backup.name}"
            fault = backup.fault(step)
            if fault is not None:
                yield PassedOver(step=step, source=source, reason=fault)
            else:
                yield _from_backup(root, config.run_name, backup, step, topology, source)


def _from_backup(
    root: BackupRoot, job: str, backup: Backup, step: int, topology: Topology, source: str
) -> Candidate:
    digests = backup.metas[step]
    own = digests.get(topology.node_rank)
    return Candidate(
        step=step,
        source=source,
        arrived_from="backup",
        own=root.place(job, backup, own) if own is not None else None,
        others=tuple(root.place(job, backup, digest) for digest in sorted(set(digests.values()))),
    )


def _to_json(backup: Backup) -> dict[str, Any]:
    metas = {str(s): {str(r): d for r, d in ranks.items()} for s, ranks in backup.metas.items()}
    return {"name": backup.name, "metas": metas, "data": sorted(backup.data)}


def _from_json(fields: dict[str, Any]) -> Backup:
    metas = {
        int(step): {int(rank): digest for rank, digest in ranks.items()}
        for step, ranks in fields["metas"].items()
    }
    return Backup(name=fields["name"], metas=metas, data=frozenset(fields["data"]))
