"""A job comes back with fewer, more or other hosts and another mesh: its newest state is in memory.

After every comeback training goes on, and a plain restart takes its newest step from its own node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import elastic_jobs
import pytest
from elastic_jobs import Run
from restoring_clusters import REPLICATORS, run_job, same, start_replicator, wait_until_held

pytestmark = pytest.mark.extended

NODES = 4


class Job:
    """A job on some nodes of a cluster."""

    def __init__(self, cluster: Any, root: Path) -> None:
        self.cluster = cluster
        self._root = root

    def run(self, run: Run, holders: Any = None) -> list[dict[str, Any]]:
        """One run; returns when what it saved is where it belongs."""
        found = self.attempt(run)
        assert "error" not in found[0], found
        volumes = [self.cluster.volumes[host] for host in run.hosts]
        if run.steps or same(found, "step") is not None:
            newest = run.steps[-1] if run.steps else same(found, "step")
            wait_until_held(volumes, newest, holders)
        for volume in volumes:
            assert_tidy(volume)
        return found

    def attempt(self, run: Run) -> list[dict[str, Any]]:
        """One run, which may fail."""
        return run_job(
            elastic_jobs.train,
            len(run.hosts),
            str(self._root),
            dataclasses.asdict(run),
            devices=run.mesh[0] * run.mesh[1] // len(run.hosts),
        )


def assert_tidy(volume: Path) -> None:
    """Nothing of ours is left beside what the replicator keeps."""
    ours = [path.name for path in volume.glob("mtcheckpoint*")]
    assert ours == []
    assert [path.name for path in volume.iterdir() if path.name.isdigit()] == []


def size_bytes(volume: Path) -> int:
    return sum(path.stat().st_size for path in volume.rglob("*.data/**/*") if path.is_file())


@pytest.fixture(params=REPLICATORS)
def job(request: pytest.FixtureRequest, volume_root: Path) -> Iterator[Job]:
    with start_replicator(request.param, volume_root, NODES) as cluster:
        yield Job(cluster, volume_root)


def test_shrunk_restarted_grown_and_moved_to_other_hosts(job: Job) -> None:
    first = job.run(Run(hosts=[0, 1, 2, 3], mesh=[4, 2], steps=[1, 2, 3]))
    assert same(first, "step") is None

    shrunk = job.run(Run(hosts=[0, 1], mesh=[2, 2], steps=[4, 5]))
    assert same(shrunk, "step", "tier", "passed_over") == [3, "peer", []]
    assert same(shrunk, "extras") == [[rank, 3] for rank in range(4)]

    restarted = job.run(Run(hosts=[0, 1], mesh=[2, 2], steps=[6]))
    assert same(restarted, "step", "tier", "passed_over") == [5, "local", []]
    size = [size_bytes(volume) for volume in job.cluster.volumes[:2]]

    # Nodes 2 and 3 sat out two runs: what they hold is older.
    grown = job.run(Run(hosts=[0, 1, 2, 3], mesh=[4, 2], swapped=True, given=False))
    assert same(grown, "step", "tier", "passed_over") == [6, "peer", []]
    # Saved anew at once, under the new topology: a plain restart finds it.
    restarted = job.run(Run(hosts=[0, 1, 2, 3], mesh=[4, 2], swapped=True, steps=[7]))
    assert same(restarted, "step", "tier") == [6, "local"]

    moved = job.run(Run(hosts=[1, 0, 3, 2], mesh=[4, 2], steps=[8]))
    assert same(moved, "step", "tier") == [7, "peer"]
    moved = job.run(Run(hosts=[3, 2, 0, 1], mesh=[8, 1], steps=[9]))
    assert same(moved, "step", "tier") == [8, "peer"]

    # Two of four, which are each other's peers' other halves; then the same two as at first.
    shrunk = job.run(Run(hosts=[3, 2], mesh=[1, 8], steps=[10]))
    assert same(shrunk, "step", "tier") == [9, "peer"]
    restarted = job.run(Run(hosts=[3, 2], mesh=[1, 8], steps=[11, 12, 13]))
    assert same(restarted, "step", "tier") == [10, "local"]
    assert all(size_bytes(volume) <= 1.3 * max(size) for volume in job.cluster.volumes[2:])


def test_one_process_goes_on_from_two_and_four_from_one(job: Job) -> None:
    job.run(Run(hosts=[0, 1], mesh=[8, 1], steps=[39, 40]))
    alone = job.run(Run(hosts=[0], mesh=[1, 1], given=False, steps=[59, 60]), holders=[[0]])
    assert same(alone, "step", "tier") == [40, "local"]
    four = job.run(Run(hosts=[0, 1, 2, 3], mesh=[1, 8], given=False, steps=[61]))
    assert same(four, "step", "tier") == [60, "peer"]
    assert same(four, "passed_over") == [], "step 40 on node 1 is older, and not looked at"
    again = job.run(Run(hosts=[0, 1, 2, 3], mesh=[1, 8]))
    assert same(again, "step", "tier") == [61, "local"]


def test_two_saves_of_one_step_are_not_mixed(job: Job) -> None:
    """Step 40 of two nodes and, later and of other content, of a third that knew nothing of it."""
    job.run(Run(hosts=[0, 1], mesh=[2, 2], steps=[40]))
    other = job.run(Run(hosts=[2], mesh=[1, 2], content=1, steps=[40]), holders=[[0]])
    assert same(other, "step") is None

    both = job.run(Run(hosts=[0, 2], mesh=[4, 2], found_content=1))
    assert same(both, "step") == 40, "the later one"
    again = job.run(Run(hosts=[0, 2], mesh=[4, 2], found_content=1))
    assert same(again, "step", "tier") == [40, "local"]


def test_one_of_three_holds_too_little_and_takes_nothing_away(job: Job) -> None:
    """The survivor holds its own share and the last one's, and is told so as long as it asks."""
    three = Run(hosts=[0, 1, 2], mesh=[3, 2], state="thirds", steps=[5])
    job.run(three, holders=[[0, 1], [1, 2], [2, 0]])
    before = contents(job.cluster.volumes[0])

    one = dataclasses.replace(three, hosts=[0], mesh=[1, 2], steps=[])
    for _ in range(2):
        (found,) = job.attempt(one)
        assert found["error"] == "RestoreError"
        assert "the shares of its ranks 1 are gone" in found["message"]
        assert contents(job.cluster.volumes[0]) == before

    back = dataclasses.replace(three, hosts=[1, 0], mesh=[1, 2], steps=[6])
    assert same(job.run(back), "step", "tier") == [5, "peer"]
    one = dataclasses.replace(one, hosts=[1], steps=[7])
    assert same(job.run(one, holders=[[0]]), "step", "tier") == [6, "local"]
    assert same(job.run(one, holders=[[0]]), "step", "tier") == [7, "local"]


def test_a_slice_fewer_and_back(job: Job) -> None:
    two_slices = {"num_slices": 2, "replication": "replicas"}
    twins = [[0, 2], [1, 3], [2, 0], [3, 1]]
    four = Run(hosts=[0, 1, 2, 3], mesh=[2, 4], state="replicated", flags=two_slices, steps=[1, 2])
    job.run(four, twins)

    two = dataclasses.replace(four, hosts=[2, 3], mesh=[1, 4], flags={"num_slices": 1}, steps=[3])
    assert same(job.run(two), "step", "passed_over") == [2, []]
    assert same(job.run(dataclasses.replace(two, steps=[4])), "step", "tier") == [3, "local"]

    back = dataclasses.replace(four, steps=[5])
    assert same(job.run(back, twins), "step", "passed_over") == [4, []]
    assert same(job.run(back, twins), "step", "tier") == [5, "local"]


def contents(volume: Path) -> list[str]:
    """What a replicator holds in a volume, file by file."""
    held = [*volume.glob("*.meta"), *volume.glob("*.data/**/*")]
    return sorted(str(path.relative_to(volume)) for path in held)
