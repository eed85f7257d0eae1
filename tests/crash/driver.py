"""Plays one seed: runs, strikes, harms, starts again, and compares with what must come back."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint.testing import ProcessGroup, ram_disk
from tests.crash import points, survey, worker

VOLUMES = 4
TIMEOUT_SECS = 20.0
LIMIT_SECS = 90.0
# What may lie in a volume after a clean end, with a replicator and without.
AT_REST = (r".*\.meta", r".*\.data", r".*\.restore", r"replicator\.(prerestore|errors)")
CONDEMNED = (r".*\.condemned", r"mtcheckpoint\.condemned\.json")


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strike:
    """How a run ends.

    Attributes:
        kind: ``kill``, ``point``, ``full`` (the victim's disk, and killed later), ``replicator``
            (killed first), ``replicator point``, or ``end``.
        die: the point, for processes that die at one.
        victim: the rank that is struck.
        commits: committed steps to wait for.
        delay: seconds after them.
    """

    kind: str
    die: list[Any] | None
    victim: int
    commits: int
    delay: float


class Game:
    """One seed."""

    def __init__(self, seed: int, root: Path, rounds: int) -> None:
        self.rng = random.Random(seed)
        self.root = root
        self.rounds = rounds
        self.replicated = self.rng.random() < 0.75
        self.nodes = 2
        self.story: list[str] = [f"seed {seed}, {'with' if self.replicated else 'no'} replicator"]
        self.ledger = survey.Ledger()
        self.saved: set[int] = set()
        self.backup = root / "backup"
        self.backup.mkdir()
        self.volumes = [root / f"node{index}" for index in range(VOLUMES)]
        for volume in self.volumes:
            volume.mkdir()
        # Small disks are full soon. The replicator would end with them.
        self.mounted = [v for v in self.volumes if not self.replicated and mount(v)]
        self.replicator: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def play(self) -> None:
        try:
            for number in range(self.rounds):
                last = number == self.rounds - 1
                self.run(number, self.quiet_end() if last else self.new_strike())
                if not last:
                    self.harm()
        finally:
            self.kill_replicator()
            for volume in self.mounted:
                subprocess.run(["umount", str(volume)], check=True)

    def tell(self, text: str) -> None:
        self.story.append(text)

    # What will happen.

    def new_strike(self) -> Strike:
        kinds = ["kill", "kill", "point", "point", "point", "end"]
        if self.replicated:
            kinds += ["replicator", "replicator point"]
        if self.mounted:
            kinds += ["full", "full"]
        kind = self.rng.choice(kinds)
        die: list[Any] | None = None
        if kind == "point":
            # In the first run there is nothing to read.
            named = [*points.TRAINING, *(points.STARTING if self.saved else ())]
            die = self.a_pass_of(named)
        elif kind == "replicator point":
            die = self.a_pass_of([*points.REPLICATOR])
        return Strike(
            kind=kind,
            die=die,
            victim=self.rng.randrange(self.nodes),
            commits=self.rng.randint(1, 5),
            delay=self.rng.choice([0.0, self.rng.random() * 0.3]),
        )

    def a_pass_of(self, named: list[str]) -> list[Any]:
        point = self.rng.choice(named)
        most = 2 if point in points.STARTING else 6
        return [point, self.rng.choice(["before", "after"]), self.rng.randint(1, most)]

    def quiet_end(self) -> Strike:
        return Strike(kind="end", die=None, victim=0, commits=3, delay=0.0)

    # A run.

    def run(self, number: int, strike: Strike) -> None:
        visible = self.volumes[: self.nodes]
        self.ledger.note([*self.volumes, *survey.backup_folders(self.backup)])
        bounds = [self.ledger.newest_in_memory(visible), self.ledger.newest_in_backup(self.backup)]
        bound = max((b for b in bounds if b is not None), default=None)
        left = survey.is_anything_left(visible, self.backup)
        self.tell(f"run {number}: {self.nodes} nodes, at least {bound} {bounds}, {strike}")
        (self.root / "enough").unlink(missing_ok=True)
        if self.replicated:
            self.start_replicator(strike.die if strike.kind == "replicator point" else None)
        options = {
            "die": strike.die if strike.kind == "point" else None,
            "full": strike.commits if strike.kind == "full" else None,
            "victim": strike.victim,
            "run": number,
            "replicated": self.replicated,
            "timeout_secs": TIMEOUT_SECS,
        }
        devices = worker.DEVICES // self.nodes
        with ProcessGroup(
            worker.train, self.nodes, devices=devices, args=[str(self.root), options]
        ) as group:
            self.watch(group, strike, bound, left)
            for rank in range(self.nodes):
                self.saved |= {e["step"] for e in group.events(rank) if e.name == "about to save"}
            if strike.kind == "end" and not self.failed(group):
                self.end_well(group)
        # A replicator lives on, for as long as it takes to take the last step, or not.
        if self.rng.random() < 0.5:
            pause(self.rng.random())
        self.kill_replicator()

    def watch(self, group: ProcessGroup, strike: Strike, bound: int | None, left: bool) -> None:
        if not self.wait(group, strike, lambda: self.have_all(group, "restored")):
            self.tell("struck before the restore was over")
            return
        self.check_restored(group, bound, left)
        if self.failed(group):
            self.start_anew()
            return
        # Beyond a full disk there are commits again.
        wanted = strike.commits + (2 if strike.kind == "full" else 0)
        if not self.wait(group, strike, lambda: self.commits(group) >= wanted):
            self.tell(f"struck after {self.commits(group)} commits")
            return
        if strike.kind in ("point", "replicator point"):
            limit = Deadline.after(8.0)
            if not self.wait(group, strike, limit.passed):
                self.tell(f"struck after {self.commits(group)} commits")
                return
        pause(strike.delay)
        if strike.kind == "replicator":
            self.kill_replicator()
            pause(self.rng.random())
        if strike.kind in ("kill", "full"):
            group.kill(strike.victim)
            pause(self.rng.choice([0.0, 0.2]))
        self.tell(f"ends after {self.commits(group)} commits")

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

        return self.eventually(seen, f"run with {strike}", group)

    def is_struck(self, group: ProcessGroup, strike: Strike) -> bool:
        if strike.kind == "point":
            return group.poll()[strike.victim] is not None
        if strike.kind == "replicator point":
            return self.replicator is not None and self.replicator.poll() is not None
        return False

    def check_alive(self, group: ProcessGroup) -> None:
        for rank, process in enumerate(group._processes):
            fault = process.fault()
            if process.finished() and not any(
                "error" in e.fields for e in group.events(rank) if e.name == "restored"
            ):
                fault = fault or f"finished by itself: {process.outcome()}"
            if fault is not None:
                raise Violation(f"process {rank}: {fault}\n{group.output(rank)[-3000:]}")

    def have_all(self, group: ProcessGroup, name: str) -> bool:
        return all(any(e.name == name for e in group.events(r)) for r in range(self.nodes))

    def commits(self, group: ProcessGroup) -> int:
        return sum(event.name == "committed" for event in group.events(0))

    # What must hold.

    def check_restored(self, group: ProcessGroup, bound: int | None, left: bool) -> None:
        told = [
            next(e.fields for e in group.events(rank) if e.name == "restored")
            for rank in range(self.nodes)
        ]
        (first, *others) = told
        self.tell("restored " + "; ".join(map(str, told)))
        if any(
            (o.get("step"), o.get("error")) != (first.get("step"), first.get("error"))
            for o in others
        ):
            raise Violation(f"the processes differ: {told}")
        if "error" in first:
            if bound is not None:
                raise Violation(f"step {bound} survived, and there was an error: {told}")
            return
        step = first["step"]
        if step is None:
            if left:
                raise Violation("a fresh start, though there was something")
            return
        if bound is not None and step < bound:
            raise Violation(f"step {bound} survived, and step {step} was restored")
        if step not in self.saved:
            raise Violation(f"step {step} was never saved")
        for found in told:
            if found["wrong"]:
                raise Violation(found["wrong"])
            extras = found["extras"]
            if [e["rank"] for e in extras] != list(range(len(extras))) or len(
                {(e["run"], e["step"]) for e in extras} | {(extras[0]["run"], step)}
            ) != 1:
                raise Violation(f"extras of different saves for step {step}: {extras}")

    def failed(self, group: ProcessGroup) -> bool:
        return any(e.name == "restored" and "error" in e.fields for e in group.events(0))

    def end_well(self, group: ProcessGroup) -> None:
        (self.root / "enough").touch()
        group.wait(LIMIT_SECS)
        self.saved |= {e["step"] for e in group.events(0) if e.name == "about to save"}
        last = max(e["step"] for e in group.events(0) if e.name == "committed")
        for rank in range(self.nodes):
            self.eventually(
                lambda r=rank: not (unfinished := self.unfinished(r, last)) or None,
                f"node{rank} to come to rest with step {last}",
                group,
            )

    def unfinished(self, rank: int, step: int) -> str:
        """What keeps a volume from being as it should be after a clean end; empty if nothing."""
        volume = self.volumes[rank]
        names = sorted(p.name for p in volume.iterdir())
        allowed = [*CONDEMNED, *(AT_REST if self.replicated else (r"[0-9]+",))]
        odd = [name for name in names if not any(re.fullmatch(a, name) for a in allowed)]
        if odd:
            return f"{odd} lie there"
        shares = list(survey.shares_in(volume))
        steps = {share.step for share in shares}
        if self.replicated:
            copies = {rank, (rank + self.nodes // 2) % self.nodes}
            held = {share.rank for share in shares if share.step == step}
            # What is being backed up is kept until the next step is replicated.
            most = 2 if "an earlier backup is still running" in self.log() else 1
            if held == copies and max(steps) == step and len(steps) <= most:
                return ""
            return f"holds {[(s.step, s.rank) for s in shares]}"
        return "" if max(steps, default=None) == step and len(steps) <= 2 else f"holds {steps}"

    def eventually(self, look: Callable[[], Any], what: str, group: ProcessGroup | None) -> Any:
        try:
            return wait_for(look, Deadline.after(LIMIT_SECS), what)
        except Exception as error:
            if isinstance(error, Violation) or group is None:
                raise
            group._add_stacks(error)
            outputs = "\n".join(group.output(r)[-6000:] for r in range(self.nodes))
            faults = [self.unfinished(r, -1) for r in range(self.nodes)]
            raise Violation(
                f"{what}: {error}\n{faults}\n{self.log()[-2000:]}\n{outputs}"
            ) from error

    # Between runs.

    def harm(self) -> None:
        folders = [*self.volumes, *survey.backup_folders(self.backup)]
        self.ledger.note(folders)
        if self.rng.random() < 0.3:
            position = self.rng.randrange(self.nodes)
            survey.wipe(self.volumes[position])
            self.tell(f"node{position} is lost")
        for _ in range(self.rng.choice([0, 0, 1, 1, 2])):
            folder = self.rng.choice(self.volumes[: self.nodes] + folders[VOLUMES:])
            self.tell(survey.damage(self.rng, folder))
        if self.rng.random() < 0.3:
            self.nodes = self.rng.choice([1, 2, 4] if self.replicated else [2])

    def start_anew(self) -> None:
        """As a person would, after an error that says that nothing is whole."""
        self.kill_replicator()
        for folder in [*self.volumes, self.backup]:
            survey.wipe(folder)

    # The replicator.

    def start_replicator(self, die: list[Any] | None) -> None:
        orders = {
            "directories": [str(volume) for volume in self.volumes],
            "backup": str(self.backup),
            "die": die,
        }
        command = [sys.executable, worker.__file__, json.dumps(orders)]
        self.starts += 1
        with open(self.root / "replicator.log", "ab") as log:
            self.replicator = subprocess.Popen(command, stdout=log, stderr=log)
        self.eventually(
            lambda: self.log().count("serving") >= self.starts or None, "the replicator", None
        )

    def log(self) -> str:
        path = self.root / "replicator.log"
        return path.read_text() if path.exists() else ""

    def kill_replicator(self) -> None:
        if self.replicator is not None:
            self.replicator.send_signal(signal.SIGKILL)
            self.replicator.wait(30)
            self.replicator = None


def mount(volume: Path) -> bool:
    """A small tmpfs of its own, where that is allowed."""
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "mtcheckpoint-crash", str(volume)]
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def play(seed: int, *, rounds: int = 4) -> list[str]:
    """Plays a seed; returns what happened.

    Raises:
        Violation: an invariant did not hold; its text tells the whole story.
    """
    with ram_disk(prefix=f"mtcheckpoint-crash-{seed}-") as root:
        game = Game(seed, root, rounds)
        try:
            game.play()
        except Exception as error:
            story = "\n  ".join(game.story)
            raise Violation(f"{type(error).__name__}: {error}\n\n  {story}") from error
    return game.story


def main(arguments: Sequence[str] | None = None) -> int:
    import argparse
    import time

    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many (20)")
    parser.add_argument("--first", type=int, default=0, help="the first one (0)")
    parser.add_argument("--seed", type=int, help="only this one, with all that it did")
    parser.add_argument("--rounds", type=int, default=4, help="runs a seed (4)")
    chosen = parser.parse_args(arguments)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    failed = []
    for seed in [chosen.seed] if chosen.seed is not None else seeds:
        begun = time.monotonic()
        try:
            story = play(seed, rounds=chosen.rounds)
        except Violation as violation:
            failed.append(seed)
            print(f"seed {seed} FAILED: {violation}", flush=True)
        else:
            print(f"seed {seed} passed in {time.monotonic() - begun:.0f} s", flush=True)
            if chosen.seed is not None:
                print("\n".join(story))
    print(f"{len(failed)} failed: {failed}" if failed else "all passed")
    return bool(failed)
