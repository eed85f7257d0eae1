"""Choice of the step, peers, clean-up and backups, over plain values."""

from __future__ import annotations

import pytest

from mtcheckpoint._replicator.choice import (
    Candidate,
    Holdings,
    MetaEntry,
    backup_due,
    infer_missing,
    merge,
    newest_complete,
    peers_of,
    steps_to_keep,
    uploads_data,
)
from mtcheckpoint._replicator.settings import RunSettings


def settings(rank: int, nodes: int, **changes: object) -> RunSettings:
    values: dict[str, object] = {
        "peer_ranks": None,
        "peers_per_node": None,
        "replicas": None,
        "backup_interval_minutes": 30,
        "backup_interval_steps": None,
        **changes,
    }
    return RunSettings(job_name="job-a", framework="orbax", node_rank=rank, nodes=nodes, **values)


def holdings(metas: str, data: str) -> Holdings:
    """From ``"40/0=a"`` entries (step/rank=hash) and the hashes that are there."""
    entries = []
    for word in metas.split():
        place, digest = word.split("=")
        step, rank = map(int, place.split("/"))
        entries.append(MetaEntry(step=step, node_rank=rank, digest=digest))
    return Holdings(metas=tuple(entries), digests=frozenset(data.split()))


@pytest.mark.parametrize(
    ("metas", "data", "replicas", "expected"),
    [
        ("", "", None, None),
        ("40/0=a 40/1=b", "a b", None, (40, "a b")),
        ("0/0=a 0/1=b", "a b", None, (0, "a b")),
        ("40/0=a 40/1=b 60/0=c", "a b c", None, (40, "a b")),
        ("40/0=a 40/1=b 60/0=c 60/1=d", "a b c", None, (40, "a b")),
        ("40/0=a 40/1=b 60/0=c 60/1=d", "a b c d", None, (60, "c d")),
        ("40/0=a 40/1=a", "a", None, (40, "a a")),
        ("40/0=a", "a", None, None),
        ("40/0=a 40/1=b 40/2=c", "a b c", None, (40, "a b")),
        ("40/0=a", "a", 2, (40, "a a")),
        ("40/0=a", "a", 1, None),
        ("40/0=a 40/1=b", "a b", 2, (40, "a b")),
    ],
    ids=lambda value: str(value).replace("/", ":"),
)
def test_newest_complete_step_of_two_nodes(
    metas: str, data: str, replicas: int | None, expected: tuple[int, str] | None
) -> None:
    found = newest_complete(holdings(metas, data), nodes=2, replicas=replicas)
    if expected is None:
        assert found is None
    else:
        digests = dict(enumerate(expected[1].split()))
        assert found == Candidate(step=expected[0], digests=digests)


@pytest.mark.parametrize(
    ("known", "inferred"),
    [
        ({0: "a", 1: "b"}, {0: "a", 1: "b", 2: "a", 3: "b"}),
        ({2: "a", 1: "b"}, {0: "a", 1: "b", 2: "a", 3: "b"}),
        ({0: "a"}, {0: "a", 2: "a"}),
        ({0: "a", 2: "x", 1: "b"}, {0: "a", 2: "x", 1: "b", 3: "b"}),
    ],
)
def test_inference_fills_columns_of_two_replicas(
    known: dict[int, str], inferred: dict[int, str]
) -> None:
    assert infer_missing(known, nodes=4, replicas=2) == inferred


def test_a_node_knows_its_own_share_best() -> None:
    merged = merge({0: holdings("5/0=new 5/1=old", "new"), 1: holdings("5/1=newer", "newer")})
    assert merged.digests == {"new", "newer"}
    assert newest_complete(merged, nodes=2, replicas=None) == Candidate(
        step=5, digests={0: "new", 1: "newer"}
    )


@pytest.mark.parametrize(
    ("rank", "nodes", "changes", "peers"),
    [
        (0, 4, {"peer_ranks": (2, 1)}, (2, 1)),
        (0, 4, {"peers_per_node": 1}, (1,)),
        (3, 4, {"peers_per_node": 1}, (2,)),
        (0, 8, {"peers_per_node": 2}, (1, 4)),
        (6, 8, {"peers_per_node": 2}, (2, 7)),
        (0, 9, {"peers_per_node": 3}, (1, 3, 6)),
        (2, 3, {"peers_per_node": 1}, (0,)),
        (0, 1, {"peers_per_node": 1}, ()),
        (0, 4, {"peers_per_node": 0}, ()),
        (1, 4, {"peers_per_node": 1, "replicas": 2}, (3,)),
        (0, 6, {"peers_per_node": 2, "replicas": 3}, (2, 4)),
        (0, 8, {"peers_per_node": 3, "replicas": 8}, (1, 6, 7)),
    ],
)
def test_peers(rank: int, nodes: int, changes: dict[str, object], peers: tuple[int, ...]) -> None:
    assert peers_of(settings(rank, nodes, **changes)) == peers


@pytest.mark.parametrize(
    ("replicas", "ranks"), [(None, [0, 1, 2, 3]), (2, [2, 3]), (4, [3]), (1, [0, 1, 2, 3])]
)
def test_only_the_last_replica_uploads_data(replicas: int | None, ranks: list[int]) -> None:
    uploading = [rank for rank in range(4) if uploads_data(settings(rank, 4, replicas=replicas))]
    assert uploading == ranks


@pytest.mark.parametrize(
    ("rank", "replicas", "backing_up", "kept"),
    [
        (0, None, None, {9}),
        (0, None, 7, {7, 9}),
        (0, 2, 7, {7, 9}),
        (1, 2, 7, {7}),
        (1, 2, None, {9}),
    ],
)
def test_steps_to_keep(
    rank: int, replicas: int | None, backing_up: int | None, kept: set[int]
) -> None:
    found = steps_to_keep(settings(rank, 2, replicas=replicas), current={9}, backing_up=backing_up)
    assert found == kept


def test_backup_intervals() -> None:
    minutes = settings(0, 1)
    assert not backup_due(minutes, seconds_since=1799, steps_since=10**9)
    assert backup_due(minutes, seconds_since=1800, steps_since=0)
    steps = settings(0, 1, backup_interval_minutes=None, backup_interval_steps=20)
    assert not backup_due(steps, seconds_since=10**9, steps_since=19)
    assert backup_due(steps, seconds_since=0, steps_since=20)
