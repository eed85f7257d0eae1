"""What the processes of the restore benchmarks run."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import mtcheckpoint as mtc
from benchmarks.results import memory_bytes
from mtcheckpoint._coordination import Coordinator
from mtcheckpoint.testing import case_mesh, this_process

JOB = "bench"
STEP = 1
LEAVES = 16

_LIMIT_SECONDS = 300.0
_COLUMNS = 1024
_PARALLEL_REQUESTS = 8

# How the leaves lie on a mesh of 2 by 2.
BLOCKS = ("data", "model")
ROWS = (("data", "model"), None)
COLUMNS = (None, ("data", "model"))
LAYOUTS = {"blocks": BLOCKS, "rows": ROWS, "columns": COLUMNS}


def save(root: str, size_bytes: int, layout: str) -> None:
    """Saves one step, without a replicator."""
    with mtc.ReplicatedCheckpointManager(_config(root), mesh=_mesh()) as manager:
        assert manager.save(STEP, _state(size_bytes, layout), force=True)
        manager.wait_until_finished()


def restore(
    root: str, size_bytes: int, layout: str, pairs: int, raw: dict[str, Any], backup_root: str
) -> dict[str, Any]:
    """Restores and reads the same bytes raw, in turns.

    Args:
        root: where the nodes' folders are.
        size_bytes: of the whole state.
        layout: how the state shall lie.
        pairs: measured ones; one more goes before, unmeasured.
        raw: what is read raw: see `_raw_reader`.
        backup_root: where backups are; empty for none.

    Returns:
        Seconds of each, peak memory over this process's part of the state, and what was read.
    """
    read_raw = _raw_reader(Path(root), size_bytes // jax.process_count(), **raw)
    topics = _noted_topics()
    times, peaks = [], []
    for pair in range(pairs + 1):
        ours, peak, restored = _restored(root, size_bytes, layout, backup_root)
        if pair == 0:
            _check(restored.state)
        tiers = dict(restored.report.bytes_by_tier)
        del restored
        gc.collect()
        _together("raw")
        begun = time.perf_counter()
        kept = read_raw()
        times.append((ours, time.perf_counter() - begun))
        del kept
        peaks.append(peak)
    return {
        "times": times[1:],
        "peak_over_state": max(peaks) / (size_bytes / jax.process_count()),
        "bytes_by_tier": tiers,
        "topics": sorted(topics),
    }


def _restored(
    root: str, size_bytes: int, layout: str, backup_root: str
) -> tuple[float, int, mtc.RestoredState]:
    wanted = _abstract(size_bytes, layout)
    config = _config(root, backup_root)
    with mtc.ReplicatedCheckpointManager(config, mesh=_mesh()) as manager:
        before = _reset_peak()
        _together("restore")
        begun = time.perf_counter()
        restored = manager.restore_latest(wanted)
        seconds = time.perf_counter() - begun
    assert restored is not None
    assert restored.step == STEP
    return seconds, max(memory_bytes("VmHWM") - before, 0), restored


# The state.


def _mesh() -> jax.sharding.Mesh:
    return case_mesh(2, 2)


def _config(root: str, backup_root: str = "") -> mtc.CheckpointConfig:
    place = this_process()
    assert place is not None
    volume = Path(root) / f"node{place.rank}"
    volume.mkdir(parents=True, exist_ok=True)
    return mtc.CheckpointConfig(
        enable_multi_tier_checkpointing=True,
        enable_replicator=False,
        local_checkpoint_directory=str(volume),
        local_checkpoint_period=1,
        max_num_checkpoints_to_keep=1,
        multi_tier_checkpointing_backup_interval_minutes=30,
        run_name=JOB,
        timeout_secs=_LIMIT_SECONDS,
        backup_root=backup_root or None,
    )


def _abstract(size_bytes: int, layout: str) -> dict[str, jax.ShapeDtypeStruct]:
    sharding = NamedSharding(_mesh(), PartitionSpec(*LAYOUTS[layout]))
    rows = max(size_bytes // LEAVES // _COLUMNS // 4 // 4 * 4, 4)
    return {
        f"w{leaf}": jax.ShapeDtypeStruct((rows, _COLUMNS), np.float32, sharding=sharding)
        for leaf in range(LEAVES)
    }


def _state(size_bytes: int, layout: str) -> dict[str, jax.Array]:
    return {
        name: jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index, n=name, s=leaf.shape: _expected(n, s, index)
        )
        for name, leaf in _abstract(size_bytes, layout).items()
    }


def _expected(name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
    """Elements that differ from their neighbours, and from the same ones of other leaves."""
    rows, columns = (np.arange(size)[part] for size, part in zip(shape, index, strict=True))
    numbers = rows[:, None] * shape[1] + columns[None, :] + int(name[1:]) * 7919
    return (numbers % 16_777_213).astype(np.float32)  # float32 holds integers up to there


def _check(state: dict[str, jax.Array]) -> None:
    for name, leaf in state.items():
        for shard in leaf.addressable_shards:
            found = np.asarray(shard.data)
            np.testing.assert_array_equal(found, _expected(name, leaf.shape, shard.index))


# Reading raw.


def _raw_reader(root: Path, need_bytes: int, **source: Any) -> Callable[[], list[Any]]:
    """Reads `need_bytes`, what this process needs, by plain system calls or requests.

    Args:
        root: where the nodes' folders are.
        need_bytes: how much.
        source: ``folders``: for each process the folders to read from, in equal parts; or ``urls``:
            for each process the URLs of the objects that it needs.
    """
    place = this_process()
    assert place is not None
    if "urls" in source:
        urls = source["urls"][place.rank]
        return lambda: _get_all(urls)
    folders = [root / folder for folder in source["folders"][place.rank]]
    files = [list(_files(folder)) for folder in folders]
    share = need_bytes // len(folders)
    for folder, some in zip(folders, files, strict=True):
        there = sum(path.stat().st_size for path in some)
        assert there >= share, f"{folder} holds {there} bytes, {share} are to be read"
    return lambda: [buffer for some in files for buffer in _read_files(some, share)]


def _files(folder: Path) -> Iterator[Path]:
    """The files with the arrays, the large ones."""
    return (path for path in sorted(folder.rglob("d/*")) if path.is_file())


def _read_files(files: list[Path], limit_bytes: int) -> Iterator[np.ndarray]:
    for path in files:
        buffer = np.empty(min(path.stat().st_size, limit_bytes), np.uint8)
        with open(path, "rb", buffering=0) as file:
            view = memoryview(buffer)
            while view and (count := file.readinto(view)):
                view = view[count:]
        limit_bytes -= buffer.nbytes
        yield buffer


def _get_all(urls: list[str]) -> list[bytes]:
    with concurrent.futures.ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        return list(pool.map(_get, urls))


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_LIMIT_SECONDS) as answer:
        body: bytes = answer.read()
    return body


def object_url(server: str, bucket: str, name: str) -> str:
    """Where an object of Cloud Storage can be read."""
    return f"{server}/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media"


# Watching.


def _together(name: str) -> None:
    multihost_utils.sync_global_devices(name)


def _reset_peak() -> int:
    """Begins a new peak of resident memory; returns what is resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")


def _noted_topics() -> set[str]:
    """The topics of all agreement from now on."""
    topics: set[str] = set()
    decide = Coordinator.decide

    def noting(self: Coordinator, topic: str, *arguments: Any, **options: Any) -> Any:
        topics.add(topic)
        return decide(self, topic, *arguments, **options)

    Coordinator.decide = noting  # type: ignore[method-assign]
    return topics


def environment(server: str) -> dict[str, str]:
    """What a process needs to reach a Cloud Storage server on loopback."""
    return {
        **{name: os.environ[name] for name in ("PATH",) if name in os.environ},
        "STORAGE_EMULATOR_HOST": server,
        "TENSORSTORE_GCS_HTTP_URL": server,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test-token",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "NO_GCE_CHECK": "true",
        "FSSPEC_GCS": '{"token": "anon", "project": "test"}',
    }
