"""What only the embedded replicator does: it reports, refuses and goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from replicator_cluster import EmbeddedCluster, Job, embedded_cluster, eventually, names
from shares import commit_step, write_commit_time, write_share

from mtcheckpoint._handshake import files
from mtcheckpoint._replicator.embedded import EmbeddedReplicator

StartCluster = Callable[..., EmbeddedCluster]
SWAP = [[1], [0]]


@pytest.fixture
def start_cluster(volume_root: Path) -> Iterator[StartCluster]:
    with ExitStack() as stack:
        yield lambda nodes, **options: stack.enter_context(
            embedded_cluster(volume_root, nodes, **options)
        )


def wait_for_looks(cluster: EmbeddedCluster, looks: int = 10) -> None:
    """Returns after each node has looked at its volume so many times more."""
    wanted = cluster.clock.sleeps + looks * len(cluster.volumes)
    eventually(lambda: cluster.clock.sleeps >= wanted, f"{looks} more looks")


# Taking steps.


def test_directory_made_in_place_is_left_alone_until_finished(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    job = Job(cluster.volumes)
    job.handshake()
    step = write_share(job.volumes[0] / "5", "unfinished", committed=False)
    wait_for_looks(cluster)
    assert step.is_dir()

    write_commit_time(step, 1)

    job.wait_until_only(5)


def test_later_step_waits_behind_an_unfinished_one(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    job = Job(cluster.volumes)
    job.handshake()
    step = write_share(job.volumes[0] / "5", "unfinished", committed=False)
    job.commit(6)
    wait_for_looks(cluster)
    assert (job.volumes[0] / "6").is_dir()

    write_commit_time(step, 1)

    job.wait_until_only(6)


def test_directory_that_has_been_quiet_for_a_second_is_taken(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    job = Job(cluster.volumes)
    job.handshake()
    write_share(job.volumes[0] / "5", "no commit time", committed=False)
    wait_for_looks(cluster)

    cluster.clock.advance(1.1)

    job.wait_until_only(5)


def test_strict_mode_takes_a_directory_as_soon_as_it_is_made(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, strict=True)
    job = Job(cluster.volumes)
    job.handshake()

    (job.volumes[0] / "5").mkdir()

    job.wait_until_only(5)


def test_other_names_and_files_named_by_digits_are_left_alone(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    job = Job(cluster.volumes)
    job.handshake()
    (job.volumes[0] / "7").write_text("a file")
    write_share(job.volumes[0] / "8.partial", "other name")

    job.save(9)

    assert {"7", "8.partial"} <= names(job.volumes[0])


def test_step_committed_at_once_after_the_answer_is_not_missed(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    job = Job(cluster.volumes, peers=SWAP)
    for _ in range(3):
        job.handshake()
        job.save(1)


def test_step_0_is_a_real_step(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    job = Job(cluster.volumes)
    job.handshake()
    job.save(0)

    job.handshake()

    assert job.restored_step(0) == 0
    assert job.marker(0).is_symlink()


def test_torch_directories_are_hashed_whole(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    job = Job(
        cluster.volumes,
        settings={"backup-interval-minutes": 30, "framework": "pytorch.distributed"},
    )
    job.handshake()
    staging = job.volumes[0] / "step=4"
    staging.mkdir()
    (staging / "__0_0.distcp").write_bytes(b"tensor")
    (staging / ".metadata").write_bytes(b"pickle")
    os.rename(staging, job.volumes[0] / "4")

    job.wait_until_only(4)


# Copies.


def test_replicas_that_differ_are_reported_on_both_and_training_goes_on(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(2)
    settings = {"backup-interval-minutes": 30, "assume-data-parallelism": 2}
    job = Job(cluster.volumes, peers=SWAP, settings=settings)
    job.handshake()
    job.save(1, ["twin", "twin"])

    job.commit(2, ["twin 0", "twin 1"])

    for rank in (0, 1):
        eventually(lambda r=rank: "the replicas differ" in job.errors(r), f"report of rank {rank}")
    assert job.failure(0) == job.failure(1) == ""
    job.save(3, ["twins again", "twins again"])
    assert cluster.replicator.replicated_step == 3


def test_unequal_steps_are_named_on_all_nodes_and_healed_by_the_next(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(2)
    job = Job(cluster.volumes, peers=SWAP)
    job.handshake()
    commit_step(job.volumes[0], 10, "ten")
    commit_step(job.volumes[1], 12, "twelve")

    for rank in (0, 1):
        eventually(lambda r=rank: "node rank 1: step 12" in job.errors(r), f"report of {rank}")
        assert "node rank 0: step 10" in job.errors(rank)

    commit_step(job.volumes[0], 12, "twelve too")
    job.wait_until_only(12)


def test_a_node_without_the_step_is_named(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    job = Job(cluster.volumes, peers=SWAP)
    job.handshake()
    commit_step(job.volumes[1], 10, "ten")

    eventually(lambda: "node rank 0: no step" in job.errors(1), "the report")


# Runs.


def test_lone_restart_is_named_on_all_nodes_until_they_restart_together(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(2)
    job = Job(cluster.volumes, peers=SWAP)
    job.handshake()
    job.save(5)

    job.write_yaml(1)

    eventually(lambda: "restarted alone" in job.errors(1), "its own report")
    assert "node rank 1" in job.errors(1)
    eventually(lambda: "All nodes of a job must restart together" in job.errors(0), "the other's")
    assert f"node rank 1 ({job.volumes[1]}) got a new replicator.yaml" in job.errors(0)
    assert not job.markers(1)

    job.write_yaml(0)
    job.wait_for_answers()

    assert [job.restored_step(rank) for rank in (0, 1)] == [5, 5]
    job.save(6)


def test_a_job_that_died_in_its_handshake_comes_back(start_cluster: StartCluster) -> None:
    """Only rank 0 had written its YAML. At the restart rank 1 comes first and joins that run."""
    cluster = start_cluster(2)
    job = Job(cluster.volumes, peers=SWAP)
    job.handshake()
    job.save(5)
    job.write_yaml(0)
    eventually(lambda: not (job.volumes[0] / "replicator.yaml").exists(), "the first YAML")

    job.write_yaml(1)
    eventually(lambda: job.markers(1), "an answer from the run that waited")
    job.write_yaml(0)
    job.wait_for_answers()

    assert [job.restored_step(rank) for rank in (0, 1)] == [5, 5]
    job.save(6)


def test_a_job_that_died_in_its_first_handshake_comes_back(start_cluster: StartCluster) -> None:
    cluster = start_cluster(3)
    job = Job(cluster.volumes)
    job.write_yaml(0)
    job.write_yaml(1)
    for volume in job.volumes[:2]:
        eventually(lambda v=volume: not (v / "replicator.yaml").exists(), "the YAML")

    job.write_yaml(2)
    job.write_yaml(0)
    job.write_yaml(1)
    job.wait_for_answers()

    job.save(1)


def test_steps_that_nobody_takes_are_reported(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    job = Job(cluster.volumes)
    job.handshake()
    cluster.restart()

    job.commit(3)
    cluster.clock.advance(0)
    wait_for_looks(cluster)
    cluster.clock.advance(3)

    eventually(lambda: "nobody takes the saved steps 3" in job.errors(0), "the report")
    assert (job.volumes[0] / "3").is_dir()


def test_two_jobs_at_once_on_some_of_the_directories(start_cluster: StartCluster) -> None:
    cluster = start_cluster(5)
    first = Job(cluster.volumes[:2], name="job-a", peers=SWAP)
    second = Job(cluster.volumes[2:4], name="job-b", peers=SWAP)
    first.handshake()
    second.handshake()

    first.save(1)
    second.save(100)
    second.handshake()
    first.save(2)

    assert second.restored_step(0) == 100
    states = [(status.job, status.node_rank) for status in cluster.replicator.status()]
    assert states == [("job-a", 0), ("job-a", 1), ("job-b", 0), ("job-b", 1), (None, None)]


def test_nodes_may_swap_their_ranks(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    job = Job(cluster.volumes, peers=SWAP)
    job.handshake()
    job.save(5)
    digests = [job.digest(5, rank) for rank in (0, 1)]
    swapped = Job(cluster.volumes[::-1], peers=SWAP)

    swapped.handshake()

    for rank in (0, 1):
        assert swapped.restored_step(rank) == 5
        assert os.readlink(swapped.marker(rank)) == files.data_name(digests[rank])


def test_stale_links_of_a_lost_node_do_not_stop_it(start_cluster: StartCluster) -> None:
    """A node directory that is removed altogether comes back empty."""
    cluster = start_cluster(2)
    job = Job(cluster.volumes, peers=SWAP)
    job.handshake()
    job.save(5)
    job.wipe(1)
    job.volumes[1].rmdir()
    eventually(lambda: job.volumes[1].is_dir(), "the directory to come back")

    job.handshake()

    assert [job.restored_step(rank) for rank in (0, 1)] == [5, 5]


# Refusals.


def test_refused_yaml_stays_and_is_reported_once(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    job = Job(cluster.volumes)
    job.handshake()
    job.save(1)

    job.write_yaml(0, job.yaml(0, surprise=1))

    eventually(lambda: "unknown key surprise" in job.failure(0), "the refusal")
    wait_for_looks(cluster)
    assert (job.volumes[0] / files.REPLICATOR_YAML).exists()
    assert len(job.failure(0).splitlines()) == 1
    assert job.share(1, 0).meta in names(job.volumes[0])

    job.handshake()

    assert job.failure(0) == ""
    assert job.restored_step(0) == 1


def test_empty_yaml_is_deleted_and_ends_the_run(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    job = Job(cluster.volumes)
    job.handshake()

    job.write_yaml(0, "")

    eventually(lambda: not (job.volumes[0] / files.REPLICATOR_YAML).exists(), "the YAML to go")
    eventually(lambda: cluster.replicator.status()[0].state == "waiting", "the run to end")
    job.handshake()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"node-rank": 0, "peer-ranks": [1]}, "both name node-rank 0"),
        ({"nodes": 3}, "differ in nodes"),
        ({"job-name": "job-b"}, "job-name differs"),
    ],
)
def test_nodes_that_contradict_each_other_fail(
    start_cluster: StartCluster, changes: dict[str, object], part: str
) -> None:
    cluster = start_cluster(2)
    job = Job(cluster.volumes, peers=SWAP)

    job.write_yaml(0)
    job.write_yaml(1, job.yaml(1, **changes))

    for rank in (0, 1):
        eventually(lambda r=rank: part in job.failure(r), f"failure of rank {rank}")
        assert all(str(volume) in job.failure(rank) for volume in job.volumes)
        assert not job.markers(rank)
    job.handshake()
    assert job.failure(0) == job.failure(1) == ""


def test_a_yaml_of_before_does_not_fail_those_who_have_a_new_one(
    start_cluster: StartCluster,
) -> None:
    """Replicator and training were killed, and come back with another number of nodes."""
    cluster = start_cluster(2)
    job = Job(cluster.volumes, peers=SWAP)
    job.write_yaml(1, job.yaml(1, nodes=3))
    eventually(lambda: cluster.replicator.status()[1].state == "joining", "rank 1 to wait")

    job.write_yaml(0)
    eventually(lambda: cluster.replicator.status()[0].state == "joining", "rank 0 to wait")
    job.write_yaml(1)

    job.wait_for_answers()
    assert job.failure(0) == job.failure(1) == ""


def test_missing_node_is_named_and_still_waited_for(start_cluster: StartCluster) -> None:
    cluster = start_cluster(3)
    job = Job(cluster.volumes, peers=[[1], [2], [0]])
    job.write_yaml(0)
    job.write_yaml(2)

    for rank in (0, 2):
        eventually(lambda r=rank: "for node rank 1 of job job-a" in job.errors(r), "the report")

    job.write_yaml(1)
    job.wait_for_answers()


def test_wrong_arguments_are_refused(volume_root: Path) -> None:
    with pytest.raises(ValueError, match="node_directories"):
        EmbeddedReplicator([])
    with pytest.raises(ValueError, match="each once"):
        EmbeddedReplicator([volume_root, volume_root])
    with pytest.raises(ValueError, match="timeout_secs"):
        EmbeddedReplicator([volume_root], timeout_secs=0)


def test_status_follows_the_run(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    job = Job(cluster.volumes, peers=SWAP)
    states = [status.state for status in cluster.replicator.status()]
    assert states == ["waiting", "waiting"]
    assert cluster.replicator.replicated_step is None
    job.handshake()
    job.save(4)
    eventually(lambda: cluster.replicator.replicated_step == 4, "step 4")

    status = cluster.replicator.status()[1]

    assert (status.directory, status.job, status.node_rank) == (str(job.volumes[1]), "job-a", 1)
    assert (status.newest_taken_step, status.replicated_step) == (4, 4)
    cluster.replicator.stop()
    assert {status.state for status in cluster.replicator.status()} == {"stopped"}
