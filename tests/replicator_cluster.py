"""A job's side of the replicator tests: it sees volumes only, so any replicator can be opposite."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import shares

from mtcheckpoint._clock import Deadline, SystemClock, wait_for
from mtcheckpoint._handshake import files
from mtcheckpoint._replicator.embedded import EmbeddedReplicator

LIMIT_SECONDS = 60.0


def eventually(look: Callable[[], object], what: str, seconds: float = LIMIT_SECONDS) -> None:
    """Waits until `look` is true."""
    wait_for(lambda: look() or None, Deadline.after(seconds), what)


class Cluster(Protocol):
    """Nodes with their replicators."""

    volumes: list[Path]
    backup: Path

    def wait_until_watching(self, volumes: Sequence[Path]) -> None:
        """Returns when a step that is committed in one of `volumes` will be noticed."""

    def settings(self, *, backups: bool = False) -> dict[str, object]:
        """What this kind of cluster adds to a ``replicator.yaml``, the backup interval included.

        `backups`: the test makes backups, by `let_backup_interval_pass`.
        """

    def let_backup_interval_pass(self) -> None:
        """The next step that all nodes hold is backed up."""


class ShiftedClock(SystemClock):
    """The machine's clock, which a test can put forward."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self.sleeps = 0

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        super().sleep(seconds)

    def advance(self, seconds: float) -> None:
        self._ahead += seconds

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead


class EmbeddedCluster:
    """Nodes served by an `EmbeddedReplicator` in this process."""

    def __init__(
        self,
        root: Path,
        nodes: int,
        *,
        backup_url: str | None = None,
        strict: bool = False,
        timeout_secs: float = 0.5,
    ) -> None:
        self.volumes = [root / f"node{index}" for index in range(nodes)]
        self.backup = root / "backup"
        self.clock = ShiftedClock()
        self._backup_url = backup_url or str(self.backup)
        self._strict = strict
        self._timeout_secs = timeout_secs
        self.replicator = self._new_replicator()

    def _new_replicator(self) -> EmbeddedReplicator:
        return EmbeddedReplicator(
            self.volumes,
            self._backup_url,
            strict=self._strict,
            timeout_secs=self._timeout_secs,
            clock=self.clock,
        )

    def restart(self) -> None:
        """Stops the replicator and starts a new one on the same directories."""
        self.replicator.stop()
        self.replicator = self._new_replicator()
        self.replicator.start()

    def wait_until_watching(self, volumes: Sequence[Path]) -> None:
        """It misses nothing: what lies there when it begins to watch is taken."""

    def settings(self, *, backups: bool = False) -> dict[str, object]:
        return {"backup-interval-minutes": 30}

    def let_backup_interval_pass(self) -> None:
        self.clock.advance(31 * 60)


@contextlib.contextmanager
def embedded_cluster(root: Path, nodes: int, **options: object) -> Iterator[EmbeddedCluster]:
    cluster = EmbeddedCluster(root, nodes, **options)
    cluster.replicator.start()
    try:
        yield cluster
    finally:
        cluster.replicator.stop()


class Job:
    """One training job on some of the volumes: rank r lives on the r-th one.

    Args:
        settings: keys of ``replicator.yaml`` that are the same on all nodes.
        peers: for each rank the ranks that get its copies; None: nobody gets any.
    """

    def __init__(
        self,
        volumes: Sequence[Path],
        *,
        name: str = "job-a",
        peers: Sequence[Sequence[int]] | None = None,
        settings: dict[str, object] | None = None,
    ) -> None:
        self.volumes = list(volumes)
        self.name = name
        self.peers = [list(ranks) for ranks in peers or [[] for _ in volumes]]
        self._settings = settings or {"backup-interval-minutes": 30}

    def yaml(self, rank: int, **changes: object) -> str:
        values: dict[str, object] = {
            "job-name": self.name,
            "framework": "orbax",
            "node-rank": rank,
            "nodes": len(self.volumes),
            "peer-ranks": self.peers[rank],
            **self._settings,
            **changes,
        }
        return files.yaml_text({key: value for key, value in values.items() if value is not None})

    def write_yaml(self, rank: int, text: str | None = None) -> None:
        target = self.volumes[rank] / files.REPLICATOR_YAML
        staging = target.with_suffix(".yaml.tmp")
        staging.write_text(self.yaml(rank) if text is None else text)
        os.rename(staging, target)

    def handshake(self) -> None:
        """Starts a run on all nodes and waits for the answers."""
        for rank in range(len(self.volumes)):
            self.write_yaml(rank)
        self.wait_for_answers()

    def wait_for_answers(self) -> None:
        """Waits until all nodes' YAML was taken and answered."""
        for volume in self.volumes:
            eventually(
                lambda v=volume: not (v / files.REPLICATOR_YAML).exists(), f"YAML of {volume}"
            )
        for rank in range(len(self.volumes)):
            eventually(lambda r=rank: self.markers(r), f"marker of rank {rank}")

    def markers(self, rank: int) -> list[Path]:
        return list(self.volumes[rank].glob("*.restore"))

    def marker(self, rank: int) -> Path:
        """The only ``.restore`` of the rank."""
        (marker,) = self.markers(rank)
        return marker

    def restored_step(self, rank: int) -> int | None:
        """The step that the replicator offers, None for "nothing"."""
        marker = self.marker(rank)
        share = files.parse_share_name(marker.name, "restore")
        assert share is not None
        assert (share.job, share.node_rank, share.worker) == (self.name, rank, 0)
        if marker.is_symlink():
            assert marker.exists(), "dangling link"
            assert not os.path.isabs(os.readlink(marker))
            return share.step
        assert marker.stat().st_size == 0
        assert share.step == 0
        return None

    def commit(self, step: int, contents: Sequence[str] | None = None) -> None:
        """Saves `step` on all nodes; by default every share differs."""
        for rank, volume in enumerate(self.volumes):
            content = contents[rank] if contents else f"{step} of {rank}"
            shares.commit_step(volume, step, content)

    def save(self, step: int, contents: Sequence[str] | None = None) -> None:
        """Saves `step` and waits until only it is held, by its nodes and their peers."""
        self.commit(step, contents)
        self.wait_until_only(step)

    def wait_until_only(self, step: int) -> None:
        for rank in range(len(self.volumes)):
            eventually(
                lambda r=rank: self.holds_only(r, step),
                f"step {step} alone in the volume of rank {rank}",
            )

    def holds_only(self, rank: int, step: int) -> bool:
        """Whether a node has the shares of `step` that belong there, and no other."""
        metas = self.expected_metas(rank, step)
        volume = self.volumes[rank]
        if self.metas(rank) != metas:
            return False
        data = {files.data_name((volume / meta).read_text()) for meta in metas}
        shares_there = {path.name for path in volume.glob("*.data")}
        return shares_there == data and not list(volume.glob("*.tmp"))

    def share(self, step: int, rank: int) -> files.ShareName:
        return files.ShareName(job=self.name, step=step, node_rank=rank)

    def expected_metas(self, rank: int, step: int) -> set[str]:
        """The ``.meta`` that belong on a node: its own and those it is a peer of."""
        holders = [rank, *(other for other, peers in enumerate(self.peers) if rank in peers)]
        return {self.share(step, holder).meta for holder in holders}

    def metas(self, rank: int) -> set[str]:
        return {path.name for path in self.volumes[rank].glob("*.meta")}

    def digest(self, step: int, rank: int, holder: int | None = None) -> str:
        """What `holder` (the rank itself by default) says is the data of the rank's share."""
        volume = self.volumes[rank if holder is None else holder]
        return (volume / self.share(step, rank).meta).read_text()

    def wipe(self, rank: int) -> None:
        """The node loses its memory."""
        for path in self.volumes[rank].iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def errors(self, rank: int) -> str:
        return read(self.volumes[rank] / files.ERRORS_FILE)

    def failure(self, rank: int) -> str:
        return read(self.volumes[rank] / files.FAILED_FILE)


def read(path: Path) -> str:
    """The text of a file, empty when there is none."""
    return path.read_text() if path.exists() else ""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
