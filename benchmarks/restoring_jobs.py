"""What the processes of the restore benchmarks run."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import urllib.parse
import urllib.request
from typing import Any, Protocol

import jax
from jax.experimental import multihost_utils

from benchmarks import states
from benchmarks.sides import Orbax, Ours, Raw, Side, assert_saved
from benchmarks.timing import clocked, warm_bytes, warm_memory
from mtcheckpoint._coordination import Coordinator
from mtcheckpoint.testing import this_process

__all__ = [
    "PARALLEL_REQUESTS",
    "STEP",
    "backup",
    "elastic",
    "environment",
    "object_url",
    "reshard",
    "same",
    "save",
]

STEP = 1
PARALLEL_REQUESTS = 8

_LIMIT_SECONDS = 300.0


def save(root: str, size_bytes: int, layout: str) -> None:
    """Saves one step by our side."""
    state = states.filled(states.abstract(size_bytes, layout))
    _save(Ours(root), state)


def same(root: str, size_bytes: int, pairs: int) -> dict[str, Any]:
    """Each side saves a step, and then restores it again and again, in turns.

    Args:
        root: where the nodes' folders are.
        size_bytes: of the whole state.
        pairs: measured rounds; one more goes before, unmeasured.

    Returns:
        ``times``: of each side the seconds and CPU seconds of each round, and ``bytes_by_tier``:
        what our side read in a round.
    """
    tree = states.abstract(size_bytes)
    ours = Ours(root)
    contestants: dict[str, Side] = {"ours": ours, "orbax": Orbax(root), "raw": Raw(root)}
    state = states.filled(tree)
    for side in contestants.values():
        _save(side, state)
        side.open()
        assert_saved(side, state, tree)
        side.close()
    del state
    times = _in_turns(
        {name: (side, tree) for name, side in contestants.items()}, pairs, _warm_bytes(size_bytes)
    )
    return {"times": times, "bytes_by_tier": dict(ours.report.bytes_by_tier)}


def reshard(root: str, size_bytes: int, pairs: int) -> dict[str, Any]:
    """Restores blocks as columns, and as they are: see `same`."""
    side = Ours(root)
    columns, blocks = (states.abstract(size_bytes, layout) for layout in ("columns", "blocks"))
    _check_once(side, columns)
    tiers = dict(side.report.bytes_by_tier)
    times = _in_turns(
        {"ours": (side, columns), "same": (side, blocks)}, pairs, _warm_bytes(size_bytes)
    )
    return {"times": times, "bytes_by_tier": tiers}


def elastic(root: str, same_root: str, size_bytes: int, pairs: int) -> dict[str, Any]:
    """Restores what 4 processes saved, and what 2 did: see `same`.

    Returns:
        Also ``topics``: all that the processes agreed on in the first.
    """
    tree = states.abstract(size_bytes)
    four, two = Ours(root), Ours(same_root)
    with_topics = _noted_topics()
    _check_once(four, tree)
    topics = sorted(with_topics)
    _check_once(two, tree)
    times = _in_turns({"ours": (four, tree), "same": (two, tree)}, pairs, _warm_bytes(size_bytes))
    return {"times": times, "bytes_by_tier": dict(four.report.bytes_by_tier), "topics": topics}


def backup(
    root: str, backup_root: str, urls: list[list[str]], size_bytes: int, pairs: int
) -> dict[str, Any]:
    """Restores from a backup, and gets the objects that each process needs: see `same`."""
    place = this_process()
    assert place is not None
    own_urls = urls[place.rank]
    tree = states.abstract(size_bytes)
    side = Ours(root, backup_root=backup_root)
    _check_once(side, tree)
    received = sum(len(body) for body in _get_all(own_urls))
    assert received >= states.own_bytes(tree), received
    times = _in_turns(
        {"ours": (side, tree), "raw": (_Requests(own_urls), None)}, pairs, _warm_bytes(size_bytes)
    )
    return {"times": times, "bytes_by_tier": dict(side.report.bytes_by_tier)}


# Measuring.


def _save(side: Side, state: Any) -> None:
    side.open()
    side.save(STEP, state)
    side.wait()
    side.close()


def _check_once(side: Side, tree: Any) -> None:
    side.open()
    states.check(side.restore(tree))
    side.close()


def _warm_bytes(size_bytes: int) -> int:
    """More than a process takes for its part."""
    return warm_bytes(size_bytes, jax.process_count())


def _in_turns(
    attempts: dict[str, tuple[_Restores, Any]], pairs: int, warm_bytes: int
) -> dict[str, list[dict[str, float]]]:
    times: dict[str, list[dict[str, float]]] = {name: [] for name in attempts}
    for _ in range(pairs + 1):
        for name, (side, tree) in attempts.items():
            times[name].append(_restored(side, tree, warm_bytes))
    return times


def _restored(side: _Restores, tree: Any, warm_bytes: int) -> dict[str, float]:
    """One restore by a manager that has just been made, as after a restart."""
    side.open()
    gc.collect()
    warm_memory(warm_bytes)
    multihost_utils.sync_global_devices("restore")
    taken, _ = clocked(lambda: side.restore(tree))
    side.close()
    return taken


class _Restores(Protocol):
    """What a `Side` is to a restore."""

    def open(self) -> None: ...

    def restore(self, tree: Any) -> Any: ...

    def close(self) -> None: ...


class _Requests:
    """Objects of Cloud Storage by plain requests."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls

    def open(self) -> None:
        pass

    def restore(self, tree: Any) -> list[bytes]:
        return _get_all(self._urls)

    def close(self) -> None:
        pass


def _get_all(urls: list[str]) -> list[bytes]:
    with concurrent.futures.ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        return list(pool.map(_get, urls))


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_LIMIT_SECONDS) as answer:
        body: bytes = answer.read()
    return body


def object_url(server: str, bucket: str, name: str) -> str:
    """Where an object of Cloud Storage can be read."""
    return f"{server}/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media"


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
