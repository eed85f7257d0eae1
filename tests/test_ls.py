"""``mtcheckpoint ls``: real volumes and backups, whole, half and foreign."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gcs_server
import pytest
import shares
from replicator_cluster import EmbeddedCluster, Job, embedded_cluster, eventually
from restoring_jobs import environment_of
from restoring_jobs import save_alone as job_save_alone

from mtcheckpoint import cli
from mtcheckpoint._handshake import files
from mtcheckpoint._listed import spelled_ranks
from mtcheckpoint._shares.identity import IDENTITY_FILE, Identity, identity_to_json
from mtcheckpoint.testing import run_processes

KEYS = {
    *("place", "tier", "job", "step", "save_id", "written_by", "ranks", "nodes"),
    *("missing_ranks", "size_bytes", "age_secs", "state", "note"),
}


def listed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert cli.main(["ls", "--json", *map(str, arguments)]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert all(set(row) == KEYS for row in rows)
    return rows


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["ls", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def values(rows: Sequence[dict[str, Any]], *keys: str) -> list[list[Any]]:
    return [[row[key] for key in keys] for row in rows]


def commit(volumes: Sequence[Path], step: int, job: str = "job-a") -> None:
    """Saves a step as our manager does, on all nodes."""
    for rank, volume in enumerate(volumes):
        staging = shares.write_share(volume / "mtcheckpoint.staging", f"{job} {step} of {rank}")
        identity = Identity(
            job=job, step=step, save_id=f"save-{step}", node_rank=rank, nodes=len(volumes)
        )
        (staging / IDENTITY_FILE).parent.mkdir()
        (staging / IDENTITY_FILE).write_text(identity_to_json(identity))
        os.rename(staging, volume / str(step))


def folders(root: Path, count: int) -> list[Path]:
    found = [root / f"node{rank}" for rank in range(count)]
    for folder in found:
        folder.mkdir()
    return found


def backed_up(cluster: EmbeddedCluster, step: int, name: str = "job-a") -> Path:
    """Saves a step and waits for its backup; returns the dated folder."""
    job = Job(cluster.volumes, name=name, settings=cluster.settings(backups=True))
    job.handshake()
    cluster.let_backup_interval_pass()
    commit(cluster.volumes, step, name)
    job.wait_until_only(step)

    def whole() -> list[Path]:
        dated = cluster.backup.glob(f"{name}/*")
        count = len(cluster.volumes)
        return [folder for folder in dated if len(list(folder.glob("*.meta"))) == count]

    eventually(whole, f"the backup of step {step}")
    return whole()[0]


@pytest.fixture
def cluster(volume_root: Path) -> Iterator[EmbeddedCluster]:
    with embedded_cluster(volume_root, 2, timeout_secs=30.0) as cluster:
        cluster.backup.mkdir()
        yield cluster


# Volumes.


def test_steps_that_no_replicator_took_are_judged_together(
    volume_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volumes = folders(volume_root, 3)
    commit(volumes, 7)
    commit(volumes, 9)
    shutil.rmtree(volumes[1] / "9")

    rows = listed(capsys, *volumes)

    assert values(rows, "job", "step", "state", "ranks", "missing_ranks", "nodes") == [
        ["job-a", 9, "incomplete", [0, 2], [1], 3],
        ["job-a", 7, "complete", [0, 1, 2], [], 3],
    ]
    assert values(rows, "tier", "written_by", "save_id") == [
        ["memory", "mtcheckpoint", "save-9"],
        ["memory", "mtcheckpoint", "save-7"],
    ]
    assert all(0 <= row["age_secs"] < 60 and row["size_bytes"] > 0 for row in rows)
    text = shown(capsys, *volumes)
    assert "rank 1 missing" in text and "0-2 of 3" in text and "0 s" in text
    assert all(len(line) <= 80 for line in text.splitlines()[1:])


def test_one_volume_alone_says_who_is_missing(
    volume_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volumes = folders(volume_root, 4)
    commit(volumes, 5)
    (row,) = listed(capsys, volumes[2])
    assert (row["ranks"], row["missing_ranks"]) == ([2], [0, 1, 3])
    assert "ranks 0-1, 3 missing" in shown(capsys, volumes[2])


def test_a_replicators_volumes(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(cluster.volumes, peers=[[1], [0]], settings=cluster.settings())
    job.handshake()
    commit(cluster.volumes, 3)
    job.wait_until_only(3)

    (both,) = listed(capsys, *cluster.volumes)
    assert values([both], "job", "step", "state", "ranks") == [["job-a", 3, "complete", [0, 1]]]
    # Each holds the other's copy, which counts once.
    (one,) = listed(capsys, cluster.volumes[0])
    assert values([one], "state", "size_bytes") == [["complete", both["size_bytes"]]]

    data = files.data_name(job.digest(3, 1))
    for volume in cluster.volumes:
        shutil.rmtree(volume / data)
    (row,) = listed(capsys, *cluster.volumes)
    assert values([row], "state", "missing_ranks") == [["incomplete", [1]]]


def test_metas_without_any_data_are_an_incomplete_step(
    volume_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (volume,) = folders(volume_root, 1)
    (volume / "job-a-s4-n0-w0.meta").write_text("d" * 64)
    (row,) = listed(capsys, volume)
    assert values([row], "step", "state", "note") == [
        [4, "incomplete", "the data of rank 0 is missing"]
    ]


def test_damaged_and_foreign_things_are_marked(
    volume_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (volume,) = folders(volume_root, 1)
    commit([volume], 1)
    commit([volume], 2)
    (volume / "2" / IDENTITY_FILE).write_text("{")
    (volume / ("e" * 64 + ".data")).mkdir()
    (volume / "3").mkdir()
    (volume / "notes.txt").write_text("x")
    (volume / files.REPLICATOR_YAML).write_text("job-name: job-a")

    rows = listed(capsys, volume)

    assert values(rows, "job", "step", "state") == [
        ["job-a", 1, "complete"],
        [None, None, "damaged"],
        *[[None, None, "foreign"]] * 3,
    ]
    notes = [row["note"] for row in rows[1:]]
    assert "is not JSON" in notes[0]
    assert notes[1:] == [
        "3: not a share",
        "e" * 64 + ".data: no .meta names this data",
        "notes.txt: not a share",
    ]
    assert "foreign" in shown(capsys, volume)


def test_all_jobs_are_shown_or_one(volume_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (volume,) = folders(volume_root, 1)
    commit([volume], 1, "job-a")
    commit([volume], 2, "job-b")
    assert values(listed(capsys, volume), "job", "step") == [["job-a", 1], ["job-b", 2]]
    assert values(listed(capsys, "--job", "job-b", volume), "job", "step") == [["job-b", 2]]


def test_shares_of_a_real_manager_and_without_what_it_says_of_itself(
    volume_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_processes(job_save_alone, 1, devices=8, args=[str(volume_root), [1, 2]])
    volume = volume_root / "node0"
    keys = ("job", "step", "state", "written_by", "nodes")
    ours = [["job-a", step, "complete", "mtcheckpoint", 1] for step in (2, 1)]
    assert values(listed(capsys, volume), *keys) == ours

    # Without our folder nobody knows whose it is.
    shutil.rmtree(volume / "2" / Path(IDENTITY_FILE).parent)
    assert values(listed(capsys, volume), "step", "state")[1] == [None, "foreign"]

    # What Orbax's replicator manager writes has a folder for the process instead.
    (volume / "2" / "state" / "ocdbt.process_0").mkdir()
    rows = listed(capsys, volume)
    assert values(rows, *keys) == [ours[1], [None, 2, "complete", "orbax", 1]]
    assert rows[1]["save_id"] is None
    assert "by Orbax" in shown(capsys, volume)


def test_an_empty_volume_holds_nothing(
    volume_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (volume,) = folders(volume_root, 1)
    assert listed(capsys, volume) == []
    assert "nothing lies in" in shown(capsys, volume)


@pytest.mark.parametrize("place", ["absent", "file"])
def test_what_cannot_be_read_is_an_error(
    volume_root: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (volume_root / "file").write_text("")
    assert cli.main(["ls", str(volume_root / place)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert str(volume_root / place) in said.err


# Backups.


def test_a_backup_is_found_from_every_level(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    dated = backed_up(cluster, 3)
    expected = [["job-a", 3, "backup", "complete", [0, 1], 2, "save-3", str(dated)]]
    for place in (cluster.backup, dated.parent, dated):
        rows = listed(capsys, place)
        keys = ("job", "step", "tier", "state", "ranks", "nodes", "save_id", "place")
        assert values(rows, *keys) == expected
        assert rows[0]["size_bytes"] > 0
        assert 0 <= rows[0]["age_secs"] < 200
    both = listed(capsys, cluster.volumes[0], cluster.volumes[1], cluster.backup)
    assert [row["tier"] for row in both] == ["memory", "backup"]


def test_half_foreign_and_damaged_backups(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    dated = backed_up(cluster, 3)
    copies = {name: dated.with_name(f"2020-01-0{day}_00-00") for day, name in enumerate("abcd", 1)}
    for copy in copies.values():
        shutil.copytree(dated, copy)
    metas = {rank: f"job-a-s3-n{rank}-w0.meta" for rank in range(2)}
    # The last rank's: only a share tells that there should be one more.
    (copies["a"] / metas[1]).unlink()
    shutil.rmtree(copies["b"] / files.data_name((copies["b"] / metas[0]).read_text()))
    for data in copies["c"].glob("*.data"):
        (data / IDENTITY_FILE).write_text("[]")
    (copies["d"] / "job-z-s3-n0-w0.meta").write_text("d" * 64)
    (dated.parent / "readme").write_text("")
    (cluster.backup / "elsewhere").mkdir()

    rows = listed(capsys, cluster.backup)

    assert values(rows, "state", "missing_ranks") == [
        ["complete", []],
        ["complete", []],  # d
        ["foreign", []],
        ["damaged", []],
        ["incomplete", [0]],
        ["incomplete", [1]],
        ["foreign", []],  # the data whose .meta is gone
        ["foreign", []],
        ["foreign", []],
    ]
    notes = [row["note"] for row in rows]
    assert notes[2] == "job-z-s3-n0-w0.meta: of the job job-z"
    assert notes[-2:] == ["readme: not a backup", "elsewhere: not a job with backups"]
    # A damaged or half backup changes nothing of what is there.
    assert (copies["c"] / metas[0]).exists()


def test_a_bucket(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    dated = backed_up(cluster, 3)
    with gcs_server.running_server() as url:
        for name, value in environment_of(url).items():
            monkeypatch.setenv(name, value)
        bucket = gcs_server.make_bucket(url)
        assert listed(capsys, f"gs://{bucket}") == []
        bucket_files = fsspec.filesystem("gs", skip_instance_cache=True, endpoint_url=url)
        bucket_files.put(f"{cluster.backup}/", f"{bucket}/root/", recursive=True)
        before = gcs_server.object_names(url, bucket)
        (local,) = listed(capsys, dated)
        for place in ("root", "root/job-a", f"root/job-a/{dated.name}"):
            (row,) = listed(capsys, f"gs://{bucket}/{place}")
            assert values([row], "step", "state", "ranks") == [[3, "complete", [0, 1]]]
            assert row["size_bytes"] == local["size_bytes"]
        assert gcs_server.object_names(url, bucket) == before

        assert cli.main(["ls", "gs://no-such-bucket/x"]) == 1
        said = capsys.readouterr()
        assert said.out == "" and "no-such-bucket" in said.err


# Words.


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], "no ranks"), ([3], "rank 3"), ([0, 1, 2, 7, 9, 10], "ranks 0-2, 7, 9-10")],
)
def test_ranks_are_spelled_in_runs(ranks: list[int], text: str) -> None:
    assert spelled_ranks(ranks) == text
