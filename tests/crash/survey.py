"""What the volumes and backups hold, by looking at the disk alone; and harm done to it.

Deliberately naive, and none of the library's own reading: a share is intact when its files are,
byte for byte, what they were when it was first seen.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.crash.worker import JOB

SHARE_NAME = re.compile(r"[0-9]+|[0-9]+\.again|.+-s[0-9]+-n[0-9]+-w0\.save|D?[a-z0-9]{64}\.data")
# Says that a step was lost in the one way in which one may be.
UNSAFE_NOTE = "mtcheckpoint.unsafe.json"
META_NAME = re.compile(rf"{JOB}-s([0-9]+)-n([0-9]+)-w0\.meta")

Save = tuple[int, str]  # step and id


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundShare:
    """A share on the disk."""

    path: Path
    step: int
    save_id: str
    rank: int
    nodes: int
    files: dict[str, int]

    @property
    def key(self) -> tuple[int, str, int]:
        return self.step, self.save_id, self.rank


def shares_in(folder: Path) -> Iterator[FoundShare]:
    """The shares in a volume or a dated backup that say of themselves what they are."""
    for path in share_folders(folder):
        found = _look(path)
        if found is not None:
            yield found


def share_folders(folder: Path) -> list[Path]:
    """What has the name of a share, whatever is in it."""
    return [p for p in sorted(folder.iterdir()) if SHARE_NAME.fullmatch(p.name) and p.is_dir()]


def count_shares(folder: Path) -> int:
    """Of how many shares anything is left there, those included that were set aside as bad."""
    return len(share_folders(folder)) + len(list(folder.glob("*.condemned")))


def _look(path: Path) -> FoundShare | None:
    try:
        identity = json.loads((path / "mtcheckpoint" / "identity.json").read_text())
        if identity["job"] != JOB:
            return None
        return FoundShare(
            path=path,
            step=identity["step"],
            save_id=identity["save_id"],
            rank=identity["node_rank"],
            nodes=identity["nodes"],
            files={str(p.relative_to(path)): zlib.crc32(p.read_bytes()) for p in files_of(path)},
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_another_jobs(path: Path) -> bool:
    """Whether a share says that it is none of this job's, for instance after a bit was flipped."""
    try:
        identity = json.loads((path / "mtcheckpoint" / "identity.json").read_text())
        return str(identity["job"]) != JOB
    except (OSError, ValueError, KeyError, TypeError):
        return False


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_of(folder))


class Ledger:
    """What was once seen whole, so that harm is told from the start."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, str, int], dict[str, int]] = {}
        self._nodes: dict[Save, int] = {}

    def note(self, folders: Sequence[Path]) -> None:
        """Takes down every share that is new. Call before any harm is done to it."""
        for folder in folders:
            for share in shares_in(folder):
                self._files.setdefault(share.key, share.files)
                self._nodes.setdefault(share.key[:2], share.nodes)

    def steps_seen_whole(self) -> set[int]:
        """The steps of which every share was once seen under the name of a committed one."""
        ranks: dict[Save, set[int]] = {}
        for step, save_id, rank in self._files:
            ranks.setdefault((step, save_id), set()).add(rank)
        return {save[0] for save, found in ranks.items() if len(found) == self._nodes[save]}

    def intact(self, folder: Path) -> list[FoundShare]:
        return [s for s in shares_in(folder) if self._files.get(s.key) == s.files]

    def newest_in_memory(self, volumes: Sequence[Path]) -> int | None:
        """The newest step all of whose shares are intact somewhere in these volumes."""
        return max((step for step, _ in self.whole_in_memory(volumes)), default=None)

    def whole_in_memory(self, volumes: Sequence[Path]) -> dict[Save, int]:
        """The saves all of whose shares are intact in these volumes, and how many those are."""
        held: dict[Save, set[int]] = {}
        for volume in volumes:
            for share in self.intact(volume):
                held.setdefault(share.key[:2], set()).add(share.rank)
        return {
            save: self._nodes[save]
            for save, ranks in held.items()
            if ranks == set(range(self._nodes[save]))
        }

    def newest_offered(self, volumes: Sequence[Path], nodes: int) -> int | None:
        """`newest_named`, if that is one save and intact; else nobody can say what is offered."""
        step = newest_named(volumes, nodes)
        if step is None:
            return None
        intact = {share.path.name: share for volume in volumes for share in self.intact(volume)}
        shares = [intact.get(name) for name in _names_in(volumes, step)]
        saves = {(share.key[:2], share.nodes) if share is not None else None for share in shares}
        ours = len(shares) == nodes and len(saves) == 1
        return step if ours and all(s and (s[0][0], s[1]) == (step, nodes) for s in saves) else None

    def holders(self, volumes: Sequence[Path], step: int) -> list[int]:
        """The positions of the volumes in which an intact share of `step` lies."""
        return [
            position
            for position, volume in enumerate(volumes)
            if any(share.step == step for share in self.intact(volume))
        ]

    def newest_in_backup(self, backup: Path) -> int | None:
        """The newest step of which one dated folder holds every share, and says so."""
        return max((s for f in backup_folders(backup) for s in self._backed_up(f)), default=None)

    def _backed_up(self, folder: Path) -> Iterator[int]:
        intact = {share.path.name: share for share in self.intact(folder)}
        for step, by_rank in _claims(folder).items():
            shares = [intact.get(name) for name in by_rank.values()]
            if all(s is not None and s.step == step for s in shares):
                (first, *_) = [share for share in shares if share is not None]
                if set(by_rank) == set(range(first.nodes)):
                    yield step


def _claims(folder: Path) -> dict[int, dict[int, str]]:
    """What the ``.meta`` files say: by step and rank, the name of the data."""
    named: dict[int, dict[int, str]] = {}
    for meta in folder.iterdir():
        match = META_NAME.fullmatch(meta.name)
        if match is not None:
            text = meta.read_bytes().decode(errors="replace")
            named.setdefault(int(match[1]), {})[int(match[2])] = f"{text}.data"
    return named


def newest_named(volumes: Sequence[Path], nodes: int) -> int | None:
    """The newest step for every rank of which a ``.meta`` names data that is there."""
    there = {path.name for volume in volumes for path in share_folders(volume)}
    ranks: dict[int, set[int]] = {}
    for volume in volumes:
        for step, by_rank in _claims(volume).items():
            ranks.setdefault(step, set()).update(r for r, name in by_rank.items() if name in there)
    return max((step for step, found in ranks.items() if found >= set(range(nodes))), default=None)


def _names_in(volumes: Sequence[Path], step: int) -> set[str]:
    """The data that any ``.meta`` names for a step."""
    return {name for volume in volumes for name in _claims(volume).get(step, {}).values()}


def false_claims(folder: Path) -> Iterator[str]:
    """The ``.meta`` of an unharmed backup whose data is not there: it comes before them."""
    shares = {share.path.name: share for share in shares_in(folder)}
    for step, by_rank in _claims(folder).items():
        for rank, name in by_rank.items():
            share = shares.get(name)
            if share is None or (share.step, share.rank) != (step, rank):
                yield f"step {step}, rank {rank}: {name}"


def backup_folders(backup: Path) -> list[Path]:
    return sorted((backup / JOB).glob("????-??-??_??-??"))


def is_anything_left(volumes: Sequence[Path], backup: Path) -> bool:
    """Whether there is any trace of a step, however damaged: then "nothing" is no answer."""
    folders = [*volumes, *backup_folders(backup)]
    return any(
        SHARE_NAME.fullmatch(path.name)
        or META_NAME.fullmatch(path.name)
        or path.name == UNSAFE_NOTE
        for folder in folders
        for path in folder.iterdir()
    )


# Harm.


def wipe(volume: Path) -> None:
    for entry in volume.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def damage(rng: random.Random, folder: Path) -> str:
    """Harms one file of a share, or a whole share, or a ``.meta``; says what it did."""
    shares = share_folders(folder)
    metas = [path for path in sorted(folder.iterdir()) if META_NAME.fullmatch(path.name)]
    if not shares:
        return f"nothing to damage in {folder.name}"
    share = rng.choice(shares)
    kind = rng.choice(["flip", "flip", "cut", "empty", "remove", "remove share", "meta"])
    if kind == "remove share":
        shutil.rmtree(share)
        return f"removed {folder.name}/{share.name}"
    target = rng.choice(metas if kind == "meta" and metas else files_of(share))
    kind = rng.choice(["flip", "cut", "remove"]) if kind == "meta" else kind
    content = bytearray(target.read_bytes())
    if kind == "remove":
        target.unlink()
    elif kind == "flip" and content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        target.write_bytes(content)
    else:
        target.write_bytes(content[: 0 if kind == "empty" else len(content) // 2])
    return f"{kind} {folder.name}/{target.relative_to(folder)}"
