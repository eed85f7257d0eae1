"""One node's directory: the file operations of the protocol.

What others may read appears by one rename, last. Temporary names end in ``.tmp`` or ``.save``; the
clean-up at the start of a run removes what a killed replicator left of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from mtcheckpoint._handshake import files
from mtcheckpoint._replicator.choice import Holdings, MetaEntry
from mtcheckpoint._replicator.hashing import hashed_item, share_digest
from mtcheckpoint.errors import ReplicatorConfigError

__all__ = ["MOST_DIGEST_BYTES", "FileStamp", "TakenShare", "Volume", "copy_tree"]

# A hash has 65 characters: what is longer is none.
MOST_DIGEST_BYTES = 1024
# Ours has 200 bytes.
_MOST_YAML_BYTES = 1 << 20

# Identity of a file that is replaced by rename: inode, modification time, size.
FileStamp = tuple[int, int, int]
# Data's digest, and whether the same data was there already.
TakenShare = tuple[str, bool]

# Copying competes with training for the processor and for memory.
_COPYING_THREADS = 4

_CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
_TORCH_METADATA = ".metadata"
# It also holds what the caller of a save has given as custom metadata.
_MOST_METADATA_BYTES = 64 << 20


class Volume:
    """A node's directory, as the replicator uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def create(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    # The run's configuration.

    def yaml_stamp(self) -> FileStamp | None:
        """Identity of the present ``replicator.yaml``, None without one."""
        try:
            status = os.stat(self.path / files.REPLICATOR_YAML)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def read_yaml(self) -> str:
        """The text of ``replicator.yaml``.

        Raises:
            ReplicatorConfigError: it is no file, or far too large.
        """
        text = _read_bounded(self.path / files.REPLICATOR_YAML, _MOST_YAML_BYTES)
        if text is None:
            raise ReplicatorConfigError(
                f"{files.REPLICATOR_YAML} should be a file of {_MOST_YAML_BYTES:,} bytes at most"
            )
        return text

    def remove_yaml(self) -> None:
        (self.path / files.REPLICATOR_YAML).unlink(missing_ok=True)

    def clean_for_run(self) -> None:
        """Deletes everything but shares, their ``.meta`` and the start-up files."""
        for entry in self._entries():
            if not any(Path(entry.name).match(pattern) for pattern in files.KEPT_PATTERNS):
                _delete(entry.path)

    # What lies here.

    def holdings(self, job: str) -> Holdings:
        """The shares of `job` in this volume; other names are passed over."""
        metas, digests = [], set()
        for entry in self._entries():
            if match := files.DATA_NAME.fullmatch(entry.name):
                digests.add(match[1])
            share = files.parse_share_name(entry.name, "meta")
            if share is not None and share.job == job and share.worker == 0:
                digest = _read_digest(Path(entry.path))
                metas.append(MetaEntry(step=share.step, node_rank=share.node_rank, digest=digest))
        return Holdings(metas=tuple(metas), digests=frozenset(digests))

    def has_data(self, digest: str) -> bool:
        return (self.path / files.data_name(digest)).exists()

    def data(self, digest: str) -> Path:
        return self.path / files.data_name(digest)

    def untaken_steps(self) -> list[str]:
        """Names of committed step directories, oldest step first."""
        names = [
            entry.name
            for entry in self._entries()
            if files.is_step_name(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
        return sorted(names, key=int)

    # A step.

    def is_finished(self, name: str, framework: str) -> bool:
        """Whether the step directory `name` says that its writer is done with it."""
        directory = self.path / name
        if framework != "orbax":
            return (directory / _TORCH_METADATA).is_file()
        try:
            return hashed_item(directory) is not None and _is_committed(directory)
        except FileNotFoundError:
            return False

    def fingerprint(self, name: str) -> frozenset[tuple[str, int, int]]:
        """Paths, sizes and times of the files in directory `name`, to see whether it changes."""
        found = set()
        for folder, _, names in os.walk(self.path / name):
            for path in (os.path.join(folder, item) for item in [".", *names]):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(path)
                    found.add((path, status.st_size, status.st_mtime_ns))
        return frozenset(found)

    def take(self, name: str, share: files.ShareName, framework: str) -> TakenShare:
        """Turns the step directory `name` into ``<hash>.data``; its ``.meta`` is still missing.

        Data of the same hash that is already here stays, and the new directory is deleted.

        Raises:
            FileNotFoundError: somebody else removed or renamed the directory.
        """
        save = self.path / share.save
        _delete(save)
        os.rename(self.path / name, save)
        digest = share_digest(save, framework)
        known = self.has_data(digest)
        if known:
            shutil.rmtree(save)
        else:
            os.rename(save, self.data(digest))
        return digest, known

    def write_meta(self, share: files.ShareName, digest: str) -> None:
        self._publish(share.meta, digest)

    def receive(self, source: Path, sender: int, check: Callable[[], None]) -> None:
        """Copies the data `source` of another node into this volume, unless it is here.

        Args:
            source: a ``<hash>.data`` in another volume.
            sender: rank of the copying node; two may bring the same data at once.
            check: called before each file; what it raises ends the copy.
        """
        with self.staged(source.name, sender) as staging:
            if staging is not None:
                copy_tree(source, staging, check)

    @contextlib.contextmanager
    def staged(self, name: str, sender: int) -> Iterator[Path | None]:
        """A temporary path that becomes `name` at the end; None when `name` exists."""
        target = self.path / name
        if target.exists():
            yield None
            return
        staging = self.path / f"{name}.n{sender}.tmp"
        try:
            yield staging
            if target.exists():
                _delete(staging)
            else:
                _rename_unless_present(staging, target)
        except BaseException:
            _delete(staging)
            raise

    # Answers to training.

    def write_prerestore(self, content: dict[str, object]) -> None:
        self._publish(files.PRERESTORE_FILE, yaml.safe_dump(content))

    def link_restore(self, share: files.ShareName, digest: str) -> None:
        """The answer "restore this": a relative link, which may dangle."""
        link = self.path / share.restore
        link.unlink(missing_ok=True)  # of a run that began anew
        os.symlink(files.data_name(digest), link)

    def write_nothing_to_restore(self, job: str, node_rank: int) -> None:
        name = files.ShareName(job=job, step=0, node_rank=node_rank).restore
        (self.path / name).touch()

    def append(self, name: str, line: str) -> None:
        """Adds a line to ``replicator.errors`` or ``replicator.failed``."""
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    # Clean-up.

    def collect_garbage(
        self, job: str, keep_steps: Collection[int], keep_data_of_rank: int | None = None
    ) -> None:
        """Deletes the ``.meta`` of other steps and jobs, then all data that no kept one names.

        Args:
            keep_data_of_rank: data stays only where the ``.meta`` of this rank names it; None: of
                every rank.
        """
        digests = set()
        for path in self.path.glob("*.meta"):
            share = files.parse_share_name(path.name, "meta")
            if share is None or share.job != job or share.step not in keep_steps:
                _delete(path)
            elif keep_data_of_rank in (None, share.node_rank):
                digests.add(_read_digest(path))
        for path in self.path.glob("*.data"):
            if path.name.removesuffix(".data") not in digests:
                _delete(path)

    def _entries(self) -> list[os.DirEntry[str]]:
        with os.scandir(self.path) as entries:
            return list(entries)

    def _publish(self, name: str, text: str) -> None:
        staging = self.path / f"{name}.tmp"
        staging.write_text(text, encoding="utf-8")
        os.replace(staging, self.path / name)


def copy_tree(source: Path, target: Path, check: Callable[[], None]) -> None:
    """Copies a directory, or a file, calling `check` before each file, also in other threads."""

    def copy(names: tuple[Path, Path]) -> None:
        check()
        shutil.copyfile(*names)

    with ThreadPoolExecutor(max_workers=_COPYING_THREADS) as pool:
        for _ in pool.map(copy, list(_files_to_copy(source, target))):
            pass


def _files_to_copy(source: Path, target: Path) -> Iterator[tuple[Path, Path]]:
    """The files below `source` and where they go; makes the directories for them."""
    if not source.is_dir():
        yield source, target
        return
    target.mkdir(exist_ok=True)
    for name in os.listdir(source):
        yield from _files_to_copy(source / name, target / name)


def _read_digest(path: Path) -> str:
    """What a ``.meta`` names; nothing when it cannot name any data."""
    return (_read_bounded(path, MOST_DIGEST_BYTES) or "").strip()


def _read_bounded(path: Path, limit_bytes: int) -> str | None:
    """The text of a regular file; None when it is another thing, or larger than the limit.

    Raises:
        FileNotFoundError: nothing is there.
    """
    # Without O_NONBLOCK, opening a pipe waits for somebody to write to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit_bytes:
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit_bytes).decode("utf-8", errors="replace")
    finally:
        os.close(descriptor)


def _is_committed(directory: Path) -> bool:
    try:
        text = _read_bounded(directory / _CHECKPOINT_METADATA, _MOST_METADATA_BYTES)
        metadata = json.loads(text or "null")
    except (FileNotFoundError, ValueError, RecursionError):
        return False
    return isinstance(metadata, dict) and bool(metadata.get("commit_timestamp_nsecs"))


def _rename_unless_present(staging: Path, target: Path) -> None:
    try:
        os.rename(staging, target)
    except OSError:
        # Another node brought the same data in this moment.
        if not target.exists():
            raise
        _delete(staging)


def _delete(path: str | Path) -> None:
    """Removes a file, link or whole directory; what vanishes meanwhile is fine."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        if os.path.isdir(path):
            # Again, because somebody may have added a file meanwhile; now with the error.
            shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)
