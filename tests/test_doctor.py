"""``mtcheckpoint doctor`` and the manager's preflight, on real folders, mounts and buckets."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gcs_server
import pytest
from gcs_proxy import LIST, READ, Fault, FaultyProxy
from restoring_jobs import JOB, alone, config, environment_of, open_manager, outcome, rank, together
from test_places import lead_to_nobody

from mtcheckpoint import cli
from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._handshake import files
from mtcheckpoint._jax import MemoryStore
from mtcheckpoint._preflight import (
    Finding,
    check_before_first_step,
    check_clocks,
    check_protocol_files,
    check_ram_disk,
    check_room,
    check_versions,
    needed_shares,
)
from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.errors import HandshakeError
from mtcheckpoint.testing import run_processes

LIMIT_SECONDS = 60.0


def flags_for(volume: Path, **more: Any) -> dict[str, Any]:
    return {
        "local_checkpoint_directory": str(volume),
        "local_checkpoint_period": 1,
        "multi_tier_checkpointing_backup_interval_minutes": 30,
        "run_name": JOB,
        **more,
    }


def settings(volume: Path, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(enable_multi_tier_checkpointing=True, **flags_for(volume, **more))


def examined(
    capsys: pytest.CaptureFixture[str],
    volume: Path,
    *options: str,
    code: int = 0,
    **more: Any,
) -> list[dict[str, str]]:
    given = [f"{name}={value}" for name, value in flags_for(volume, **more).items()]
    assert cli.main(["doctor", "--json", *options, *given]) == code
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out)
    assert all(set(finding) == {"level", "what", "found", "remedy"} for finding in found)
    return found


def bad(found: list[dict[str, str]], level: str = "FAIL") -> list[str]:
    return [f"{f['what']}: {f['found']}: {f['remedy']}" for f in found if f["level"] == level]


def in_a_mount(
    folder: Path, options: str, arguments: list[str]
) -> subprocess.CompletedProcess[str]:
    """Runs doctor with a tmpfs on `folder` that nobody else sees."""
    script = f'mount -t tmpfs -o {options} tmpfs "$0" && shift 0 && exec "$@"'
    command = [sys.executable, "-m", "mtcheckpoint", "doctor", *arguments]
    for unshare in (["unshare", "-m"], ["unshare", "-rm"]):
        if shutil.which("unshare") is None:
            break
        if subprocess.run([*unshare, "true"], capture_output=True).returncode == 0:
            return subprocess.run(
                [*unshare, "sh", "-c", script, str(folder), *command],
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
    pytest.skip("mounting a tmpfs needs a user namespace or root")


def given(volume: Path, **more: Any) -> list[str]:
    return [f"{name}={value}" for name, value in flags_for(volume, **more).items()]


# The RAM disk.


def test_a_folder_is_no_mount(volume_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = examined(capsys, volume_root)
    assert any(
        "is not a mount" in text and "mount the RAM disk" in text for text in bad(found, "WARN")
    )
    assert bad(found) == []


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_no_ram_disk(volume_root: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    volume = volume_root / "ram"
    if kind == "a file":
        volume.touch()
    (fault,) = bad(examined(capsys, volume, code=1))
    assert str(volume) in fault and "local_checkpoint_directory" in fault


def test_a_tmpfs_of_its_own_is_fine(volume_root: Path) -> None:
    done = in_a_mount(volume_root, "size=64m", [*given(volume_root), "--state-bytes", "1000000"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "is a mount of tmpfs" in done.stdout
    assert "needed are 6,600,000 = 6.6 x" in done.stdout
    assert "FAIL" not in done.stdout


def test_a_read_only_mount(volume_root: Path) -> None:
    done = in_a_mount(volume_root, "size=64m,ro", given(volume_root))
    assert done.returncode == 1
    assert "FAIL RAM disk: the RAM disk" in done.stdout
    assert "is mounted read-only: mount it writable" in done.stdout


def test_a_megabyte_is_too_small(volume_root: Path) -> None:
    done = in_a_mount(volume_root, "size=1m", given(volume_root))
    assert done.returncode == 1
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FAIL"))
    assert "1,048,576 bytes in all" in line and "6.6 x a node's share" in line


def test_too_small_for_the_state(volume_root: Path) -> None:
    arguments = [*given(volume_root), "--state-bytes", str(40 << 20), "--nodes", "4"]
    done = in_a_mount(volume_root, "size=64m", arguments)
    assert done.returncode == 1
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FAIL"))
    assert "needed are 69,206,016 = 6.6 x" in line and "of 10,485,760 bytes" in line


def test_not_writable_for_this_user(volume_root: Path) -> None:
    volume = volume_root / "ram"
    volume.mkdir(mode=0o755)
    volume_root.chmod(0o755)
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    # All is imported first: nobody may not be allowed to read it.
    code = (
        "import os, sys, mtcheckpoint._doctor, mtcheckpoint._commands.doctor, rich.console\n"
        "from mtcheckpoint import cli\n"
        "os.seteuid(65534)\n"
        "sys.exit(cli.main(['doctor', *sys.argv[1:]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *given(volume)],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 1, done.stderr
    assert "(mode 0755) is not writable for user 65534: run the job as the owner" in done.stdout


@pytest.mark.parametrize(
    ("flags", "nodes", "shares"),
    [
        ({}, None, 6.6),
        ({}, 1, 2.2),
        ({}, 8, 6.6),
        ({"mtc_data_parallelism": 2}, 8, 2.2),
        ({"num_slices": 4}, 8, 2.2),
        ({"num_slices": 4, "replication": "copies"}, 8, 6.6),
        ({"peers_per_node": 2}, 8, 11.0),
        ({"enable_replicator": False, "max_num_checkpoints_to_keep": 3}, 8, 4.0),
    ],
)
def test_what_is_needed(flags: dict[str, Any], nodes: int | None, shares: float) -> None:
    assert needed_shares(settings(Path("/ram"), **flags), nodes)[0] == pytest.approx(shares)


def test_replicas_share_the_state(volume_root: Path) -> None:
    (finding,) = check_room(
        settings(volume_root, mtc_data_parallelism=2), state_bytes=4000, nodes=8
    )
    # Half of the nodes hold all of it.
    assert "2.2 x a node's share" in finding.found and "of 1,000 bytes" in finding.found


# The protocol's files.


def protocol_findings(volume: Path, **flags: Any) -> list[Finding]:
    return check_protocol_files(settings(volume, **flags))


def test_the_files_of_a_volume(volume_root: Path) -> None:
    init_info, replicator = protocol_findings(volume_root)
    assert (init_info.level, replicator.level) == ("OK", "WARN")
    assert "has left nothing" in replicator.found

    (volume_root / files.JAX_INIT_INFO_FILE).write_text("3\n10.0.0.1:1234\n")
    (volume_root / f"{JOB}-s1-n0-w0.restore").touch()
    init_info, replicator = protocol_findings(volume_root)
    assert init_info.found == "process 3, coordinator 10.0.0.1:1234"
    assert (replicator.level, replicator.found) == ("OK", "has worked in this volume")

    (volume_root / files.JAX_INIT_INFO_FILE).write_text("three\n10.0.0.1:1234\n")
    assert protocol_findings(volume_root)[0].level == "FAIL"
    (volume_root / files.JAX_INIT_INFO_FILE).write_text("3\n")
    assert protocol_findings(volume_root)[0].found == "is half-written"


def test_a_stale_yaml(volume_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = volume_root / files.REPLICATOR_YAML
    yaml.write_text("job-name: job-a\n")
    assert not any("was not taken" in text for text in bad(examined(capsys, volume_root), "WARN"))
    os.utime(yaml, (time.time() - 90, time.time() - 90))
    warnings = bad(examined(capsys, volume_root), "WARN")
    assert any("for 90 s and was not taken" in text or "for 91 s" in text for text in warnings)
    assert any("no replicator runs on this node" in text for text in warnings)
    assert yaml.exists()


def test_what_a_replicator_said_is_told(volume_root: Path) -> None:
    (volume_root / files.FAILED_FILE).touch()
    failed = protocol_findings(volume_root)[1]
    assert failed.level == "WARN" and "replicator.failed is there" in failed.found
    (alone_one,) = protocol_findings(
        volume_root, enable_replicator=False, max_num_checkpoints_to_keep=1
    )[1:]
    assert alone_one.level == "OK"


def test_on_kubernetes_the_init_info_is_expected(
    volume_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert protocol_findings(volume_root)[0].level == "WARN"


# Versions, clocks, configuration.


def test_versions() -> None:
    found = check_versions(
        {"new": "0.12", "old": "0.12", "none": "1"},
        {"new": "0.12.8.dev3", "old": "0.9.30"}.get,
    )
    assert [finding.level for finding in found] == ["OK", "FAIL", "FAIL"]
    assert found[1].line == "version of old: 0.9.30: install old 0.12 or newer"


def test_versions_are_told(volume_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = examined(capsys, volume_root)
    told = {finding["what"] for finding in found if finding["level"] == "OK"}
    assert told >= {f"version of {n}" for n in ("python", "jax", "orbax-checkpoint", "tensorstore")}


def test_clocks() -> None:
    def names(processes: Any) -> list[str]:
        return [f"process {process}" for process in processes]

    assert check_clocks([100.0, 130.0], names)[0].level == "OK"
    (finding,) = check_clocks([100.0, 50.0, 111.0], names)
    assert finding.level == "WARN"
    assert "differ by 61 s: process 1 is behind, process 2 is ahead" in finding.found


def test_contradictions_are_found_and_the_rest_is_looked_at(
    volume_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fault,) = bad(examined(capsys, volume_root, code=1, peers_per_node=0))
    assert "peers_per_node=0" in fault
    found = examined(capsys, volume_root, code=1, peers_per_node=0)
    assert any(finding["what"].startswith("RAM disk") for finding in found)
    (fault,) = bad(examined(capsys, volume_root, code=1, timeout_secs="soon"))
    assert "timeout_secs" in fault


def test_flags_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yml"
    file.write_text("\n".join(f"{k}: {v}" for k, v in flags_for(tmp_path / "gone").items()))
    assert cli.main(["doctor", "--config", str(file)]) == 1
    assert "FAIL RAM disk" in capsys.readouterr().out
    override = f"local_checkpoint_directory={tmp_path}"
    assert cli.main(["doctor", "--config", str(file), override]) == 0
    assert "FAIL" not in capsys.readouterr().out
    assert cli.main(["doctor", "--config", str(tmp_path / "nowhere.yml")]) == 1
    assert "cannot be read" in capsys.readouterr().out


def test_without_any_flags_versions_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert "none was given" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["run_nam=x"], ["run_name"], ["--state-bytes", "0"], ["--state-bytes", "many"]]
)
def test_arguments_without_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *arguments])
    assert ended.value.code == 2
    capsys.readouterr()


# Backups.


def backup_in(root: Path) -> None:
    dated = root / JOB / "2026-01-02_03-04"
    dated.mkdir(parents=True)
    (dated / f"{JOB}-s7-n0-w0.meta").write_text("d" * 64)


def test_a_folder_of_backups(
    volume_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f"{tmp_path}/gone"
    (fault,) = bad(examined(capsys, volume_root, code=1, backup_root=gone))
    assert gone in fault and "create it" in fault
    found = examined(capsys, volume_root, backup_root=str(tmp_path))
    assert any("has no backup of job-a" in finding["found"] for finding in found)
    backup_in(tmp_path)
    found = examined(capsys, volume_root, backup_root=str(tmp_path))
    assert any("the newest is 2026-01-02_03-04, step 7" in finding["found"] for finding in found)


def test_only_a_write_test_writes(
    volume_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup_in(tmp_path)
    before = sorted(tmp_path.rglob("*")), tmp_path.stat().st_mtime_ns
    examined(capsys, volume_root, backup_root=str(tmp_path))
    assert (sorted(tmp_path.rglob("*")), tmp_path.stat().st_mtime_ns) == before
    found = examined(capsys, volume_root, "--write-test", backup_root=str(tmp_path))
    assert any("can be written" in finding["found"] for finding in found)
    assert sorted(tmp_path.rglob("*")) == before[0]
    assert tmp_path.stat().st_mtime_ns != before[1]


def test_a_bucket(
    volume_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fsspec

    with gcs_server.running_server() as url:
        bucket = gcs_server.make_bucket(url)
        root = f"gs://{bucket}"
        lead_to(url, monkeypatch)
        backup_in(tmp_path / "backups")
        filled = fsspec.filesystem("gs", skip_instance_cache=True, endpoint_url=url)
        filled.put(f"{tmp_path}/backups/", f"{bucket}/", recursive=True)
        before = gcs_server.object_names(url, bucket)

        with FaultyProxy(url) as proxy:
            lead_to(proxy.url, monkeypatch)
            found = examined(capsys, volume_root, backup_root=root)
            assert proxy.methods == {"GET"}
            assert bad(found) == []
            assert any("hierarchical namespace: unknown" in text for text in bad(found, "WARN"))
            examined(capsys, volume_root, "--write-test", backup_root=root)
            assert proxy.methods > {"GET"}
        assert gcs_server.object_names(url, bucket) == before

        for path, status in ((LIST, 403), (READ, 403), (LIST, 401)):
            with FaultyProxy(url, Fault(path=path, status=status)) as proxy:
                lead_to(proxy.url, monkeypatch)
                (fault,) = bad(examined(capsys, volume_root, code=1, backup_root=root))
                assert root in fault and "storage.objectUser" in fault, (path, status)

        with FaultyProxy(url, Fault(path="/upload/", status=403)) as proxy:
            lead_to(proxy.url, monkeypatch)
            (fault,) = bad(examined(capsys, volume_root, "--write-test", code=1, backup_root=root))
            assert "cannot be written" in fault

        lead_to(url, monkeypatch)
        (fault,) = bad(examined(capsys, volume_root, code=1, backup_root="gs://no-such-bucket"))
        assert "no-such-bucket" in fault

    lead_to_nobody(monkeypatch)
    (fault,) = bad(examined(capsys, volume_root, code=1, backup_root=root))
    assert "the network" in fault


@pytest.mark.parametrize(("enabled", "said"), [(True, "on"), (False, "off")])
def test_the_hierarchical_namespace_is_asked_for(
    volume_root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    enabled: bool,
    said: str,
) -> None:
    from aiohttp import web

    class Layout(FaultyProxy):
        async def _answer(self, request: web.Request) -> web.Response:
            if request.path.endswith("/storageLayout"):
                return web.json_response({"hierarchicalNamespace": {"enabled": enabled}})
            return await super()._answer(request)

    with gcs_server.running_server() as url, Layout(url) as proxy:
        bucket = gcs_server.make_bucket(url)
        lead_to(proxy.url, monkeypatch)
        found = examined(capsys, volume_root, backup_root=f"gs://{bucket}")
        (finding,) = (f for f in found if "hierarchical" in f["found"])
        assert finding["found"] == f"hierarchical namespace: {said}"
        assert finding["level"] == ("OK" if enabled else "WARN")


def lead_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(url).items():
        monkeypatch.setenv(name, value)


# The manager's own checks.


def coordinator() -> Coordinator:
    return Coordinator(MemoryStore(), process=0, processes=1, namespace="preflight")


def test_the_preflight_says_one_line(volume_root: Path) -> None:
    with pytest.raises(HandshakeError, match="local_checkpoint_directory") as caught:
        check_before_first_step(settings(volume_root / "gone"), coordinator())
    assert "\n" not in str(caught.value)


def test_a_plain_folder_is_only_a_warning(
    volume_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="mtcheckpoint"):
        check_before_first_step(settings(volume_root), coordinator())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "is not a mount" in record.getMessage()
    assert [finding.level for finding in check_ram_disk(volume_root)] == ["OK", "WARN"]


def test_one_host_without_a_ram_disk_stops_all(volume_root: Path) -> None:
    found = run_processes(start_without_ram_disk, 2, devices=4, args=[str(volume_root)])
    assert [process["error"] for process in found] == ["HandshakeError"] * 2
    (said,) = {process["message"] for process in found}
    assert "process 1" in said and "cannot be used" in said and "\n" not in said
    assert list((volume_root / "node0").iterdir()) == []


def start_without_ram_disk(root: str) -> dict[str, Any]:
    flags = dataclasses.replace(alone(root))
    if rank() == 1:
        shutil.rmtree(flags.local_checkpoint_directory)
    together("removed")
    return outcome(lambda: start(config(root)))


def start(flags: CheckpointConfig) -> dict[str, Any]:
    with open_manager(flags) as manager:
        return {"restored": manager.restore_latest() is not None}
