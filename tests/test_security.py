"""What comes from outside does no harm: it is refused or ignored, in bounded time and memory."""

from __future__ import annotations

import ast
import contextlib
import http.client
import http.server
import io
import json
import logging
import os
import shutil
import socket
import threading
import traceback
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import gcs_server
import pytest
import test_restoring_peers
from handshake_peer import ThreadedReplicator
from restoring_clusters import run_job
from restoring_jobs import environment_of, folder, rank, together
from shares import write_share

import mtcheckpoint
from mtcheckpoint import cli
from mtcheckpoint._clock import SystemClock
from mtcheckpoint._handshake import files
from mtcheckpoint._handshake.client import run_handshake
from mtcheckpoint._reader import tensorstore_context
from mtcheckpoint._replicator.backup import BackupStore
from mtcheckpoint._replicator.choice import MetaEntry
from mtcheckpoint._replicator.settings import parse_settings
from mtcheckpoint._replicator.volume import Volume as ReplicatorVolume
from mtcheckpoint._shares import backups, peers, places
from mtcheckpoint._shares.backups import Backup, BackupRoot
from mtcheckpoint._shares.contents import read_contents, read_extras
from mtcheckpoint._shares.identity import (
    EXTRAS_FILE,
    IDENTITY_FILE,
    Identity,
    identity_from_json,
    identity_to_json,
)
from mtcheckpoint._shares.inventory import jobs_in, take_inventory
from mtcheckpoint._shares.layout import Layout
from mtcheckpoint._shares.peers import ShareServer
from mtcheckpoint._shares.places import LocalPlace, PeerPlace, Place
from mtcheckpoint._shares.seal import SEAL_FILE, Verify, digest_of, seal_from_json
from mtcheckpoint.errors import (
    ConfigError,
    MarkerError,
    MtCheckpointError,
    ReplicatorConfigError,
    ShareError,
    TierUnreadableError,
)
from mtcheckpoint.testing import ram_disk

TOKEN = "the-token-of-this-restore"
JOB, DIGEST, DATE = "job-a", "D" + "7" * 64, "2026-01-02_03-04"
SECONDS = 20.0
DEEP = b"[" * 200_000


@pytest.fixture
def share(volume_root: Path) -> Path:
    """A share that Orbax's own files make whole; of one array, ``w``."""
    found = write_share(volume_root / "7", "hello")
    (found / "state" / "_METADATA").write_text('{"tree_metadata": {}}')
    (found / "mtcheckpoint").mkdir()
    identity = Identity(job=JOB, step=7, save_id="save-7", node_rank=0, nodes=2)
    (found / IDENTITY_FILE).write_text(identity_to_json(identity))
    return found


def in_time(run: Callable[[], Any]) -> Any:
    """What `run` returns or raises; fails when it hangs."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(run).result(timeout=SECONDS)
    finally:
        pool.shutdown(wait=False)


# The server of shares.


@pytest.fixture
def server(share: Path) -> Iterator[ShareServer]:
    with ShareServer({"s": share}, token=TOKEN, host="127.0.0.1") as server:
        yield server


def connected(server: ShareServer) -> http.client.HTTPConnection:
    split = urllib.parse.urlsplit(server.url)
    return http.client.HTTPConnection(split.hostname or "", split.port, timeout=SECONDS)


def status(
    server: ShareServer, method: str = "GET", path: str = f"/s/{IDENTITY_FILE}", **headers: str
) -> int:
    given = {"Authorization": f"Bearer {TOKEN}", **headers}
    with contextlib.closing(connected(server)) as connection:
        connection.request(method, path, headers=given)
        return connection.getresponse().status


def test_only_get_and_head_are_answered(server: ShareServer) -> None:
    assert status(server) == status(server, "HEAD") == 200
    for method in ("PUT", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "NONSENSE"):
        assert status(server, method) in (400, 405)


@pytest.mark.parametrize(
    "path",
    [
        "/s/%252e%252e/7/state/_METADATA",
        "/s/..%5c..%5cetc/passwd",
        "/s/%c0%ae%c0%ae/%c0%ae%c0%ae/etc/passwd",
        "/s/./../../etc/passwd",
        "/%73/..%2f..%2fetc%2fpasswd",
        "/s/file:///etc/passwd",
        "/s/mtcheckpoint/identity.json%00.txt",
        "/s/" + "a/" * 2000,
        "/s/" + "%2e%2e%2f" * 300 + "etc/passwd",
        "//etc/passwd",
        "/s?file=/etc/passwd",
    ],
)
def test_paths_out_of_a_share_lead_nowhere(server: ShareServer, path: str) -> None:
    assert status(server, path=path) in (400, 404)


def test_a_token_that_is_no_text_is_refused(server: ShareServer) -> None:
    for token in (b"\xff\xfe", b"Bearer \xff", b"\x80" * 100):
        with contextlib.closing(connected(server)) as connection:
            connection.putrequest("GET", f"/s/{IDENTITY_FILE}")
            connection.putheader("Authorization", token)
            connection.endheaders()
            assert connection.getresponse().status == 401


def test_headers_and_lines_are_limited(server: ShareServer) -> None:
    assert status(server, path="/s/" + "a" * 100_000) in (400, 414)
    assert status(server, Filler="a" * 100_000) in (400, 431)
    assert status(server) == 200


def test_connections_are_limited(share: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_MOST_CONNECTIONS", 16)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ShareServer({"s": share}, token=TOKEN, host="127.0.0.1"))
        for _ in range(16):
            connection = stack.enter_context(contextlib.closing(connected(server)))
            # Without the token, too, a connection counts.
            connection.request("GET", "/s/x")
            connection.getresponse().read()
        with pytest.raises((OSError, http.client.HTTPException)):
            status(server)
        connection.close()
        place = PeerPlace(f"{server.url}/s", TOKEN, SECONDS)

        def answered() -> bool | None:
            with contextlib.suppress(TierUnreadableError):
                return place.read(IDENTITY_FILE) is not None
            return None

        from mtcheckpoint._clock import Deadline, wait_for

        assert wait_for(answered, Deadline.after(SECONDS), "a free connection")


def throw(raw: socket.socket, garbage: bytes) -> None:
    with contextlib.suppress(OSError):
        raw.sendall(garbage)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(65536):
            pass


def test_garbage_instead_of_http(server: ShareServer) -> None:
    split = urllib.parse.urlsplit(server.url)
    for garbage in (b"\0" * 100_000, b"GET\r\n\r\n", b"\x16\x03\x01" * 50, b"A" * (1 << 20)):
        with socket.create_connection((split.hostname, split.port), timeout=SECONDS) as raw:
            throw(raw, garbage)
    assert status(server) == 200


# Peers that are not what they should be.


@contextlib.contextmanager
def answering(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_token_goes_to_no_third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither after a redirection nor through a proxy."""
    seen: list[str | None] = []

    def note(handler: http.server.BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers["Authorization"])
        handler.send_response(200)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with answering(note) as other:

        def redirect(handler: http.server.BaseHTTPRequestHandler) -> None:
            handler.send_response(302)
            handler.send_header("Location", f"{other}/s/x")
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        monkeypatch.setenv("http_proxy", other)
        with answering(redirect) as peer, pytest.raises(TierUnreadableError, match="302") as caught:
            PeerPlace(f"{peer}/s", TOKEN, SECONDS).read("x")
    assert seen == []
    assert TOKEN not in "".join(traceback.format_exception(caught.value))


def test_a_peer_that_promises_too_much() -> None:
    def promise(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(1 << 50))
        handler.end_headers()

    with answering(promise) as peer, pytest.raises(ShareError, match="too large"):
        in_time(lambda: PeerPlace(f"{peer}/s", TOKEN, SECONDS).read("x"))


# The token.


def test_the_token_is_nowhere_to_be_seen() -> None:
    """A whole restore from peers at the level DEBUG, and those that fail."""
    with ram_disk() as root:
        found = run_job(restore_and_listen, 2, str(root))
    for process in found:
        assert process["tokens"] > 0 and process["logged"] > 1000
        assert process["leaks"] == []
        assert [end.get("error") is None for end in process["ends"]] == [True, False, False]


def restore_and_listen(root: str) -> dict[str, Any]:
    tokens: list[str] = []

    class Listening(test_restoring_peers.FaultyServer):
        def __init__(self, shares: Any, *, token: str, host: str) -> None:
            super().__init__(shares, token=token, host=host)
            tokens.append(token)
            texts.append(repr(self))

    test_restoring_peers.FaultyServer = Listening  # type: ignore[misc]
    texts: list[str] = []
    log = io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(log))
    logging.getLogger().setLevel(logging.DEBUG)
    test_restoring_peers.save_halves(f"{root}/saved")
    ends = []
    for fault in ("no fault", "refuses", "sends half"):
        place = f"{root}/{fault.replace(' ', '-')}"
        shutil.copytree(folder(f"{root}/saved"), folder(place))
        together(fault)
        ends.append(test_restoring_peers.restore_whole(place, fault))
        together(f"after {fault}")
    texts += [log.getvalue(), json.dumps(ends)]
    made = [PeerPlace(f"http://{rank()}", token) for token in tokens]
    texts += [repr(place) + str(place) + place.name for place in made]
    leaks = [text[:200] for text in texts for token in tokens if token in text]
    return {"tokens": len(tokens), "logged": len(log.getvalue()), "leaks": leaks, "ends": ends}


# Small files that are not small, or no files.


def place_of(kind: str, share: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    if kind == "local":
        return LocalPlace(share)
    url = f"memory://{uuid.uuid4().hex}" if kind == "memory" else ""
    if kind == "folder":
        url = str(root / "backups")
    if kind == "bucket":
        url = f"gs://{gcs_server.make_bucket(os.environ['STORAGE_EMULATOR_HOST'])}"
    filesystem, path = fsspec.core.url_to_fs(url)
    target = f"{path}/{JOB}/{DATE}/{files.data_name(DIGEST)}"
    for file in share.rglob("*"):
        if file.is_file():
            name = f"{target}/{file.relative_to(share)}"
            filesystem.makedirs(name.rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(name, file.read_bytes())
    backup = Backup(name=DATE, ranks={7: (0,)}, data=frozenset([DIGEST]))
    return BackupRoot(url, timeout_secs=SECONDS).place(JOB, backup, DIGEST)


@pytest.mark.parametrize("kind", ["local", "folder", "memory", "bucket"])
def test_a_small_file_has_a_limit(
    share: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (share / "just").write_bytes(bytes(100_000))
    (share / "over").write_bytes(bytes(100_001))
    (share / "empty").touch()
    with contextlib.ExitStack() as stack:
        if kind == "bucket":
            url = stack.enter_context(gcs_server.running_server())
            for name, value in environment_of(url).items():
                monkeypatch.setenv(name, value)
        place = place_of(kind, share, tmp_path, monkeypatch)
        for module in (places, backups):
            monkeypatch.setattr(module, "SMALL_FILE_BYTES", 100_000)
        monkeypatch.setattr(places, "read_small_file", _with_limit(places.read_small_file, 100_000))
        assert place.read("just") == bytes(100_000)
        assert place.read("empty") == b""
        with pytest.raises(ShareError, match="too large"):
            place.read("over")


def _with_limit(read: Any, limit_bytes: int) -> Any:
    return lambda path: read(path, limit_bytes=limit_bytes)


def test_a_sparse_file_of_a_terabyte_is_not_read(share: Path) -> None:
    (share / IDENTITY_FILE).unlink()
    with open(share / IDENTITY_FILE, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ShareError, match="too large"):
        read_contents(LocalPlace(share), tensorstore_context())
    assert take_inventory(share.parent, JOB).shares == ()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [pipe, link_to_a_device, Path.mkdir], ids=["pipe", "zeros", "dir"])
@pytest.mark.parametrize("file", [IDENTITY_FILE, SEAL_FILE, "state/_METADATA"])
def test_what_is_no_file_is_not_waited_for(
    share: Path, capsys: pytest.CaptureFixture[str], file: str, make: Callable[[Path], None]
) -> None:
    (share / file).unlink(missing_ok=True)
    make(share / file)
    verify: Verify = "full" if file == SEAL_FILE else "off"
    with pytest.raises(ShareError, match="is not a file"):
        in_time(lambda: read_contents(LocalPlace(share), tensorstore_context(), verify=verify))
    in_time(lambda: take_inventory(share.parent, JOB))
    assert in_time(lambda: cli.main(["ls", str(share.parent)])) == 0
    assert in_time(lambda: cli.main(["verify", str(share.parent)])) == 1
    capsys.readouterr()


# Identities, seals, extras and Orbax's files.

HOSTILE_NUMBERS: list[dict[str, Any]] = [
    {"step": -1},
    {"step": 1 << 63},
    {"step": True},
    {"step": float("nan")},
    {"step": float("inf")},
    {"step": "7"},
    {"nodes": 10**12},
    {"nodes": 0},
    {"nodes": 2.0},
    {"node_rank": -1},
    {"node_rank": 2},
    {"job": None},
    {"job": ["job-a"]},
    {"save_id": 7},
    {"kinds": []},
    {"kinds": {"w": {"deep": 1}}},
    {"format": 2},
]


@pytest.mark.parametrize("change", HOSTILE_NUMBERS, ids=str)
def test_identities_that_cannot_be(
    share: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    content = json.loads((share / IDENTITY_FILE).read_text())
    (share / IDENTITY_FILE).write_text(json.dumps({**content, **change}))
    with pytest.raises(ShareError, match=r"identity\.json"):
        identity_from_json((share / IDENTITY_FILE).read_bytes(), "here")
    found = in_time(lambda: take_inventory(share.parent, JOB))
    assert found.shares == () and len(found.damaged) <= 1
    assert in_time(lambda: cli.main(["ls", "--json", str(share.parent)])) == 0
    capsys.readouterr()


def test_keys_that_come_twice_are_no_two_identities(share: Path) -> None:
    text = (share / IDENTITY_FILE).read_text().replace('"step": 7', '"step": 9, "step": 7')
    assert identity_from_json(text, "here").step == 7


SEAL: dict[str, Any] = {
    "format": 1,
    "algorithm": "xxh3_128",
    "step": 7,
    "save_id": "save-7",
    "leaves": {"w": [[4], "float32", [2]]},
    "chunks": {"w": {"0": [8, "0" * 32], "1": [8, "0" * 32]}},
    "files": {"state/_METADATA": [10, None]},
}


def sealed(**changes: Any) -> bytes:
    text = json.dumps({**SEAL, **changes})
    return json.dumps({"seal": text, "checksum": digest_of(text.encode())}).encode()


def test_the_seal_as_it_should_be_is_read() -> None:
    assert seal_from_json(sealed(), "here").step == 7


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../../etc/passwd": [10, None]}},
        {"files": {"/etc/passwd": [10, "0" * 32]}},
        {"files": {"state/../../x": [10, None]}},
        {"files": {"a\0b": [10, None]}},
        {"files": {"state/_METADATA": [-1, None]}},
        {"files": {"state/_METADATA": 10}},
        {"files": [["state/_METADATA", 10]]},
        {"chunks": {"../../x": {"0": [8, ""]}}},
        {"chunks": {"w": {"0/0": [8, ""]}}},
        {"chunks": {"w": {"-1": [8, ""]}}},
        {"chunks": {"w": {"0": [float("inf"), ""]}}},
        {"chunks": {"w": {"0": [float("nan"), ""]}}},
        {"chunks": {"w": {"zero": [8, ""]}}},
        {"chunks": {"w": {"0": [-8, ""]}}},
        {"leaves": {"w": [[4], "float32", [0]]}},
        {"leaves": {"w": [[-4], "float32", [2]]}},
        {"leaves": {"w": [["4"], "float32", [2]]}},
        {"leaves": {"w": [[4, 4], "float32", [2]]}},
        {"leaves": None},
        {"step": None},
        {"step": float("inf")},
        {"algorithm": "none"},
        {"format": 2},
    ],
    ids=str,
)
def test_seals_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(ShareError, match=r"seal\.json is damaged"):
        seal_from_json(sealed(**change), "here")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        DEEP,
        b'{"seal": ' + DEEP,
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b'{"seal": {}, "checksum": ""}',
        b'{"seal": "\\ud800", "checksum": ""}',
        json.dumps({"seal": DEEP.decode(), "checksum": digest_of(DEEP)}).encode(),
    ],
    ids=["empty", "deep", "deep inside", "binary", "null", "list", "object", "surrogate", "nested"],
)
def test_texts_that_are_no_seal(text: bytes) -> None:
    with pytest.raises(ShareError, match=r"seal\.json is damaged"):
        seal_from_json(text, "here")


def test_a_huge_chunk_is_not_made_room_for(share: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is sealed as a petabyte, and nothing of it is there."""
    change = {"leaves": {"w": [[1 << 48], "float32", [1 << 48]]}, "files": {}}
    (share / SEAL_FILE).write_bytes(sealed(chunks={"w": {"0": [1 << 50, "0" * 32]}}, **change))
    assert in_time(lambda: cli.main(["verify", "--json", str(share.parent)])) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["state"] == "bad"


SMALL_FILES = (
    "state/_METADATA",
    "state/_sharding",
    "state/_strings.json",
    "mtcheckpoint/shardings.json",
    "process_metadata/global_process_metadata.json",
    IDENTITY_FILE,
)


@pytest.mark.parametrize("file", SMALL_FILES)
@pytest.mark.parametrize(
    "content",
    [DEEP, b"\xff\x00", b'"text"', b"7", b"NaN", b'[[{"a": 1}]]', b'{"a": [[]]}'],
    ids=len,
)
def test_files_that_are_not_what_they_should_be(share: Path, file: str, content: bytes) -> None:
    (share / file).parent.mkdir(exist_ok=True)
    (share / file).write_bytes(content)
    with contextlib.suppress(ShareError):  # and nothing else
        found = read_contents(LocalPlace(share), tensorstore_context(), verify="off")
        assert found.leaves == {}
    in_time(lambda: take_inventory(share.parent, JOB))


def leaf(*keys: str, **value: Any) -> dict[str, Any]:
    return {
        "key_metadata": [{"key": key, "key_type": 2} for key in keys],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, **value},
    }


@pytest.mark.parametrize(
    "entry",
    [
        leaf("..", "..", "x"),
        leaf("../../x"),
        leaf("/etc/passwd"),
        leaf("w"),
        {"key_metadata": [{"key": "x", "key_type": 1}], "value_metadata": {}},
        {"key_metadata": [{"key": 10**400, "key_type": 1}], "value_metadata": {"value_type": "x"}},
        {"key_metadata": None},
        [],
    ],
    ids=lambda entry: str(entry)[:60],
)
def test_leaves_that_lead_out_are_no_arrays(share: Path, entry: Any) -> None:
    """`w` itself is stored without a shape."""
    (share / "state" / "_METADATA").write_text(json.dumps({"tree_metadata": {"x": entry}}))
    with pytest.raises(ShareError):
        read_contents(LocalPlace(share), tensorstore_context(), verify="off")


@pytest.mark.parametrize(
    "text",
    [DEEP, b"{}", b'["x"]', b"[null]", b'[{"__bytes__": 7}]', b'[{"a": {"__bytes__": "?"}}]'],
    ids=len,
)
def test_extras_that_are_none(share: Path, text: bytes) -> None:
    contents = read_contents(LocalPlace(share), tensorstore_context(), verify="off")
    (share / EXTRAS_FILE).write_bytes(text)
    with pytest.raises(ShareError, match=r"extras\.json"):
        read_extras(contents)


@pytest.mark.parametrize(
    "sharding",
    [
        {"sharding_type": "NamedSharding"},
        {"sharding_type": "NamedSharding", "device_mesh": {"mesh": [7, "x"]}},
        {
            "sharding_type": "NamedSharding",
            "axis_names": ["x"],
            "shape": [10**9],
            "partition_spec": [["x"]],
            "device_mesh": {"mesh": [0]},
        },
        {
            "sharding_type": "NamedSharding",
            "axis_names": ["x"],
            "shape": [1],
            "partition_spec": [["y"]],
            "device_mesh": {"mesh": [0]},
        },
    ],
    ids=["empty", "devices", "shape", "axis"],
)
def test_shardings_that_make_no_sense_tell_nothing(sharding: dict[str, Any]) -> None:
    assert Layout([[0]], [0, 1]).ranks_of(sharding, (0,)) == {0, 1}


# Names and contents in a volume and a backup.


def test_numbers_in_names_are_bounded() -> None:
    assert files.parse_share_name(f"{JOB}-s7-n0-w0.meta", "meta") is not None
    for name in (
        f"{JOB}-s7-n{'9' * 12}-w0.meta",
        f"{JOB}-s{'9' * 100}-n0-w0.meta",
        f"{JOB}-s7-n-1-w0.meta",
        f"{JOB}-s7-n٣-w0.meta",
    ):
        assert files.parse_share_name(name, "meta") is None


@pytest.mark.parametrize(
    "content",
    [b"../../etc", b"/etc", b"", b"\xff" * 64, b"D" * 65, DIGEST.encode() + b"/..", bytes(1 << 20)],
    ids=len,
)
def test_metas_that_name_no_data(
    share: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    volume = share.parent
    (volume / f"{JOB}-s8-n0-w0.meta").write_bytes(content)
    found = take_inventory(volume, JOB)
    # What names no data names nothing, but it is there.
    assert found.metas in ((), ((8, 0, ""),)) and [held.step for held in found.shares] == [7]
    assert jobs_in(volume) == {JOB}
    dated = volume / "backups" / JOB / DATE
    dated.mkdir(parents=True)
    (dated / f"{JOB}-s8-n0-w0.meta").write_bytes(content)
    root = BackupRoot(str(volume / "backups"), timeout_secs=SECONDS)
    with pytest.raises(ShareError, match="there is no such data"):
        root.digests(JOB, root.backup(JOB, DATE), 8)
    assert cli.main(["ls", str(volume / "backups")]) == 0
    capsys.readouterr()


def sparse_terabyte(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    "make",
    [sparse_terabyte, pipe, link_to_a_device, Path.mkdir],
    ids=["huge", "pipe", "zeros", "dir"],
)
def test_a_replicator_takes_no_meta_that_is_none(
    volume_root: Path, make: Callable[[Path], None]
) -> None:
    volume = ReplicatorVolume(volume_root)
    name = files.ShareName(job=JOB, step=8, node_rank=0).meta
    make(volume_root / name)
    assert in_time(lambda: volume.holdings(JOB)).metas == (
        MetaEntry(step=8, node_rank=0, digest=""),
    )
    in_time(lambda: volume.collect_garbage(JOB, keep_steps=[8]))
    make(volume_root / files.REPLICATOR_YAML)
    with pytest.raises(ReplicatorConfigError, match="should be a file"):
        in_time(volume.read_yaml)


def test_a_huge_meta_of_a_backup_is_not_read(tmp_path: Path) -> None:
    dated = tmp_path / JOB / DATE
    dated.mkdir(parents=True)
    sparse_terabyte(dated / files.ShareName(job=JOB, step=8, node_rank=0).meta)
    sparse_terabyte(tmp_path / JOB / files.FORCED_RESTORE_FILE)
    store = BackupStore(str(tmp_path), SystemClock())
    metas = in_time(lambda: store.holdings(JOB, DATE)).metas
    assert metas == (MetaEntry(step=8, node_rank=0, digest=""),)
    with pytest.raises(OSError, match="are no name of a backup"):
        in_time(lambda: store.forced_folder(JOB))


@pytest.mark.parametrize(
    "target", ["/etc", "../..", ".", "/proc/self/root", "nowhere", "/dev/null"]
)
def test_markers_that_lead_elsewhere(volume_root: Path, target: str) -> None:
    def answer(volume: Path) -> None:
        (volume / f"{JOB}-s7-n0-w0.restore").symlink_to(target)

    settings = {"job-name": JOB, "framework": "orbax", "node-rank": 0, "nodes": 1}
    with ThreadedReplicator(volume_root, answer), pytest.raises(MarkerError, match=r"-s7-n0-w0"):
        run_handshake(volume_root, settings, job=JOB, node_rank=0, timeout_secs=SECONDS)


@pytest.mark.parametrize(
    "content", [DEEP, b"\xff\xfe", b"a: &a [*a]", b"!!python/object/apply:os.getcwd []", b"- 1"]
)
def test_prerestores_that_make_no_sense_are_ignored(volume_root: Path, content: bytes) -> None:
    def answer(volume: Path) -> None:
        (volume / files.PRERESTORE_FILE).write_bytes(content)
        (volume / f"{JOB}-s0-n0-w0.restore").touch()

    settings = {"job-name": JOB, "framework": "orbax", "node-rank": 0, "nodes": 1}
    with ThreadedReplicator(volume_root, answer):
        found = run_handshake(volume_root, settings, job=JOB, node_rank=0, timeout_secs=SECONDS)
    assert (found.step, found.restore_backup) == (None, None)


@pytest.mark.parametrize(
    "text",
    [
        DEEP.decode(),
        "job-name: !!python/object/apply:os.system ['true']",
        "a: &a [*a]",
        "job-name: ../../x\nframework: orbax\nnode-rank: 0\nnodes: 1",
        "job-name: job-a\nframework: orbax\nnode-rank: 0\nnodes: 1\npeer-ranks: [99999999]",
        "job-name: job-a\nframework: orbax\nnode-rank: .nan\nnodes: 1",
        "job-name: job-a\nframework: orbax\nnode-rank: -1\nnodes: 1",
    ],
    ids=["deep", "object", "cycle", "path", "peer", "nan", "negative"],
)
def test_yamls_that_no_replicator_should_take(text: str) -> None:
    with pytest.raises(ReplicatorConfigError):
        in_time(lambda: parse_settings(text))


@pytest.mark.parametrize(
    "name",
    ["../x", "a/b", "a\nb", "a\0b", "$HOME", "-a", "a" * 300, "007", "on", "..", "a..b", "A"],
)
def test_job_names_are_never_paths(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="run_name"):
        mtcheckpoint.CheckpointConfig(
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=str(tmp_path),
            local_checkpoint_period=1,
            multi_tier_checkpointing_backup_interval_minutes=30,
            run_name=name,
        )


# Nothing that runs what it reads.


def test_nothing_is_unpickled_or_evaluated() -> None:
    forbidden_imports = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    forbidden_calls = {"eval", "exec", "unsafe_load", "full_load", "yaml.load"}
    for path in Path(mtcheckpoint.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = {getattr(alias, "name", "") for alias in getattr(node, "names", ())}
            named.add(getattr(node, "module", None) or "")
            assert not {name.partition(".")[0] for name in named} & forbidden_imports, path
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in forbidden_calls, path
                assert not any(keyword.arg == "allow_pickle" for keyword in node.keywords), path


def test_all_that_hostile_files_raise_is_ours() -> None:
    assert issubclass(ShareError, MtCheckpointError) and issubclass(MarkerError, MtCheckpointError)
