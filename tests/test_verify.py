"""``mtcheckpoint verify``: damage is found in every kind of place, and good shares pass."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import gcs_server
import numpy as np
import pytest
import tensorstore as ts
from gcs_proxy import READ, Fault, FaultyProxy
from restoring_jobs import alone, environment_of, open_manager

from mtcheckpoint import _verifying, cli
from mtcheckpoint._handshake import files
from mtcheckpoint._shares.contents import state_kvstore
from mtcheckpoint._shares.identity import EXTRAS_FILE, IDENTITY_FILE, OWN_FOLDER
from mtcheckpoint._shares.places import LocalPlace
from mtcheckpoint._shares.seal import SEAL_FILE, digest_of
from mtcheckpoint.testing import case_mesh, case_state, ram_disk, run_processes

JOB = "job-a"
KEYS = {"place", "job", "step", "rank", "bytes", "chunks", "state", "faults"}
DIGEST = "D" + "7" * 64
DATE = "2026-01-02_03-04"


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    """A volume with the steps 1 and 2, as a manager saves them. Not to be changed."""
    with ram_disk() as root:
        run_processes(save_with_large_chunks, 1, devices=8, args=[str(root)])
        yield root / "node0"


def save_with_large_chunks(root: str) -> None:
    """Chunks below some kB lie in the tables of what is in a file, which have checksums."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = case_mesh()
    over_data = NamedSharding(mesh, PartitionSpec("data"))
    with open_manager(alone(root)) as manager:
        for step in (1, 2):
            large = jax.device_put(np.full((8, 1 << 13), step, np.float32), over_data)
            assert manager.save(step, {**case_state(mesh, step), "large": large}, force=True)


@pytest.fixture
def volume(saved: Path, volume_root: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, volume_root / "volume"))


def verified(
    capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0
) -> list[dict[str, Any]]:
    assert cli.main(["verify", "--json", *map(str, arguments)]) == code
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert all(set(row) == KEYS for row in rows)
    return rows


def shown(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert cli.main(["verify", *map(str, arguments)]) == code
    return capsys.readouterr().out


def states(rows: list[dict[str, Any]]) -> list[list[Any]]:
    return [[row["step"], row["state"]] for row in rows]


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# Good ones.


def test_good_shares_pass(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content_of(volume)
    rows = verified(capsys, volume, "--require-seal")
    assert states(rows) == [[1, "good"], [2, "good"]]
    for row in rows:
        assert (row["job"], row["rank"], row["faults"]) == (JOB, 0, [])
        # All of w, b, step, key and adam's copies of the first two.
        assert row["chunks"] > 10 and row["bytes"] > 3 * 16 * 32 * 2
    assert content_of(volume) == before
    text = shown(capsys, volume)
    assert text.count("good: ") == 2 and "2 shares: 2 good" in text


def test_few_bytes_at_a_time_are_enough(volume: Path) -> None:
    told: list[int] = []
    (one, two) = _verifying.verify_places(
        [str(volume)], timeout_secs=60.0, concurrent_bytes=1, on_bytes=told.append
    )
    assert one.state == two.state == "good"
    assert len(told) == one.chunks + two.chunks


def test_an_empty_volume(volume_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified(capsys, volume_root) == []
    assert "no shares lie in" in shown(capsys, volume_root)


def test_one_job_only(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(verified(capsys, volume, "--job", JOB)) == 2
    assert verified(capsys, volume, "--job", "job-b") == []


# Damage.


def flip(file: Path, other: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path, other: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path, other: Path) -> None:
    os.truncate(file, 0)


def remove(file: Path, other: Path) -> None:
    file.unlink()


def swap(file: Path, other: Path) -> None:
    shutil.copyfile(other, file)


DAMAGES = (flip, cut, empty, remove, swap)


def flip_a_chunk(share: Path) -> Path:
    """Flips a bit of an array, and returns the file it is in."""
    store = ts.KvStore.open(state_kvstore(LocalPlace(share))).result(30)
    chunk = next(key for key in store.list().result(30) if key.startswith(b"large/c/"))
    value = store.read(chunk).result(30).value
    for file in kinds_of_files(share)["data"]:
        content = bytearray(file.read_bytes())
        if value in content:
            content[content.index(value)] ^= 1
            file.write_bytes(content)
            return file
    raise AssertionError(f"{chunk!r} is in no data file")


def kinds_of_files(share: Path) -> dict[str, list[Path]]:
    """The files of a share by what they are."""
    state = share / "state"
    return {
        "data": sorted(state.glob("ocdbt.process_0/d/*")) + sorted(state.glob("d/*")),
        "manifest": [state / "manifest.ocdbt"],
        "tree": [state / "_METADATA"],
        "sharding": [state / "_sharding"],
        "identity": [share / IDENTITY_FILE],
        "seal": [share / SEAL_FILE],
        "extras": [share / EXTRAS_FILE],
        "process metadata": [share / "process_metadata" / "global_process_metadata.json"],
    }


KINDS = ("data", "manifest", "tree", "sharding", "identity", "seal", "extras", "process metadata")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_found(
    volume: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    damage: Callable[[Path, Path], None],
) -> None:
    touched = kinds_of_files(volume / "2")[kind]
    others = kinds_of_files(volume / "1")[kind]
    assert touched and others
    found = [
        is_found(volume, capsys, file, lambda file=file, other=other: damage(file, other))
        for file, other in zip(touched, itertools.cycle(others), strict=False)
        # What the two steps have in common cannot be told apart.
        if damage is not swap or file.read_bytes() != other.read_bytes()
    ]
    # In data files there are parts that nothing refers to: where these are touched, all chunks are
    # what they were. Sizes are sealed of all.
    assert any(found) if kind == "data" and damage in (flip, swap) else all(found)
    assert states(verified(capsys, volume)) == [[1, "good"], [2, "good"]]


def is_found(
    volume: Path, capsys: pytest.CaptureFixture[str], file: Path, harm: Callable[[], None]
) -> bool:
    before = file.read_bytes()
    harm()
    assert cli.main(["verify", "--json", str(volume)]) in (0, 1)
    rows = json.loads(capsys.readouterr().out)
    file.write_bytes(before)
    one, two = (row["state"] for row in rows)
    (bad,) = (row for row in rows if row["step"] == 2 or row["place"] == str(volume / "2"))
    assert one == "good" and bool(bad["faults"]) == (two == "bad"), (file, rows)
    return bool(two == "bad")


def test_every_bad_chunk_is_named(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A seal that does not fit: as if each chunk had changed."""
    share = volume / "2"
    outer = json.loads((share / SEAL_FILE).read_text())
    sealed = json.loads(outer["seal"])
    for chunks in sealed["chunks"].values():
        for chunk in chunks:
            chunks[chunk][1] = "0" * 32
    text = json.dumps(sealed)
    outer = {"seal": text, "checksum": digest_of(text.encode())}
    (share / SEAL_FILE).write_text(json.dumps(outer))
    (_, bad) = verified(capsys, volume, code=1)
    assert len(bad["faults"]) == 21 and bad["faults"][-1] == f"and {bad['chunks'] - 20} more"
    assert all("is not what was saved" in fault for fault in bad["faults"][:-1])


def test_without_a_seal(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What Orbax's own manager writes is the same without our folder."""
    shutil.rmtree(volume / "2" / OWN_FOLDER)
    assert states(verified(capsys, volume)) == [[1, "good"], [2, "no seal"]]
    assert states(verified(capsys, volume, "--require-seal", code=1))[1] == [2, "no seal"]
    assert "no seal: " in shown(capsys, volume)
    (volume / "2" / "state" / "manifest.ocdbt").unlink()
    assert states(verified(capsys, volume, code=1))[1] == [2, "bad"]


def taken(volume: Path, step: int = 2) -> Path:
    """Lays a step out as a replicator does once it has taken it; returns the data."""
    data = (volume / str(step)).rename(volume / files.data_name(DIGEST))
    (volume / f"{JOB}-s{step}-n0-w0.meta").write_text(DIGEST)
    return data


def test_what_a_replicator_took(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = taken(volume)
    (volume / f"{JOB}-s3-n1-w0.meta").write_text("D" + "8" * 64)
    rows = verified(capsys, volume, code=1)
    assert sorted([row["step"], row["rank"], row["state"]] for row in rows) == [
        [1, 0, "good"],
        [2, 0, "good"],
        [3, 1, "bad"],
    ]
    assert str(data) in [row["place"] for row in rows]
    (lost,) = (row for row in rows if row["step"] == 3)
    assert "which is not there" in lost["faults"][0]


def test_another_jobs_share_under_our_name(
    volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken(volume)
    (volume / f"{JOB}-s2-n0-w0.meta").rename(volume / "job-b-s1-n0-w0.meta")
    rows = verified(capsys, volume, "--job", "job-b", code=1)
    assert rows[0]["faults"] == [f"it is of the job {JOB!r}", "it is of step 2"]


def test_what_cannot_be_opened_is_unreadable(
    volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link to itself: also root cannot read it."""
    shutil.rmtree(volume / "2" / OWN_FOLDER)
    (volume / "2" / OWN_FOLDER).symlink_to(volume / "2" / OWN_FOLDER)
    rows = verified(capsys, volume, "/nowhere/at/all", code=1)
    assert sorted(row["state"] for row in rows) == ["good", "unreadable", "unreadable"]
    assert {row["place"] for row in rows} >= {"/nowhere/at/all", str(volume / "2")}


def test_arguments_without_sense(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["/x", "--timeout", "0"], ["/x", "--timeout", "nan"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["verify", *arguments])
        assert ended.value.code == 2
    capsys.readouterr()


def test_a_shell_sees_the_exit_code(volume: Path) -> None:
    (volume / "2" / SEAL_FILE).unlink()
    done = subprocess.run(
        [sys.executable, "-m", "mtcheckpoint", "verify", str(volume)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "seal.json is gone" in done.stdout


# Backups.


def backup_of(volume: Path, root: Path) -> Path:
    """The volume's step 2 as a dated backup; returns the data."""
    dated = root / JOB / DATE
    dated.mkdir(parents=True)
    data = Path(shutil.copytree(volume / "2", dated / files.data_name(DIGEST)))
    (dated / f"{JOB}-s2-n0-w0.meta").write_text(DIGEST)
    return data


def test_a_backup_from_every_level(
    volume: Path, volume_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = backup_of(volume, volume_root / "backups")
    for place in (data.parents[2], data.parents[1], data.parent):
        (row,) = verified(capsys, place)
        assert [row["place"], row["job"], row["step"], row["state"]] == [str(data), JOB, 2, "good"]
    flip_a_chunk(data)
    assert states(verified(capsys, data.parent, volume, code=1)) == [
        [2, "bad"],
        [1, "good"],
        [2, "good"],
    ]
    shutil.rmtree(data)
    (row,) = verified(capsys, data.parent, code=1)
    assert row["state"] == "bad" and "there is no such data" in row["faults"][0]


def test_a_file_system_that_only_fsspec_knows(
    volume: Path, volume_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = backup_of(volume, volume_root / "backups")
    url = f"memory://{uuid.uuid4().hex}"
    memory, path = fsspec.core.url_to_fs(url)
    memory.put(f"{volume_root}/backups/", f"{path}/", recursive=True)
    assert states(verified(capsys, url)) == [[2, "good"]]
    name = f"{path}/{JOB}/{DATE}/{data.name}/state/_METADATA"
    memory.pipe_file(name, memory.cat_file(name)[:-1])
    assert states(verified(capsys, url, code=1)) == [[2, "bad"]]


def test_a_bucket(
    volume: Path,
    volume_root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = backup_of(volume, volume_root / "backups")
    with gcs_server.running_server() as url:
        lead_to(url, monkeypatch)
        bucket = gcs_server.make_bucket(url)
        filled = fsspec.filesystem("gs", skip_instance_cache=True, endpoint_url=url)
        filled.put(f"{volume_root}/backups/", f"{bucket}/root/", recursive=True)
        before = gcs_server.object_names(url, bucket)
        (row,) = verified(capsys, f"gs://{bucket}/root")
        assert (row["state"], row["chunks"] > 10) == ("good", True)

        file = flip_a_chunk(data)
        filled.put_file(str(file), f"{bucket}/root/{file.relative_to(volume_root / 'backups')}")
        (row,) = verified(capsys, f"gs://{bucket}/root", code=1)
        assert row["state"] == "bad" and "is not what was saved" in row["faults"][0]
        assert gcs_server.object_names(url, bucket) == before

        with FaultyProxy(url, Fault(path=READ, status=403)) as proxy:
            lead_to(proxy.url, monkeypatch)
            (row,) = verified(capsys, f"gs://{bucket}/root", code=1)
            assert row["state"] == "unreadable"
        (row,) = verified(capsys, "gs://no-such-bucket/x", code=1)
        assert row["state"] == "unreadable" and "no-such-bucket" in row["faults"][0]


def lead_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(url).items():
        monkeypatch.setenv(name, value)
