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
    for path in sorted(folder.iterdir()):
        if SHARE_NAME.fullmatch(path.name) and path.is_dir():
            found = _look(path)
            if found is not None:
                yield found


def _look(path: Path) -> FoundShare | None:
    try:
        identity = json.loads((path / "mtcheckpoint" / "identity.json").read_text())
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


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


class Ledger:
    """What was once seen whole, so that harm is told from the start."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, str, int], dict[str, int]] = {}

    def note(self, folders: Sequence[Path]) -> None:
        """Takes down every share that is new. Call before any harm is done to it."""
        for folder in folders:
            for share in shares_in(folder):
                self._files.setdefault(share.key, share.files)

    def intact(self, folder: Path) -> list[FoundShare]:
        return [s for s in shares_in(folder) if self._files.get(s.key) == s.files]

    def newest_in_memory(self, volumes: Sequence[Path]) -> int | None:
        """The newest step all of whose shares are intact somewhere in these volumes."""
        held: dict[Save, set[int]] = {}
        nodes: dict[Save, int] = {}
        for volume in volumes:
            for share in self.intact(volume):
                held.setdefault(share.key[:2], set()).add(share.rank)
                nodes[share.key[:2]] = share.nodes
        whole = [save for save, ranks in held.items() if ranks == set(range(nodes[save]))]
        return max((step for step, _ in whole), default=None)

    def newest_in_backup(self, backup: Path) -> int | None:
        """The newest step of which one dated folder holds every share, and says so."""
        return max((s for f in backup_folders(backup) for s in self._backed_up(f)), default=None)

    def _backed_up(self, folder: Path) -> Iterator[int]:
        intact = {share.path.name: share for share in self.intact(folder)}
        named: dict[int, dict[int, str]] = {}
        for meta in folder.iterdir():
            match = META_NAME.fullmatch(meta.name)
            if match is not None:
                text = meta.read_bytes().decode(errors="replace")
                named.setdefault(int(match[1]), {})[int(match[2])] = f"{text}.data"
        for step, by_rank in named.items():
            shares = [intact.get(name) for name in by_rank.values()]
            if all(s is not None and s.step == step for s in shares):
                (first, *_) = [share for share in shares if share is not None]
                if set(by_rank) == set(range(first.nodes)):
                    yield step


def backup_folders(backup: Path) -> list[Path]:
    return sorted((backup / JOB).glob("????-??-??_??-??"))


def is_anything_left(volumes: Sequence[Path], backup: Path) -> bool:
    """Whether there is any trace of a step, however damaged: then "nothing" is no answer."""
    folders = [*volumes, *backup_folders(backup)]
    return any(
        SHARE_NAME.fullmatch(path.name) or META_NAME.fullmatch(path.name)
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
    shares = [path for path in sorted(folder.iterdir()) if SHARE_NAME.fullmatch(path.name)]
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
