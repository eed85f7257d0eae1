"""Plays one seed: runs, strikes, harms, starts again, and compares with what must come back."""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint.testing import ProcessGroup, ram_disk
from tests.crash import checks, survey, worker
from tests.crash.checks import Before, Violation
from tests.crash.replicator import Replicator
from tests.crash.strikes import QUIET_END, Prospects, Strike, Tally, new_strike

VOLUMES = 4
TIMEOUT_SECS = 20.0
LIMIT_SECS = 90.0
# Smaller ones are refused before the first step.
DISK_MIB = 6
# For a point that is come by in saving.
SECONDS_TO_POINT = 8.0


class Game:
    """One seed."""

    def __init__(self, seed: int, root: Path, rounds: int) -> None:
        self.rng = random.Random(seed)
        self.root = root
        self.rounds = rounds
        self.nodes = 2
        self.tally = Tally()
        self.ledger = survey.Ledger()
        self.saved = checks.Saved()
        self.backup = root / "backup"
        self.backup.mkdir()
        self.harmed: set[Path] = set()
        self.volumes = [root / f"node{index}" for index in range(VOLUMES)]
        for volume in self.volumes:
            volume.mkdir()
        replicated = self.rng.random() < 0.75
        self.replicator = Replicator(self.volumes, self.backup) if replicated else None
        # Small disks are full soon. The replicator would end with them.
        self.mounted = [v for v in self.volumes if not replicated and mount(v)]
        self.story = [f"seed {seed}, {'with' if replicated else 'no'} replicator"]

    def play(self) -> None:
        try:
            for number in range(self.rounds - 1):
                self.run(number, self.new_strike())
                self.harm()
            if not self.run(self.rounds - 1, QUIET_END):
                self.run(self.rounds, QUIET_END)
        finally:
            self.kill_replicator()
            for volume in self.mounted:
                subprocess.run(["umount", str(volume)], check=True)

    def tell(self, text: str) -> None:
        self.story.append(text)

    @property
    def visible(self) -> list[Path]:
        """The volumes of the present nodes."""
        return self.volumes[: self.nodes]

    def backups(self) -> list[Path]:
        return survey.backup_folders(self.backup)

    def look(self) -> Before:
        folders = [*self.volumes, *self.backups()]
        self.ledger.note(folders)
        return Before(
            memory=self.ledger.newest_in_memory(self.visible),
            backup=self.ledger.newest_in_backup(self.backup),
            offered=self.ledger.newest_offered(self.visible, self.nodes),
            offered_by_name=survey.newest_named(self.visible, self.nodes),
            left=survey.is_anything_left(self.visible, self.backup),
            folders={folder: survey.count_shares(folder) for folder in folders},
        )

    def new_strike(self) -> Strike:
        before = self.look()
        ahead = Prospects(
            replicated=self.replicator is not None,
            mounted=bool(self.mounted),
            restores=before.bound is not None,
            offered=before.offered_by_name is not None,
            nodes=self.nodes,
            salvages=self.salvages(before.backup) if self.replicator is not None else {},
        )
        strike, self.nodes = new_strike(self.rng, ahead)
        return strike

    def salvages(self, backup: int | None) -> dict[int, list[int]]:
        """For how many nodes memory holds what the replicator will not offer, and who holds it."""
        found = {}
        for nodes in (1, 2, 4):
            volumes = self.volumes[:nodes]
            newest = self.ledger.newest_in_memory(volumes)
            if newest is None or newest < (backup or 0):
                continue
            if self.ledger.newest_offered(volumes, nodes) != newest:
                found[nodes] = self.ledger.holders(volumes, newest)
        return found

    # A run.

    def run(self, number: int, strike: Strike) -> bool:
        """False when nothing could be restored; then all is wiped for a new start."""
        if self.replicator is not None:
            self.replicator.start(strike.die if strike.kind == "replicator point" else None)
        before = self.look()
        self.tell(
            f"run {number}: {self.nodes} nodes, at least {before.bound}"
            f" (memory {before.memory}, backup {before.backup}), {strike}"
        )
        (self.root / "enough").unlink(missing_ok=True)
        with self.training(number, strike) as group:
            try:
                self.watch(group, strike, before)
                self.note_saved(group, number)
                if strike.kind == "end" and not self.failed(group):
                    self.end_well(group)
                    self.note_saved(group, number)
            finally:
                self.tally.note(strike, self.is_struck(group, strike))
            failed, committed = self.failed(group), self.committed_on_all(group)
        # A replicator lives on, for as long as it takes to take the last step, or not.
        if self.rng.random() < 0.5:
            pause(self.rng.random())
        self.kill_replicator()
        self.check_kept(before, committed)
        checks.check_backups(self.backups(), self.harmed)
        if failed:
            self.start_anew()
        return not failed

    @contextlib.contextmanager
    def training(self, number: int, strike: Strike) -> Iterator[ProcessGroup]:
        options = {
            "die": strike.die if strike.kind == "point" else None,
            "full": strike.commits if strike.kind == "full" else None,
            "victim": strike.victim,
            "run": number,
            "replicated": self.replicator is not None,
            "timeout_secs": TIMEOUT_SECS,
        }
        devices = worker.DEVICES // self.nodes
        with ProcessGroup(
            worker.train, self.nodes, devices=devices, args=[str(self.root), options]
        ) as group:
            yield group

    def watch(self, group: ProcessGroup, strike: Strike, before: Before) -> None:
        if not self.wait(group, strike, lambda: self.have_all(group, "restored")):
            self.tell("struck before the restore was over")
            return
        told = [e.fields for r in range(self.nodes) for e in named(group, r, "restored")]
        self.tell("restored " + "; ".join(map(str, told)))
        checks.check_restored(told, before, self.saved, self.ledger)
        if self.failed(group):
            return
        # Beyond a full disk there are commits again.
        wanted = strike.commits + (2 if strike.kind == "full" else 0)
        if not self.wait(group, strike, lambda: len(named(group, 0, "committed")) >= wanted):
            self.tell(f"struck after {len(named(group, 0, 'committed'))} commits")
            return
        if strike.die is not None:
            limit = Deadline.after(SECONDS_TO_POINT)
            self.wait(group, strike, limit.passed)
        pause(strike.delay)
        if strike.kind == "replicator":
            self.kill_replicator()
            pause(self.rng.random())
        if strike.kind in ("kill", "full"):
            group.kill(strike.victim)
            pause(self.rng.choice([0.0, 0.2]))
        self.tell(f"ends after {len(named(group, 0, 'committed'))} commits")

    def wait(self, group: ProcessGroup, strike: Strike, look: Callable[[], bool]) -> bool:
        """Waits; False when the victim is dead instead."""

        def seen() -> bool | None:
            if look():
                return True
            try:
                self.check_alive(group)
            except Violation:
                if not self.is_struck(group, strike):
                    raise
            return False if self.is_struck(group, strike) else None

        return bool(self.eventually(seen, f"run with {strike}", group))

    def is_struck(self, group: ProcessGroup, strike: Strike) -> bool:
        if strike.kind == "point":
            return group.poll()[strike.victim] is not None
        if strike.kind == "replicator point":
            return self.replicator is not None and not self.replicator.is_alive()
        return False

    def check_alive(self, group: ProcessGroup) -> None:
        for rank, process in enumerate(group._processes):
            fault = process.fault()
            if process.finished() and not any(
                "error" in event.fields for event in named(group, rank, "restored")
            ):
                fault = fault or f"finished by itself: {process.outcome()}"
            if fault is not None:
                raise Violation(f"process {rank}: {fault}\n{group.output(rank)[-3000:]}")

    # What the processes say.

    def have_all(self, group: ProcessGroup, name: str) -> bool:
        return all(named(group, rank, name) for rank in range(self.nodes))

    def failed(self, group: ProcessGroup) -> bool:
        return any("error" in event.fields for event in named(group, 0, "restored"))

    def committed_on_all(self, group: ProcessGroup) -> int | None:
        """The newest step that each process has called committed."""
        told = [[e["step"] for e in named(group, r, "committed")] for r in range(self.nodes)]
        return min(map(max, told)) if all(told) else None

    def note_saved(self, group: ProcessGroup, number: int) -> None:
        for rank in range(self.nodes):
            steps = [event["step"] for event in named(group, rank, "about to save")]
            self.saved.note(number, self.nodes, rank, steps)

    # What must hold.

    def check_kept(self, before: Before, committed: int | None) -> None:
        now = self.look()
        checks.check_kept(committed, now.memory)
        checks.check_kept(before.backup, now.backup)
        if self.replicator is None or before.offered == before.memory:
            checks.check_kept(before.memory, now.bound)
        elif now.bound != before.memory:
            # The one exception: struck between a restore from memory and the save that follows it.
            self.tell(f"memory held step {before.memory}, and now {now.bound} is left")

    def end_well(self, group: ProcessGroup) -> None:
        (self.root / "enough").touch()
        group.wait(LIMIT_SECS)
        last = max(event["step"] for event in named(group, 0, "committed"))
        for rank in range(self.nodes):
            self.eventually(
                lambda r=rank: not self.unfinished(r, last) or None,
                f"node{rank} to come to rest with step {last}",
                group,
            )

    def unfinished(self, rank: int, step: int) -> str:
        """What keeps a volume from being as it should be after a clean end; empty if nothing."""
        if self.replicator is None:
            return checks.unfinished(self.volumes[rank], step, None, most_steps=2)
        copies = {rank, (rank + self.nodes // 2) % self.nodes}
        # What is being backed up is kept until the next step is replicated.
        most = 2 if "an earlier backup is still running" in self.log() else 1
        return checks.unfinished(self.volumes[rank], step, copies, most_steps=most)

    def eventually(self, look: Callable[[], Any], what: str, group: ProcessGroup) -> Any:
        try:
            return wait_for(look, Deadline.after(LIMIT_SECS), what)
        except Violation:
            raise
        except Exception as error:
            group._add_stacks(error)
            outputs = "\n".join(group.output(r)[-6000:] for r in range(self.nodes))
            faults = [self.unfinished(r, -1) for r in range(self.nodes)]
            raise Violation(f"{what}: {error}\n{faults}\n{outputs}") from error

    # Between runs.

    def harm(self) -> None:
        if self.rng.random() < 0.3:
            position = self.rng.randrange(self.nodes)
            survey.wipe(self.volumes[position])
            self.tell(f"node{position} is lost")
        for _ in range(self.rng.choice([0, 0, 1, 1, 2])):
            folder = self.rng.choice([*self.visible, *self.backups()])
            self.harmed.add(folder)
            self.tell(survey.damage(self.rng, folder))
        if self.rng.random() < 0.3:
            self.nodes = self.rng.choice([1, 2, 4] if self.replicator is not None else [2])

    def start_anew(self) -> None:
        """As a person would, after an error that says that nothing is whole."""
        for folder in [*self.volumes, self.backup]:
            survey.wipe(folder)
        self.ledger, self.saved = survey.Ledger(), checks.Saved()

    def log(self) -> str:
        """What the replicator has said."""
        return self.replicator.log() if self.replicator is not None else ""

    def kill_replicator(self) -> None:
        if self.replicator is not None:
            self.replicator.kill()


def named(group: ProcessGroup, rank: int, name: str) -> list[Any]:
    """The reports of one kind."""
    return [event for event in group.events(rank) if event.name == name]


def mount(volume: Path) -> bool:
    """A small tmpfs of its own, where that is allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "mtcheckpoint-crash", str(volume)]
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def play(seed: int, *, rounds: int = 4, tally: Tally | None = None) -> list[str]:
    """Plays a seed; returns what happened.

    Args:
        tally: what was struck is added to it.

    Raises:
        Violation: an invariant did not hold; its text tells the whole story.
    """
    with ram_disk(prefix=f"mtcheckpoint-crash-{seed}-") as root:
        game = Game(seed, root, rounds)
        try:
            game.play()
        except Exception as error:
            story = "\n  ".join(game.story)
            raise Violation(
                f"{type(error).__name__}: {error}\n\n  {story}\n{game.log()[-4000:]}"
            ) from error
        finally:
            if tally is not None:
                tally.add(game.tally)
    return game.story
