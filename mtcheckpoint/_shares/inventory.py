"""What lies in one volume: shares, finished by training or taken by a replicator, and their names.

Each process looks at its own volume only; what it finds is small and is sent to the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from mtcheckpoint._handshake import files
from mtcheckpoint._shares.identity import (
    IDENTITY_FILE,
    NODES_LIMIT,
    STATE_ITEM,
    Identity,
    identity_from_json,
)
from mtcheckpoint._shares.places import read_small_file
from mtcheckpoint.errors import ShareError

__all__ = ["HeldShare", "PIN_FOLDER", "Volume", "jobs_in", "pin", "take_inventory"]

# Not digits, and not kept by a replicator's clean-up.
PIN_FOLDER = "mtcheckpoint.pinned"

# `<step>`: committed, not taken. `<step>.again`: being announced again. `.save`: being hashed.
_AGAIN = re.compile(r"([0-9]+)\.again")
_LOOKS = 20

# A hash, and what an editor may add.
_META_BYTES = 4096

_ORBAX_PROCESS = re.compile(r"ocdbt\.process_([0-9]+)")
_ORBAX_ID = "orbax-"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeldShare:
    """A share that lies in a volume.

    Attributes:
        step: the step that it stands for here: that of its ``.meta`` or its directory.
        save_id: of the save that wrote it; made from step and layout for Orbax's own shares.
        node_rank: the rank of the save that wrote it.
        nodes: ranks of that save; 0 when the share does not say.
        digest: the hash it is known by, once a replicator took it.
        path: where it lies.
    """

    step: int
    save_id: str
    node_rank: int
    nodes: int
    digest: str | None
    path: Path

    @property
    def by_orbax(self) -> bool:
        """Whether Orbax wrote it, so that it does not say whose it is."""
        return self.save_id.startswith(_ORBAX_ID)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """The inventory of one volume.

    Attributes:
        shares: shares of the job that could be identified.
        metas: what ``.meta`` files of the job say: step, rank and hash. An empty hash: nobody can
            tell what a replicator makes of that file.
        digests: hashes whose data lies here.
        damaged: shares that could not be identified, and why.
        damaged_paths: where they lie.
    """

    shares: tuple[HeldShare, ...]
    metas: tuple[tuple[int, int, str], ...]
    digests: frozenset[str]
    damaged: tuple[str, ...]
    damaged_paths: tuple[Path, ...] = ()


def take_inventory(volume: Path, job: str) -> Volume:
    """Looks at what lies in a volume; other jobs' files are left out.

    A replicator may still be moving the last step of the run before: then it is looked again, so
    that nothing is overlooked on its way from one name to the next.
    """
    for _ in range(_LOOKS):
        names = _names(volume)
        found = _look(volume, names, job)
        if _names(volume) == names:
            break
    return found


def _names(volume: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(volume))


def _look(volume: Path, names: list[str], job: str) -> Volume:
    metas = [found for name in names if (found := _read_meta(volume / name, job)) is not None]
    digests = frozenset(m[1] for name in names if (m := files.DATA_NAME.fullmatch(name)))
    shares: list[HeldShare] = []
    damaged: dict[Path, str] = {}
    for step, rank, digest, path in _directories(volume, names, metas, job):
        try:
            share = _identify(path, job=job, step=step, rank=rank, digest=digest)
        except ShareError as error:
            damaged[path] = str(error)
            continue
        if share is not None:
            shares.append(share)
    return Volume(
        shares=tuple(shares),
        metas=tuple(metas),
        digests=digests,
        damaged=tuple(damaged.values()),
        damaged_paths=tuple(damaged),
    )


def jobs_in(volume: Path) -> set[str]:
    """The jobs of which something lies in a volume, as far as names and shares tell."""
    jobs = set()
    for entry in os.scandir(volume):
        named = [files.parse_share_name(entry.name, kind) for kind in ("meta", "save")]
        jobs |= {share.job for share in named if share is not None}
        if files.is_step_name(entry.name) or _AGAIN.fullmatch(entry.name):
            try:
                text = read_small_file(Path(entry.path) / IDENTITY_FILE)
                jobs.add(identity_from_json(text, entry.path).job)
            except (OSError, ShareError):
                continue  # Orbax's own, or damaged: it does not say
    return jobs


def pin(share: HeldShare, volume: Path) -> HeldShare:
    """The same share under a name that no replicator removes until the next handshake.

    Hard links: it costs no memory, and reading can go on while a replicator tidies up.

    Raises:
        FileNotFoundError: it was moved or removed meanwhile; take the inventory again.
    """
    target = volume / PIN_FOLDER / f"{share.step}-{share.node_rank}-{share.save_id[:16]}"
    if target.exists():
        return dataclasses.replace(share, path=target)
    building = target.with_name(target.name + ".tmp")
    shutil.rmtree(building, ignore_errors=True)
    try:
        shutil.copytree(share.path, building, copy_function=os.link, symlinks=True)
    except shutil.Error as error:
        # Moved half-way: copytree collects what it could not find, and goes on to the end.
        if share.path.exists():
            raise
        shutil.rmtree(building, ignore_errors=True)
        raise FileNotFoundError(f"{share.path} was moved while it was linked") from error
    os.rename(building, target)
    return dataclasses.replace(share, path=target)


def _read_meta(path: Path, job: str) -> tuple[int, int, str] | None:
    share = files.parse_share_name(path.name, "meta")
    if share is None or share.job != job or share.worker != 0:
        return None
    try:
        text = read_small_file(path, limit_bytes=_META_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ShareError):
        text = b""
    digest = text.decode(errors="replace").strip()
    return share.step, share.node_rank, digest if files.is_digest(digest) else ""


def _directories(
    volume: Path, names: list[str], metas: list[tuple[int, int, str]], job: str
) -> Iterator[tuple[int | None, int | None, str | None, Path]]:
    """Directories that may be shares: step, rank, hash and path, as far as their names tell."""
    for step, rank, digest in metas:
        if digest:
            yield step, rank, digest, volume / files.data_name(digest)
    named = {digest for _, _, digest in metas}
    for name in names:
        data = files.DATA_NAME.fullmatch(name)
        if data is not None and data[1] not in named:
            # A replicator that ended between the two renames: only the share itself tells its step.
            yield None, None, data[1], volume / name
        share = files.parse_share_name(name, "save")
        again = _AGAIN.fullmatch(name)
        if files.is_step_name(name) or again is not None:
            yield int(again[1] if again is not None else name), None, None, volume / name
        elif share is not None and share.job == job:
            yield share.step, share.node_rank, None, volume / name


def _identify(
    path: Path, *, job: str, step: int | None, rank: int | None, digest: str | None
) -> HeldShare | None:
    """The share in a directory; None when it is gone, unfinished, or another job's.

    Raises:
        ShareError: it is ours, and damaged.
    """
    if not (path / STATE_ITEM / "manifest.ocdbt").is_file():
        return None
    try:
        text = read_small_file(path / IDENTITY_FILE)
    except OSError as error:
        # What is being deleted has another name, so that this one is not on its way out.
        if files.is_step_name(path.name) and (path / IDENTITY_FILE).parent.is_dir():
            raise ShareError(f"{path}: {IDENTITY_FILE} is gone", place=str(path)) from error
        # Orbax's own do not say whose they are: without a name they are nobody's.
        if step is None:
            return None
        return _identify_orbax(path, step=step, rank=rank, digest=digest)
    identity = identity_from_json(text, str(path))
    if identity.job != job:
        return None
    step = identity.step if step is None else step
    return _held(identity, step=step, rank=rank, digest=digest, path=path)


def _held(
    identity: Identity, *, step: int, rank: int | None, digest: str | None, path: Path
) -> HeldShare:
    # A share whose content did not change since an earlier step names that step: its data stand for
    # the later one, whose id it cannot know.
    return HeldShare(
        step=step,
        save_id=identity.save_id if identity.step == step else "",
        # Of replicas each has a .meta of its own, and the data of one of them may stand for all.
        node_rank=rank if rank is not None else identity.node_rank,
        nodes=identity.nodes,
        digest=digest,
        path=path,
    )


def _identify_orbax(
    path: Path, *, step: int, rank: int | None, digest: str | None
) -> HeldShare | None:
    """A share that Orbax wrote: its process metadata and step stand in for an identity."""
    try:
        layout = read_small_file(path / "process_metadata" / "global_process_metadata.json")
        written_by = [
            int(match[1])
            for entry in os.scandir(path / STATE_ITEM)
            if (match := _ORBAX_PROCESS.fullmatch(entry.name))
        ]
    except OSError:
        return None
    if rank is None and len(written_by) != 1:
        return None
    nodes = layout.count(b"[") - 1
    if not 0 <= nodes <= NODES_LIMIT:
        raise ShareError(f"{path}: its process metadata tell {nodes} nodes", place=str(path))
    return HeldShare(
        step=step,
        save_id=f"{_ORBAX_ID}{hashlib.sha256(layout).hexdigest()[:16]}",
        node_rank=rank if rank is not None else written_by[0],
        nodes=nodes,
        digest=digest,
        path=path,
    )
