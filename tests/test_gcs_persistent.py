"""Persistent checkpoints in Cloud Storage, opposite a real server on loopback."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import gcs_server
import orbax.checkpoint as ocp
import pytest

import mtcheckpoint as mtc
import mtcheckpoint.testing as mtt
from mtcheckpoint.errors import TierUnreadableError


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with gcs_server.running_server() as url:
        yield url


@pytest.fixture
def cloud(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server's URL, which everything in this process now takes for Cloud Storage."""
    for name, value in gcs_server.environment(server).items():
        monkeypatch.setenv(name, value)
    return server


def committed_steps(url: str, bucket: str) -> set[int]:
    marker = re.compile(r"run/checkpoints/(\d+)/commit_success\.txt")
    found = map(marker.fullmatch, gcs_server.object_names(url, bucket))
    return {int(match[1]) for match in found if match}


def touched_steps(url: str, bucket: str) -> set[int]:
    """Steps of which anything at all is in the bucket."""
    folders = {name.split("/")[2] for name in gcs_server.object_names(url, bucket)}
    return {int(folder) for folder in folders if folder.isdigit()}


def continuous_config(bucket: str) -> mtc.CheckpointConfig:
    return mtc.CheckpointConfig(
        base_output_directory=f"gs://{bucket}",
        run_name="run",
        enable_continuous_checkpointing=True,
        max_num_checkpoints_to_keep=2,
        timeout_secs=60,
    )


def train(bucket: str, first: int, saves: int) -> list[int]:
    """Saves until `saves` saves were started; which steps they were of."""
    mesh = mtt.case_mesh(2, 2)
    saved: list[int] = []
    with mtc.create_checkpoint_manager(continuous_config(bucket), mesh) as manager:
        assert (manager.latest_step() or -1) < first
        for step in range(first, first + 5000):
            args = ocp.args.StandardSave(mtt.case_state(mesh, step))
            if manager.save(step, args=args):
                saved.append(step)
            if len(saved) == saves:
                break
    return saved


def restore_newest(bucket: str) -> int:
    mesh = mtt.case_mesh(2, 2)
    with mtc.create_checkpoint_manager(continuous_config(bucket), mesh) as manager:
        step = manager.latest_step()
        target = mtt.abstract_state(mtt.case_state(mesh, 0))
        mtt.assert_state(manager.restore(step, args=ocp.args.StandardRestore(target)), step)
    return int(step)


def test_saves_are_committed_kept_and_restored(cloud: str) -> None:
    bucket = gcs_server.make_bucket(cloud)
    saved = train(bucket, 0, saves=3)
    assert saved[0] == 0
    assert committed_steps(cloud, bucket) == touched_steps(cloud, bucket) == set(saved[-2:])
    assert restore_newest(bucket) == saved[-1]
    saved += train(bucket, saved[-1] + 1, saves=1)
    assert committed_steps(cloud, bucket) == set(saved[-2:])


def train_and_restore(bucket: str) -> list[int]:
    saved = train(bucket, 0, saves=3)
    return [*saved, restore_newest(bucket)]


def test_two_processes_save_the_same_steps(server: str) -> None:
    bucket = gcs_server.make_bucket(server)
    first, second = mtt.run_processes(
        train_and_restore, 2, args=[bucket], env=gcs_server.environment(server)
    )
    *saved, restored = first
    assert first == second
    assert restored == saved[-1]
    assert committed_steps(server, bucket) == touched_steps(server, bucket) == set(saved[-2:])


def test_a_missing_bucket_is_an_error_before_training(cloud: str) -> None:
    with pytest.raises(TierUnreadableError, match="cannot be written by process 0") as caught:
        mtc.create_checkpoint_manager(continuous_config("no-such-bucket"), mtt.case_mesh(2, 2))
    assert caught.value.place == "gs://no-such-bucket/run/checkpoints"


class Forbidding(http.server.BaseHTTPRequestHandler):
    """A Cloud Storage that allows nothing."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.dumps({"error": {"code": 403, "message": "no access for you"}}).encode()
        self.send_response(403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_bucket_without_access_is_an_error_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forbidding) as closed:
        threading.Thread(target=closed.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{closed.server_port}"
        for name, value in gcs_server.environment(url).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(TierUnreadableError, match="no access for you"):
            mtc.create_checkpoint_manager(continuous_config("closed"), mtt.case_mesh(2, 2))
        closed.shutdown()
