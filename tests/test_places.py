"""One contract for every place that a share can lie in: the same tests for all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import shutil
import threading
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import gcs_server
import pytest
import tensorstore as ts
from fsspec.implementations.memory import MemoryFileSystem
from shares import write_share

from mtcheckpoint._clock import Deadline
from mtcheckpoint._handshake import files
from mtcheckpoint._reader import tensorstore_context
from mtcheckpoint._shares.backups import Backup, BackupRoot
from mtcheckpoint._shares.contents import read_contents, state_kvstore
from mtcheckpoint._shares.peers import ShareServer
from mtcheckpoint._shares.places import LocalPlace, PeerPlace, Place
from mtcheckpoint._shares.read_ahead import ReadAhead
from mtcheckpoint.errors import ShareError, TierUnreadableError

TOKEN = "a token"
JOB, DIGEST = "job-a", "D" + "7" * 64
SECONDS = 10.0
VALUE = b"spaces and \x00 bytes"


@dataclasses.dataclass(frozen=True)
class Case:
    """A place with a share in it, and how to make the place unreadable."""

    place: Place
    break_it: Callable[[], None]
    tier: str


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with gcs_server.running_server() as url:
        yield url


@pytest.fixture
def share(tmp_path: Path) -> Path:
    folder = write_share(tmp_path / "share", "hello")
    (folder / "mtcheckpoint").mkdir()
    (folder / "mtcheckpoint" / "extras.json").write_bytes(VALUE)
    (folder / "state" / "odd %41 name?#").write_bytes(VALUE)
    return folder


@pytest.fixture(params=["local", "peer", "backup folder", "backup bucket", "backup memory"])
def case(
    request: pytest.FixtureRequest, share: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Case]:
    kind: str = request.param
    with contextlib.ExitStack() as stack:
        if kind == "local":
            yield Case(LocalPlace(share), lambda: lock(share / "mtcheckpoint"), "local")
        elif kind == "peer":
            server = stack.enter_context(serve({"s": share}))
            place = PeerPlace(f"{server.url}/s", TOKEN, SECONDS)
            yield Case(place, stack.close, "peer")
        elif kind == "backup folder":
            place = backup_place(f"{tmp_path}/backups", share)
            yield Case(place, lambda: lock(Path(place.name) / "mtcheckpoint"), "backup")
        elif kind == "backup memory":
            place = backup_place(f"memory://{uuid.uuid4().hex}", share)
            yield Case(place, lambda: refuse_to_read(monkeypatch), "backup")
        else:
            url = request.getfixturevalue("server_url")
            for name, value in gcs_server.environment(url).items():
                monkeypatch.setenv(name, value)
            place = backup_place(f"gs://{gcs_server.make_bucket(url)}", share)
            # Nobody listens there: refused at once, unlike a server that is only slow.
            yield Case(place, lambda: lead_to_nobody(monkeypatch), "backup")


def backup_place(root: str, share: Path) -> Place:
    """The share as one of a backup below `root`."""
    filesystem, path = fsspec.core.url_to_fs(root)
    target = f"{path}/{JOB}/2026-01-02_03-04/{files.data_name(DIGEST)}"
    filesystem.makedirs(target, exist_ok=True)
    for file in share.rglob("*"):
        if file.is_file():
            name = f"{target}/{file.relative_to(share)}"
            filesystem.makedirs(name.rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(name, file.read_bytes())
    backup = Backup(name="2026-01-02_03-04", ranks={1: (0,)}, data=frozenset([DIGEST]))
    place = BackupRoot(root, timeout_secs=SECONDS).place(JOB, backup, DIGEST)
    assert place is not None
    return place


def lock(folder: Path) -> None:
    """Something that cannot be read, also by root: a link to itself."""
    shutil.rmtree(folder)
    folder.symlink_to(folder)


def refuse_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, path: str, *arguments: Any, **options: Any) -> bytes:
        raise PermissionError(path)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refuse)


def lead_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio
    import types

    import gcsfs.retry

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 200)

    monkeypatch.setattr(gcsfs.retry, "asyncio", types.SimpleNamespace(sleep=sleep))
    for name, value in gcs_server.environment("http://127.0.0.1:1").items():
        monkeypatch.setenv(name, value)


@contextlib.contextmanager
def serve(shares: dict[str, Path]) -> Iterator[ShareServer]:
    with ShareServer(shares, token=TOKEN, host="127.0.0.1") as server:
        yield server


# The contract.


def test_a_file_is_read_whole(case: Case) -> None:
    assert case.place.read("mtcheckpoint/extras.json") == VALUE
    assert case.place.read("state/odd %41 name?#") == VALUE
    assert case.place.tier == case.tier
    assert TOKEN not in case.place.name and TOKEN not in repr(case.place)


@pytest.mark.parametrize("file", ["nowhere.json", "nowhere/at/all.json", "_CHECKPOINT_METADATA/x"])
def test_what_is_not_there_is_none(case: Case, file: str) -> None:
    assert case.place.read(file) is None


def test_what_cannot_be_read_is_an_error(case: Case) -> None:
    case.break_it()
    with pytest.raises(TierUnreadableError) as caught:
        case.place.read("mtcheckpoint/extras.json")
    assert caught.value.place
    assert TOKEN not in str(caught.value)


def test_the_arrays_are_opened_and_equal(case: Case, share: Path) -> None:
    found = all_values(state_kvstore(case.place))
    assert found == all_values({"driver": "ocdbt", "base": f"file://{share}/state/"})
    assert found["w/c/0"] == b"hello" * 50


def test_a_folder_is_a_key_value_store(case: Case) -> None:
    store = ts.KvStore.open(case.place.kvstore("mtcheckpoint"), context=context()).result(SECONDS)
    assert store.read("extras.json").result(SECONDS).value == VALUE
    assert store.read("nowhere.json").result(SECONDS).state == "missing"


def all_values(spec: dict[str, Any]) -> dict[str, bytes]:
    store = ts.KvStore.open(spec, context=context()).result(SECONDS)
    keys = [key.decode() for key in store.list().result(SECONDS)]
    return {key: store.read(key).result(SECONDS).value for key in keys}


def context() -> ts.Context:
    return tensorstore_context()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("state/manifest.ocdbt", None, "manifest.ocdbt is not there"),
        ("state/manifest.ocdbt", b"x", "damaged"),
        ("mtcheckpoint/identity.json", b"{", "is not JSON"),
        ("mtcheckpoint/identity.json", b'{"format": 99}', "this version reads 1"),
        ("state/_METADATA", b"[", "is not JSON"),
    ],
)
def test_damaged_shares_say_what_is_wrong(
    share: Path, file: str, content: bytes | None, said: str
) -> None:
    (share / "state" / "_METADATA").write_text('{"tree_metadata": {}}')
    assert read_contents(LocalPlace(share), context()).identity is None
    (share / file).unlink(missing_ok=True)
    if content is not None:
        (share / file).write_bytes(content)
    with pytest.raises(ShareError, match=said) as caught:
        read_contents(LocalPlace(share), context())
    assert caught.value.place == str(share)


# Backups.


def test_a_file_system_without_the_root_is_no_empty_one(tmp_path: Path) -> None:
    with pytest.raises(TierUnreadableError, match="is not there or is no folder"):
        BackupRoot(f"{tmp_path}/nowhere", timeout_secs=SECONDS).names(JOB)
    (tmp_path / "empty").mkdir()
    assert BackupRoot(f"{tmp_path}/empty", timeout_secs=SECONDS).names(JOB) == []


def test_a_file_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierUnreadableError):
        BackupRoot(f"{tmp_path}/file", timeout_secs=SECONDS).names(JOB)


def test_a_bucket_that_is_not_there_is_no_empty_one(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in gcs_server.environment(server_url).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TierUnreadableError):
        BackupRoot("gs://no-such-bucket", timeout_secs=SECONDS).names(JOB)
    bucket = gcs_server.make_bucket(server_url)
    assert BackupRoot(f"gs://{bucket}", timeout_secs=SECONDS).names(JOB) == []
    assert BackupRoot(f"gs://{bucket}/a/prefix", timeout_secs=SECONDS).names(JOB) == []


def test_backups_are_found_newest_first_and_others_left_out(tmp_path: Path) -> None:
    job = tmp_path / JOB
    for name in ("2026-01-02_03-04", "2026-02-01_00-00", "2026-02-01_00-00.tmp", "notes"):
        (job / name).mkdir(parents=True)
    folder = job / "2026-02-01_00-00"
    (folder / files.data_name(DIGEST)).mkdir()
    (folder / f"{JOB}-s5-n0-w0.meta").write_text(DIGEST)
    (folder / f"{JOB}-s5-n1-w0.meta").write_text("D" + "8" * 64)
    (folder / "other-s9-n0-w0.meta").write_text(DIGEST)
    (folder / f"{JOB}-s6-n1-w0.meta").write_text(DIGEST)

    root = BackupRoot(str(tmp_path), timeout_secs=SECONDS)
    assert root.names(JOB) == ["2026-02-01_00-00", "2026-01-02_03-04"]
    newest, older = (root.backup(JOB, name) for name in root.names(JOB))

    assert newest.ranks == {5: (0, 1), 6: (1,)} and not older.ranks
    assert newest.fault(6) == "no .meta of rank 0"
    assert newest.fault(5) is None
    with pytest.raises(ShareError, match=r"job-a-s5-n1-w0\.meta says 'D8"):
        root.digests(JOB, newest, 5)
    (folder / f"{JOB}-s5-n1-w0.meta").write_text(DIGEST)
    assert root.digests(JOB, newest, 5) == {0: DIGEST, 1: DIGEST}


# What a server gives away.


@pytest.fixture
def server(share: Path, tmp_path: Path) -> Iterator[ShareServer]:
    (tmp_path / "secret").write_text("secret")
    (share / "inside").symlink_to(share / "mtcheckpoint" / "extras.json")
    (share / "outside").symlink_to(tmp_path / "secret")
    (share / "outside-folder").symlink_to(tmp_path)
    (share / "loop").symlink_to(share / "loop")
    os.mkfifo(share / "pipe")
    with serve({"s": share}) as server:
        yield server


def get(server: ShareServer, path: str, **headers: str) -> tuple[int, bytes]:
    """Status and body of a raw path, which no client has tidied up."""
    split = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(split.hostname or "", split.port, timeout=SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/s",
        "/s/",
        "/s/state",
        "/s/state/",
        "/other/mtcheckpoint/extras.json",
        "/s/../secret",
        "/s/%2e%2e/secret",
        "/s/..%2fsecret",
        "/s/state/../../secret",
        "/s//etc/passwd",
        "/s/%2Fetc%2Fpasswd",
        "/s/outside",
        "/s/outside-folder/secret",
        "/s/loop",
        "/s/pipe",
        "/s/a%00b",
        "/../s/../secret",
        "/s/" + "a" * 3000,
    ],
)
def test_nothing_but_files_of_the_shares_is_served(server: ShareServer, path: str) -> None:
    status, body = get(server, path)
    assert status in (400, 404)
    assert b"secret" not in body and b"root:" not in body


def test_files_and_links_inside_are_served(server: ShareServer) -> None:
    assert get(server, "/s/mtcheckpoint/extras.json") == (200, VALUE)
    assert get(server, "/s/inside") == (200, VALUE)


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer wrong", TOKEN, "bearer a token", "Basic ä"]
)
def test_without_the_token_there_is_nothing(server: ShareServer, given: str) -> None:
    header = given.encode("utf-8").decode("latin-1")
    assert get(server, "/s/mtcheckpoint/extras.json", Authorization=header)[0] == 401
    assert get(server, "/s/nowhere", Authorization=header)[0] == 401


def test_only_reading_is_allowed(server: ShareServer, share: Path) -> None:
    before = sorted(str(path) for path in share.rglob("*"))
    for method in ("PUT", "POST", "DELETE", "PATCH"):
        request = urllib.request.Request(
            f"{server.url}/s/mtcheckpoint/extras.json",
            data=b"x",
            headers={"Authorization": f"Bearer {TOKEN}"},
            method=method,
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=SECONDS)
        caught.value.close()
        assert caught.value.code == 405
    assert sorted(str(path) for path in share.rglob("*")) == before


def test_ranges_of_a_file(server: ShareServer) -> None:
    path = "/s/mtcheckpoint/extras.json"
    assert get(server, path, Range="bytes=2-5") == (206, VALUE[2:6])
    assert get(server, path, Range="bytes=-3") == (206, VALUE[-3:])
    assert get(server, path, Range=f"bytes={len(VALUE)}-")[0] == 416


def test_many_read_at_once(server: ShareServer, share: Path) -> None:
    big = os.urandom(1 << 20)
    (share / "big").write_bytes(big)
    place = PeerPlace(f"{server.url}/s", TOKEN, 60.0)
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(place.read, ["big", "mtcheckpoint/extras.json", "nowhere"] * 40))
    assert answers == [big, VALUE, None] * 40


def test_a_wrong_token_is_unreadable_and_never_missing(server: ShareServer) -> None:
    place = PeerPlace(f"{server.url}/s", "wrong", SECONDS)
    with pytest.raises(TierUnreadableError, match="answered 401"):
        place.read("nowhere")
    store = ts.KvStore.open(place.kvstore("mtcheckpoint"), context=context()).result(SECONDS)
    with pytest.raises(ValueError, match="401"):
        store.read("extras.json").result(SECONDS)


def test_a_server_stops_with_readers_on_it(share: Path) -> None:
    (share / "big").write_bytes(bytes(8 << 20))
    with serve({"s": share}) as server:
        split = urllib.parse.urlsplit(server.url)
        connection = http.client.HTTPConnection(split.hostname or "", split.port, timeout=SECONDS)
        connection.request("GET", "/s/big", headers={"Authorization": f"Bearer {TOKEN}"})
        assert connection.getresponse().read(10) == bytes(10)
    connection.close()
    with pytest.raises(TierUnreadableError, match="cannot be reached"):
        PeerPlace(f"{server.url}/s", TOKEN, SECONDS).read("big")


class _AnswersTogether:
    """A place that answers when everybody has asked, as one that is far away does at its best."""

    tier = "backup"
    name = "far away"

    def __init__(self, readers: int) -> None:
        self._together = threading.Barrier(readers)

    def read(self, file: str) -> bytes | None:
        self._together.wait(10.0)
        return None if file == "gone" else file.encode()

    def size(self, file: str) -> int | None:
        raise AssertionError

    kvstore = size


def test_small_files_of_a_far_share_are_on_their_way_together() -> None:
    place = _AnswersTogether(3)
    ahead = ReadAhead(place, Deadline.after(10.0))
    ahead.ask_for(["a", "b", "gone"])
    assert [ahead.read(file) for file in ("gone", "a", "b", "a")] == [None, b"a", b"b", b"a"]


def test_a_far_share_that_does_not_answer_is_unreadable_and_not_waited_for_longer() -> None:
    place = _AnswersTogether(2)
    ahead = ReadAhead(place, Deadline.after(0.05))
    ahead.ask_for(["a"])
    with pytest.raises(TierUnreadableError, match=r"far away cannot be read: no answer in"):
        ahead.read("a")
    with pytest.raises(TierUnreadableError):
        ahead.begin(lambda: threading.Event().wait(10.0))()
