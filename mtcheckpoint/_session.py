"""One run in this process's volume: what lies there, the handshake, and what can be restored.

The replicator destroys what does not fit the new run. So the volumes are looked at first, and what
the replicator will not offer is read before the handshake.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtcheckpoint import _events, _topology
from mtcheckpoint._backup_list import BackupList
from mtcheckpoint._choice import Choice, Save, VolumeSummary, choose
from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._described import Description, describe_step
from mtcheckpoint._handshake import client, files
from mtcheckpoint._preflight import check_before_first_step, warn_of_clocks
from mtcheckpoint._restored import Candidate, PassedOver
from mtcheckpoint._shares import condemned
from mtcheckpoint._shares.backups import Backup
from mtcheckpoint._shares.inventory import PIN_FOLDER, HeldShare, Volume, pin
from mtcheckpoint._shares.places import LocalPlace, Tier
from mtcheckpoint._shares.volume import STAGING_FOLDER
from mtcheckpoint._topology import Topology
from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.errors import MarkerError

__all__ = ["Answer", "Session"]

_LOG = logging.getLogger("mtcheckpoint.restore")

_MEMORY = "the cluster's memory"
_LOOKS = 5

# Says, while it lies there, which step is in no volume yet though training goes on from it.
_UNSAFE_FILE = "mtcheckpoint.unsafe.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the replicator answered to this process.

    Attributes:
        step: the step that it offers; None for none.
        share: this process's share of it.
        arrived_from: where it came from.
        fault: why the answer could not be used.
        errors: what the replicator wrote to its error file.
        finished_at: on the monotonic clock.
    """

    step: int | None = None
    share: Path | None = None
    arrived_from: Tier = "local"
    fault: str | None = None
    errors: str = ""
    finished_at: float = dataclasses.field(default_factory=time.monotonic)


class Session:
    """A run, from its first look at the volume. Call every method on all processes."""

    def __init__(
        self, config: CheckpointConfig, topology: Topology, coordinator: Coordinator
    ) -> None:
        self._config = config
        self._topology = topology
        self._coordinator = coordinator
        self._volume = Path(config.local_checkpoint_directory)
        self._answer: Answer | None = None
        # Where shares were read from in this run, whatever their names there.
        self._held: dict[Path, HeldShare] = {}
        self._condemned: tuple[str, ...] = ()
        self._inventory: Volume | None = None
        self._choice: Choice | None = None  # until the volumes are looked at
        self._notes: tuple[PassedOver, ...] = ()
        self.seconds: dict[str, float] = {}

    @property
    def answer(self) -> Answer | None:
        """The replicator's answer; None before the handshake."""
        return self._answer

    def shake_hands(self) -> Answer:
        """Hands the run to the replicator, once; without one, only tidies up.

        Raises:
            HandshakeError: the replicator is not usable, here or on another process.
            WaitTimeoutError: the replicator did not answer.
        """
        if self._answer is None:
            self._look()
            if self._config.enable_replicator:
                self._answer = self._coordinator.agree("handshake", self._shake_hands)
            else:
                self._answer = Answer()
            # What a killed save left behind. With a replicator it is gone already.
            for leftover in (STAGING_FOLDER, PIN_FOLDER):
                shutil.rmtree(self._volume / leftover, ignore_errors=True)
            self._choice = None  # the replicator has changed what lies there
        return self._answer

    def candidates(
        self, step: int | None = None, *, saved_since: bool = False, may_shake_hands: bool = True
    ) -> Iterator[Candidate | PassedOver]:
        """What can be restored: the newest step first, the nearest place first within a step.

        The handshake happens on the way, when the step is reached that the replicator offers.

        Args:
            step: only this step; None for all.
            saved_since: this run has saved steps, so that the volumes hold others now.
            may_shake_hands: False reads what lies in the volumes as it is, as long as anything
                does.

        Raises:
            TierUnreadableError: the backup could not be read, and nothing nearer was accepted.
        """
        if saved_since:
            self._choice = None
        backups = BackupList(self._config, self._coordinator)
        choice = self._look(backups)
        yield from self._notes
        for position, save in enumerate(choice.saves):
            while (backup := backups.newer_than(save.step)) is not None:
                yield from self._in_backup(backups, *backup, step)
            if step is not None and save.step != step:
                continue
            if position == choice.offered and may_shake_hands and not saved_since:
                yield from self._offered(save)
            else:
                yield self._in_memory(save)
        while (backup := backups.newer_than(-1)) is not None:
            yield from self._in_backup(backups, *backup, step)
        if not saved_since and self._may_shake_hands_still(choice, step):
            yield from self._unforeseen(choice, step)
        backups.raise_if_unreadable()

    def restorable_steps(self) -> tuple[int, ...]:
        """Steps that can be restored as far as names tell, oldest first. Reads no state.

        Raises:
            TierUnreadableError: the backup could not be read, and memory holds nothing.
        """
        saves = self._look().saves
        steps = {save.step for save in saves if not save.gone}
        backups = BackupList(self._config, self._coordinator)
        while (found := backups.newer_than(-1)) is not None:
            backup, step = found
            if backup.fault(step) is None:
                steps.add(step)
        if not steps:
            backups.raise_if_unreadable()
            # Names are not all: the shares that are there may hold what the others did. "No step"
            # would be a fresh start.
            steps = {save.step for save in saves}
        return tuple(sorted(steps))

    def is_offered(self, step: int) -> bool:
        """Whether the volumes hold `step` in this run as this topology saves it.

        Call after the handshake. A replicator also offers ranks 0 and 1 of four to two nodes.
        """
        answer = self.shake_hands()
        offered = answer.step == step and any(
            share.step == step
            and share.node_rank == self._topology.node_rank
            and share.nodes in (0, self._topology.nodes)
            for share in self._usable_shares().shares
        )
        return all(self._coordinator.gather("restore/offered", offered))

    def let_go(self) -> None:
        """Lets go of what was held fast for reading: it keeps memory from being freed."""
        shutil.rmtree(self._volume / PIN_FOLDER, ignore_errors=True)

    def what_is_left(self) -> str:
        """What became of the shares that were found, as a sentence."""
        if self._answer is None or not self._config.enable_replicator:
            return "Nothing was deleted"
        return "The replicator has kept what it offered and cleared the rest of the volumes"

    def mark_unsafe(self, step: int) -> None:
        """Notes in the volume that `step` was read and is in no volume yet."""
        note = self._volume / _UNSAFE_FILE
        text = json.dumps({"job": self._config.run_name, "step": step})
        note.with_name(note.name + ".tmp").write_text(text)
        note.with_name(note.name + ".tmp").rename(note)

    def mark_safe(self) -> None:
        """Takes the note of `mark_unsafe` back."""
        (self._volume / _UNSAFE_FILE).unlink(missing_ok=True)

    def condemn(self, paths: Sequence[Path]) -> None:
        """Sees to it that bad shares of this node are not tried again; deletes nothing.

        Call when nobody reads any more.
        """
        shares = [self._held[path] for path in paths if path in self._held]
        for share in shares:
            _events.happened(
                "restore/condemned", level=logging.WARNING, step=share.step, path=str(share.path)
            )
        try:
            if shares and self._config.enable_replicator:
                condemned.take_note(self._volume, self._config.run_name, shares)
            elif not self._config.enable_replicator:
                for path in {share.path for share in shares} | self._nameless_steps():
                    condemned.set_aside(path)
        except OSError as error:
            # It costs time at the next start, no more: every restore looks again.
            _LOG.warning("bad shares stay in the volume %s: %s", self._volume, error)

    def describe(self, step: int) -> Description | None:
        """What a share of `step` tells of its save, the nearest one; None when there is none.

        Raises:
            TierUnreadableError: no volume holds the step, and the backup could not be read.
        """
        if self._inventory is None:
            self._look()
        shares = [share for share in self._usable_shares().shares if share.step == step]
        shares.sort(key=lambda share: share.node_rank != self._topology.node_rank)
        return describe_step(
            step,
            [LocalPlace(share.path) for share in shares],
            BackupList(self._config, self._coordinator),
            self._coordinator,
            timeout_secs=self._config.timeout_secs,
        )

    def _nameless_steps(self) -> set[Path]:
        """Step directories that do not say any more whose they are: they would be in the way."""
        damaged = self._inventory.damaged_paths if self._inventory is not None else ()
        return {path for path in damaged if files.is_step_name(path.name) and path.exists()}

    # Looking.

    def _usable_shares(self, *, before_handshake: bool = False) -> Volume:
        found, self._condemned = condemned.usable_shares(
            self._volume,
            self._config.run_name,
            before_handshake=before_handshake and self._config.enable_replicator,
        )
        return found

    def _look(self, backups: BackupList | None = None) -> Choice:
        """What memory holds, agreed on once; in the same round, the names of the backups."""
        if self._choice is None:
            begun = time.monotonic()
            together_at = None
            if self._inventory is None:
                check_before_first_step(self._config, self._coordinator)
                together_at = time.time()  # all return from that at about the same moment
            else:
                self._coordinator.agree(
                    "look at the volume", lambda: client.check_volume(self._volume)
                )
            self._inventory = self._usable_shares(before_handshake=self._answer is None)
            notes = [self._unsafe_step(), self._inventory.damaged, self._condemned]
            choice, told, names = self._coordinator.decide(
                "restore/inventory",
                [together_at, self._summary(), notes],
                lambda told: [*self._chosen(told), backups.names() if backups else None],
                # As long as process 0 may wait for the backups' names.
                timeout_secs=2 * self._config.timeout_secs if backups else None,
            )
            if backups is not None:
                backups.take_names(names)
            self._choice = Choice.from_json(choice)
            self._notes = self._noted(self._choice, {int(p): note for p, note in told.items()})
            self.seconds["inventory"] = time.monotonic() - begun
        return self._choice

    def _summary(self) -> list[Any]:
        assert self._inventory is not None
        found = self._inventory
        return VolumeSummary(
            node_rank=self._topology.node_rank,
            shares=tuple((s.step, s.save_id, s.node_rank, s.nodes, s.digest) for s in found.shares),
            metas=found.metas,
            digests=tuple(sorted(found.digests)),
        ).to_json()

    def _chosen(self, told: tuple[Any, ...]) -> tuple[dict[str, Any], dict[int, Any]]:
        """Process 0: what is in memory, and the notes of the processes that have any."""
        times, summaries, notes = zip(*told, strict=True)
        if None not in times:
            warn_of_clocks(times, self._coordinator.names)
        choice = choose(
            [VolumeSummary.from_json(summary) for summary in summaries],
            nodes=self._topology.nodes,
            replicas=self._topology.data_parallelism,
            offers=self._config.enable_replicator,
        )
        noted = {process: note for process, note in enumerate(notes) if note != [None, [], []]}
        return choice.to_json(), noted

    def _noted(self, choice: Choice, told: Mapping[int, Any]) -> tuple[PassedOver, ...]:
        """What was in memory and cannot be restored: damaged shares, and a step that is lost."""
        concerned = {process: entry[1:] for process, entry in told.items() if any(entry[1:])}
        notes = []
        names = self._coordinator.names(concerned)
        for name, (bad, known) in zip(names, concerned.values(), strict=True):
            source = f"{_MEMORY} of {name}"
            if bad:
                text = "; ".join(bad)
                notes.append(PassedOver(step=None, source=source, reason=text, damaged=True))
            if known:
                notes.append(PassedOver(step=None, source=source, reason="; ".join(known)))
        lost = max((step for step, *_ in told.values() if step is not None), default=None)
        if lost is not None and not any(s.step >= lost and not s.gone for s in choice.saves):
            reason = "an earlier run read it from memory and ended before it had saved it again"
            notes.append(PassedOver(step=lost, source=_MEMORY, reason=reason))
        return tuple(notes)

    def _unsafe_step(self) -> int | None:
        try:
            note = json.loads((self._volume / _UNSAFE_FILE).read_text())
            return int(note["step"]) if note["job"] == self._config.run_name else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    # The handshake.

    def _shake_hands(self) -> Answer:
        unsafe = self._unsafe_step()
        answer = self._ask_the_replicator()
        if unsafe is not None and (answer.step is None or answer.step < unsafe):
            self.mark_unsafe(unsafe)  # at once: the replicator has removed the note
        return answer

    def _ask_the_replicator(self) -> Answer:
        held = {entry.name for entry in self._volume.glob("*.data")}
        begun = time.monotonic()
        try:
            found = client.run_handshake(
                self._volume,
                _topology.replicator_settings(self._config, self._topology),
                job=self._config.run_name,
                node_rank=self._topology.node_rank,
                timeout_secs=self._config.timeout_secs,
            )
        except MarkerError as error:
            # The replicator runs; only its answer is of no use here. Others may hold the step.
            return Answer(fault=str(error))
        finally:
            self.seconds["handshake"] = time.monotonic() - begun
        if found.step is None or found.share is None:
            return Answer(errors=found.errors)
        arrived: Tier = "local" if found.share.name in held else "peer"
        return Answer(
            step=found.step,
            share=found.share,
            arrived_from="backup" if found.restore_backup is not None else arrived,
            errors=found.errors,
        )

    # Candidates.

    def _offered(self, save: Save) -> Iterator[Candidate]:
        """The step that the replicator should offer, as it lies in the volumes after it has."""
        self.shake_hands()
        yield from self._answered(save.step)

    def _may_shake_hands_still(self, choice: Choice, wanted: int | None) -> bool:
        """False when the handshake would destroy what could not be restored, for no gain.

        With a backup root everything that a replicator could bring was tried already. Without one
        it may know of a backup, which is of use to as many nodes as have saved it.
        """
        if self._answer is not None or not (choice.saves or self._notes):
            return True
        if self._config.backup_root or wanted is not None:
            return False
        of_this_many = [save.nodes in (0, self._topology.nodes) for save in choice.saves]
        return any(of_this_many) or not of_this_many

    def _unforeseen(self, choice: Choice, wanted: int | None) -> Iterator[Candidate | PassedOver]:
        """What the replicator offers though it was not in memory: it has read a backup, say."""
        answer = self.shake_hands()
        told = self._coordinator.gather("restore/answers", [answer.step, answer.fault])
        steps = {step for step, _ in told if step is not None}
        if choice.offered is not None:
            steps -= {choice.saves[choice.offered].step}
        for step in sorted(steps, reverse=True):
            if wanted is None or step == wanted:
                yield from self._answered(step)
        faults = [fault for _, fault in told if fault]
        if faults and not steps:
            yield PassedOver(step=None, source=_MEMORY, reason="; ".join(faults))

    def _answered(self, step: int) -> Iterator[Candidate]:
        answer = self.shake_hands()
        inventory = self._usable_shares()
        shares = [share for share in inventory.shares if share.step == step]
        self._held |= {share.path: share for share in shares}
        own = {share.node_rank: LocalPlace(share.path) for share in shares}
        rank = self._topology.node_rank
        fault = answer.fault
        if answer.step == step and answer.share is not None:
            # With replicas it may be a twin's: then it stands for this node's own.
            own[rank] = LocalPlace(answer.share)
        elif fault is None:
            fault = f"the replicator offers {answer.step} here, and {step} elsewhere"
        yield Candidate(
            step=step,
            source=_MEMORY,
            arrived_from=answer.arrived_from,
            own_rank=rank,
            own=lambda: own,
            served=True,
            fault=fault,
        )

    def _in_memory(self, save: Save) -> Candidate:
        """A save as it lies in the volumes when it is opened, held fast while it is read."""
        return Candidate(
            step=save.step,
            source=_MEMORY,
            arrived_from="local",
            own_rank=self._topology.node_rank,
            own=lambda: {s.node_rank: LocalPlace(s.path) for s in self._hold(save)},
            served=True,
            gone=save.gone,
        )

    def _hold(self, save: Save) -> list[HeldShare]:
        for _ in range(_LOOKS):
            try:
                return [self._pinned(share) for share in self._shares_of(save)]
            except FileNotFoundError:
                # The replicator has moved it meanwhile: from `<step>` to `.save` to `.data`.
                self._inventory = self._usable_shares()
        return []

    def _shares_of(self, save: Save) -> list[HeldShare]:
        assert self._inventory is not None
        return [
            share
            for share in self._inventory.shares
            if share.step == save.step
            and (share.save_id == save.save_id or (not share.save_id and share.nodes == save.nodes))
        ]

    def _pinned(self, share: HeldShare) -> HeldShare:
        held = pin(share, self._volume) if self._config.enable_replicator else share
        self._held[held.path] = share
        return held

    def _in_backup(
        self, backups: BackupList, backup: Backup, step: int, wanted: int | None
    ) -> Iterator[Candidate | PassedOver]:
        if wanted is not None and step != wanted:
            return
        source = f"{self._config.backup_root}/{self._config.run_name}/{backup.name}"
        fault = backup.fault(step)
        if fault is not None:
            yield PassedOver(step=step, source=source, reason=fault)
            return
        yield Candidate(
            step=step,
            source=source,
            arrived_from="backup",
            own_rank=self._topology.node_rank,
            backup=lambda: backups.places(backup, step),
        )
