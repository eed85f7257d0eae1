"""What can be told before the first step: small checks, each of which gives findings.

`mtcheckpoint doctor` runs all of them, and the manager the cheap local ones on every process.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._handshake import client, files
from mtcheckpoint._initialize import parse_init_info
from mtcheckpoint._shares.places import LocalPlace
from mtcheckpoint._shares.volume import set_aside_text
from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.errors import HandshakeError, TierUnreadableError

__all__ = [
    "Finding",
    "check_before_first_step",
    "check_clocks",
    "check_protocol_files",
    "check_ram_disk",
    "check_room",
    "check_set_aside",
    "check_versions",
    "needed_shares",
    "warn_of_clocks",
]

_LOG = logging.getLogger("mtcheckpoint.preflight")

Level = Literal["OK", "WARN", "FAIL"]

# Even a state of a few numbers is some 30 files, each at least a page, and there are copies.
_LEAST_BYTES = 4 << 20
# A replicator that runs takes its YAML well before that.
_STALE_SECONDS = 10.0
_CLOCK_SECONDS = 60.0

# What a volume must hold at once, in shares: with replicas, and with copies to one peer.
_REPLICAS_SHARES = 2.2
_COPIES_SHARES = 6.6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line.

    Attributes:
        level: ``"FAIL"`` when nothing can work like this, ``"WARN"`` when something may not.
        what: what was looked at.
        found: what was found there.
        remedy: what to do about it; empty when all is well, or when `found` says it.
    """

    level: Level
    what: str
    found: str
    remedy: str = ""

    @property
    def line(self) -> str:
        remedy = f": {self.remedy}" if self.remedy else ""
        return " ".join(f"{self.what}: {self.found}{remedy}".split())

    def to_json(self) -> dict[str, str]:
        return dataclasses.asdict(self)


# The RAM disk.


def check_ram_disk(volume: Path) -> list[Finding]:
    """Whether it is there, writable for this user, and a mount; at most one thing is at fault."""
    what = f"RAM disk {volume}"
    try:
        client.check_volume(volume)
    except HandshakeError as error:
        return [Finding(level="FAIL", what="RAM disk", found=str(error))]
    kind = _mounted_as(volume)
    written = Finding(level="OK", what=what, found=f"writable for user {os.geteuid()}")
    if kind is None:
        remedy = "mount the RAM disk there: as it is, what is saved goes to a disk, or is lost"
        return [written, Finding(level="WARN", what=what, found="is not a mount", remedy=remedy)]
    if kind not in ("tmpfs", "ramfs"):
        remedy = "saves are as fast as that is: mount a tmpfs"
        found = f"is a mount of {kind}, not in memory"
        return [written, Finding(level="WARN", what=what, found=found, remedy=remedy)]
    return [written, Finding(level="OK", what=what, found=f"is a mount of {kind}")]


def _mounted_as(folder: Path) -> str | None:
    """The type of the file system that is mounted just there; None when nothing is."""
    wanted = os.path.realpath(folder)
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return "a file system" if os.path.ismount(folder) else None
    kinds = {}
    for line in lines:
        fields, _, source = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields.split()[4])
        kinds[point] = source.split()[0]  # the last one is on top
    return kinds.get(wanted)


def needed_shares(config: CheckpointConfig, nodes: int | None) -> tuple[float, str]:
    """How many shares the RAM disk must hold at once, and why. Pure.

    The figures are those that the replicator's documentation gives for one step that is kept, one
    that is being backed up, and one that arrives.
    """
    if not config.enable_replicator:
        kept = config.max_num_checkpoints_to_keep or 1
        return kept + 1.0, f"{kept} kept and one being written"
    if nodes == 1:
        return _REPLICAS_SHARES, "a single node holds no copies of others"
    replicas = config.mtc_data_parallelism or config.num_slices or 1
    if config.replication == "replicas" or (config.replication == "auto" and replicas > 1):
        return _REPLICAS_SHARES, "replicas of the state hold each other's data"
    peers = config.peers_per_node or 1
    shares = _COPIES_SHARES + (peers - 1) * (_COPIES_SHARES - _REPLICAS_SHARES)
    return shares, f"own data and copies to {peers} peer{'s' if peers > 1 else ''}"


def check_room(
    config: CheckpointConfig, *, state_bytes: int | None = None, nodes: int | None = None
) -> list[Finding]:
    """Whether the RAM disk is large enough for the policy.

    Args:
        config: the flags.
        state_bytes: of the whole state; None when it is not known.
        nodes: of the job; None when that is not known: then the state is one node's.
    """
    volume = Path(config.local_checkpoint_directory)
    what = f"room in {volume}"
    try:
        found = os.statvfs(volume)
    except OSError:
        return []  # said by `check_ram_disk`
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if total == 0:  # a tmpfs without a limit
        return [Finding(level="OK", what=what, found="has no limit of its own")]
    shares, why = needed_shares(config, nodes)
    has = f"{total:,} bytes in all, {free:,} free"
    formula = f"{shares:.1f} x a node's share of the state ({why})"
    if state_bytes is None:
        if total < _LEAST_BYTES:
            remedy = f"give it {formula}, and at least {_LEAST_BYTES:,} bytes"
            return [Finding(level="FAIL", what=what, found=has, remedy=remedy)]
        most = int(total / shares)
        found_text = f"{has}: enough for shares of {most:,} bytes, needed are {formula}"
        return [Finding(level="OK", what=what, found=found_text)]
    share_bytes = _share_bytes(config, state_bytes, nodes)
    needed = max(math.ceil(shares * share_bytes), _LEAST_BYTES)
    needs = f"needed are {needed:,} = {formula} of {share_bytes:,} bytes"
    if total < needed:
        remedy = f"give it {needed:,} bytes, or fewer of the state to each node"
        return [Finding(level="FAIL", what=what, found=f"{has}, {needs}", remedy=remedy)]
    return [Finding(level="OK", what=what, found=f"{has}, {needs}")]


def check_set_aside(volume: Path) -> list[Finding]:
    """Whether shares that were found bad take memory; they are never deleted by themselves."""
    text = set_aside_text(volume)
    if not text:
        return []
    return [Finding(level="WARN", what=f"room in {volume}", found=text.removeprefix("; "))]


def _share_bytes(config: CheckpointConfig, state_bytes: int, nodes: int | None) -> int:
    replicas = config.mtc_data_parallelism or config.num_slices or 1
    return math.ceil(state_bytes / max((nodes or 1) // replicas, 1))


# The protocol.


def check_protocol_files(config: CheckpointConfig) -> list[Finding]:
    """What lies in the volume of the replicator's and the CSI driver's files."""
    volume = Path(config.local_checkpoint_directory)
    if not os.access(volume, os.R_OK | os.X_OK, effective_ids=True) or not volume.is_dir():
        return []  # said by `check_ram_disk`
    return [_init_info(volume), *_replicator(volume, config.enable_replicator)]


def _init_info(volume: Path) -> Finding:
    what = files.JAX_INIT_INFO_FILE
    try:
        text = LocalPlace(volume).read(what)
        if text is None:
            return _no_init_info(what)
        info = parse_init_info(text.decode(errors="replace"), str(volume / what))
    except (HandshakeError, TierUnreadableError) as error:
        return Finding(level="FAIL", what=what, found=str(error))
    if info is None:
        remedy = "see whether all pods of the job run, and the CSI driver's log"
        return Finding(level="WARN", what=what, found="is half-written", remedy=remedy)
    found = f"process {info.process_id}, coordinator {info.address}"
    return Finding(level="OK", what=what, found=found)


def _no_init_info(what: str) -> Finding:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        remedy = "the CSI driver writes it once every pod has a rank: initialize waits for it"
        return Finding(level="WARN", what=what, found="is not there", remedy=remedy)
    return Finding(level="OK", what=what, found="is not there: JAX looks for a cluster itself")


def _replicator(volume: Path, used: bool) -> list[Finding]:
    what = "replicator"
    if not used:
        return [Finding(level="OK", what=what, found="is not used (enable_replicator=False)")]
    findings = []
    failed = volume / files.FAILED_FILE
    if os.path.lexists(failed):
        remedy = "left from an earlier run, or the replicator has stopped: see its log"
        found = f"{files.FAILED_FILE} is there"
        findings.append(Finding(level="WARN", what=what, found=found, remedy=remedy))
    age_secs = _age_secs(volume / files.REPLICATOR_YAML)
    if age_secs is not None and age_secs > _STALE_SECONDS:
        remedy = "no replicator runs on this node, or it refused the file: see its log"
        found = f"{files.REPLICATOR_YAML} has lain there for {age_secs:.0f} s and was not taken"
        return [*findings, Finding(level="WARN", what=what, found=found, remedy=remedy)]
    if _has_traces(volume):
        found = "has worked in this volume"
        return [*findings, Finding(level="OK", what=what, found=found)]
    remedy = "whether one runs shows when it is handed replicator.yaml"
    found = "has left nothing in this volume"
    return [*findings, Finding(level="WARN", what=what, found=found, remedy=remedy)]


def _age_secs(file: Path) -> float | None:
    try:
        return time.time() - file.lstat().st_mtime
    except OSError:
        return None


def _has_traces(volume: Path) -> bool:
    names = os.listdir(volume)
    return files.PRERESTORE_FILE in names or any(
        name.endswith((".meta", ".restore")) or files.DATA_NAME.fullmatch(name) for name in names
    )


# Versions.


def check_versions(
    required: Mapping[str, str], version_of: Callable[[str], str | None]
) -> list[Finding]:
    """Whether what is installed is new enough. Pure.

    Args:
        required: least versions, by name of the distribution.
        version_of: the version of a distribution; None when it is not installed.
    """
    return [_version(name, least, version_of(name)) for name, least in required.items()]


def _version(name: str, least: str, found: str | None) -> Finding:
    what = f"version of {name}"
    remedy = f"install {name} {least} or newer"
    if found is None:
        return Finding(level="FAIL", what=what, found="is not installed", remedy=remedy)
    if _numbers(found) < _numbers(least):
        return Finding(level="FAIL", what=what, found=found, remedy=remedy)
    return Finding(level="OK", what=what, found=found)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"[0-9]+", version)[:3]]


# Clocks.


def check_clocks(seconds: Sequence[float], names: Callable[[Sequence[int]], Any]) -> list[Finding]:
    """Whether the processes' clocks tell the same time. Pure.

    Args:
        seconds: what each process's clock showed at about the same moment.
        names: spells processes.
    """
    earliest, latest = min(seconds), max(seconds)
    difference = latest - earliest
    if difference <= _CLOCK_SECONDS:
        found = f"differ by {difference:.1f} s at most"
        return [Finding(level="OK", what="clocks", found=found)]
    behind, ahead = names([seconds.index(earliest), seconds.index(latest)])
    return [
        Finding(
            level="WARN",
            what="clocks",
            found=f"differ by {difference:.0f} s: {behind} is behind, {ahead} is ahead",
            remedy="let NTP set them: backups are named, and saves ordered, by time",
        )
    ]


# All of it, before the first step.


def check_before_first_step(config: CheckpointConfig, coordinator: Coordinator) -> None:
    """Checks what is local and cheap, on all processes. Call on every process.

    Raises:
        HandshakeError: something on some process cannot work; one line, the same on all.
    """
    volume = Path(config.local_checkpoint_directory)
    findings = [*check_ram_disk(volume), *check_room(config), *check_set_aside(volume)]
    for finding in findings:
        if finding.level == "WARN":
            _LOG.warning("%s", finding.line)
    failed = next((finding.line for finding in findings if finding.level == "FAIL"), None)
    coordinator.decide("preflight", failed, lambda told: _refuse(told, coordinator))


def warn_of_clocks(times: Sequence[float], names: Callable[[Sequence[int]], Any]) -> None:
    """Warns of what `check_clocks` finds."""
    for finding in check_clocks(times, names):
        if finding.level == "WARN":
            _LOG.warning("%s", finding.line)


def _refuse(told: Sequence[str | None], coordinator: Coordinator) -> None:
    failed = [process for process, line in enumerate(told) if line is not None]
    if not failed:
        return
    line = told[failed[0]]
    if len(told) > 1:
        line = f"{', '.join(coordinator.names(failed[:5]))}: {line}"
    if len(failed) > 5:
        line = f"{line} (and {len(failed) - 5} more processes)"
    raise HandshakeError(line)
