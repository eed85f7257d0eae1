"""The invariants, as far as one look at reports and disks can tell: see docs/invariants.md."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.crash import survey

# What may lie in a volume after a clean end, with a replicator and without.
AT_REST = (r".*\.meta", r".*\.data", r".*\.restore", r"replicator\.(prerestore|errors)")
STEPS = (r"[0-9]+",)
CONDEMNED = (r".*\.condemned", r"mtcheckpoint\.condemned\.json")
# What a restore raises when there is something and none of it is whole.
ERRORS = ("RestoreError",)
# Beside the shares: names, notes, what the replicator has to say.
SMALL_BYTES = 64 * 1024


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """What lay there when a run began.

    Attributes:
        memory: the newest step that survives in the volumes of this run.
        backup: the newest one that survives in a backup.
        offered: the step that the replicator will offer, if what it names is intact.
        offered_by_name: the same, whatever the state of what it names.
        left: there is any trace of a step.
        folders: how many shares lie in each folder, whatever their state.
    """

    memory: int | None
    backup: int | None
    offered: int | None
    offered_by_name: int | None
    left: bool
    folders: Mapping[Path, int]

    @property
    def bound(self) -> int | None:
        """What comes back is not older than this."""
        return max((s for s in (self.memory, self.backup) if s is not None), default=None)


class Saved:
    """What was handed to `save`, by run and step."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, int], set[int]] = {}
        self._nodes: dict[int, int] = {}

    def note(self, run: int, nodes: int, rank: int, steps: Sequence[int]) -> None:
        self._nodes[run] = nodes
        for step in steps:
            self._ranks.setdefault((run, step), set()).add(rank)

    def on_all(self, run: int, step: int) -> bool:
        return self._ranks.get((run, step)) == set(range(self._nodes.get(run, 0)))


def check_restored(
    told: Sequence[Mapping[str, Any]], before: Before, saved: Saved, ledger: survey.Ledger
) -> None:
    """Looks at what the processes say that came back; `told` is in the order of ranks."""
    first = told[0]
    for key in ("step", "error", "tier", "extras"):
        if any(other.get(key) != first.get(key) for other in told):
            raise Violation(f"the processes differ in {key}: {told}")
    if "error" in first:
        if before.bound is not None:
            raise Violation(f"step {before.bound} survived, and there was an error: {told}")
        if first["error"] not in ERRORS or not before.left:
            raise Violation(f"no damage can be the reason of this error: {told}")
        # Only for a step that it offers may the replicator be asked, and clear what it does not.
        if "Nothing was deleted" in first["text"] or before.offered_by_name is None:
            _check_nothing_deleted(before)
        return
    if first["step"] is None:
        if before.left:
            raise Violation("a fresh start, though there was something")
        return
    _check_step(first["step"], first["extras"], before, saved, ledger)
    for found in told:
        if found["wrong"]:
            raise Violation(found["wrong"])


def _check_step(
    step: int,
    extras: Sequence[Mapping[str, Any]],
    before: Before,
    saved: Saved,
    ledger: survey.Ledger,
) -> None:
    if before.bound is not None and step < before.bound:
        raise Violation(f"step {before.bound} survived, and step {step} was restored")
    if step not in ledger.steps_seen_whole():
        raise Violation(f"step {step} was restored, but never committed on all processes")
    if [e["rank"] for e in extras] != list(range(len(extras))):
        raise Violation(f"the extras of step {step} are not one of each rank: {extras}")
    if len({(e["run"], e["step"]) for e in extras} | {(extras[0]["run"], step)}) != 1:
        raise Violation(f"extras of different saves for step {step}: {extras}")
    if not saved.on_all(extras[0]["run"], step):
        raise Violation(f"run {extras[0]['run']} has not handed over step {step} on all processes")


def _check_nothing_deleted(before: Before) -> None:
    for folder, count in before.folders.items():
        now = survey.count_shares(folder)
        if now < count:
            raise Violation(f"{folder.name} held {count} shares before the error, and now {now}")


def check_kept(floor: int | None, survives: int | None) -> None:
    """What all processes of the run called committed, or what it began with, is still there."""
    if floor is not None and (survives is None or survives < floor):
        raise Violation(f"step {floor} was safe, and now the newest that survives is {survives}")


def check_backups(folders: Sequence[Path], harmed: set[Path]) -> None:
    """A backup that says that it is complete is."""
    for folder in folders:
        faults = [] if folder in harmed else list(survey.false_claims(folder))
        if faults:
            raise Violation(f"the backup {folder.name} is half visible: {faults}")


def unfinished(volume: Path, step: int, ranks: set[int] | None, most_steps: int) -> str:
    """What keeps a volume from being as it should be after a clean end; empty if nothing.

    Args:
        step: the last one.
        ranks: whose shares of it lie there, and of no other step for long; None without a
            replicator.
        most_steps: of how many steps there may be shares.
    """
    names = sorted(path.name for path in volume.iterdir())
    allowed = [*CONDEMNED, *(AT_REST if ranks is not None else STEPS)]
    odd = [name for name in names if not any(re.fullmatch(a, name) for a in allowed)]
    if odd:
        return f"{odd} lie there"
    shares = list(survey.shares_in(volume))
    steps = {share.step for share in shares}
    held = {share.rank for share in shares if share.step == step}
    if max(steps, default=None) != step or len(steps) > most_steps or held != (ranks or held):
        return f"holds {[(s.step, s.rank) for s in shares]}"
    others = [path for path in survey.share_folders(volume) if survey.is_another_jobs(path)]
    unknown = set(survey.share_folders(volume)) - {share.path for share in shares} - {*others}
    if unknown:
        return f"{sorted(path.name for path in unknown)} belong to no save"
    return _too_large(volume, shares, [*volume.glob("*.condemned"), *others])


def _too_large(
    volume: Path, shares: Sequence[survey.FoundShare], not_counted: Sequence[Path]
) -> str:
    counted = survey.size_bytes(volume) - sum(map(survey.size_bytes, not_counted))
    wanted = sum(survey.size_bytes(share.path) for share in shares)
    return "" if counted <= wanted + SMALL_BYTES else f"{counted} bytes for shares of {wanted}"
