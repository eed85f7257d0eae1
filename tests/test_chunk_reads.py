"""Chunks straight from files: side by side in one read, and no byte that is not the sealed one."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from mtcheckpoint._chunk_reads import ChunkRead, ReadPool, StateFiles, runs_of
from mtcheckpoint._clock import Deadline
from mtcheckpoint._host_array import HostArray
from mtcheckpoint._ocdbt_index import Stored
from mtcheckpoint._shares import ocdbt
from mtcheckpoint._shares.array_index import read_index
from mtcheckpoint._shares.contents import Leaf, ShareContents
from mtcheckpoint._shares.ocdbt import MANIFEST_FILE, index_of
from mtcheckpoint._shares.peer_stream import PeerStream
from mtcheckpoint._shares.places import LocalPlace, PeerPlace
from mtcheckpoint._shares.seal import Seal
from mtcheckpoint._shares.write_plan import plan_writes
from mtcheckpoint._shares.writing import write_arrays
from mtcheckpoint.errors import ShareError

CONTEXT = ts.Context()
VALUES = {f"w{i}": np.arange(i, i + 6, dtype=np.float32).reshape(2, 3) for i in range(5)}


def deadline() -> Deadline:
    return Deadline.after(20.0)


def share_of(root: Path, values: dict[str, np.ndarray] = VALUES) -> ShareContents:
    """A share with these arrays, one chunk each, sealed."""
    (root / "state").mkdir(parents=True)
    arrays = {name: HostArray.of(value) for name, value in values.items()}
    forms = {name: array.form for name, array in arrays.items()}
    plan = plan_writes(forms, threads=1, file_bytes=1 << 30)
    written = write_arrays(root / "state", plan, arrays)
    index = read_index(LocalPlace(root), CONTEXT, deadline())
    seal = Seal(step=1, save_id="a", leaves=plan.leaves, chunks=written.chunks, files={})
    leaves = {
        name: Leaf(
            name=name, path=(name,), value_type="jax.Array", kind=None, shape=v.shape, is_plain=True
        )
        for name, v in values.items()
    }
    return ShareContents(
        place=LocalPlace(root),
        identity=None,
        leaves=leaves,
        chunks=index.chunks,
        strings={},
        empty={},
        process_devices=(),
        seal=seal,
    )


def reads_of(share: ShareContents) -> list[ChunkRead]:
    return [
        ChunkRead(
            owner=0,
            name=name,
            chunk=(0, 0),
            box=((0, 2), (0, 3)),
            share=share,
            dtype=np.dtype(np.float32),
            whole=np.zeros((2, 3), np.float32),
        )
        for name in share.leaves
    ]


def read_all(reads: list[ChunkRead]) -> int:
    """Reads; returns how many runs it took."""
    files = StateFiles(
        {read.share.place: read.share for read in reads}.values(),
        context=CONTEXT,
        deadline=deadline(),
    )
    with ReadPool(2, 1 << 20) as pool:
        return len(list(pool.done(runs_of(reads, files))))


@pytest.mark.parametrize("node_bytes", [1 << 10, 1 << 12, 8 << 20])
def test_an_index_of_many_nodes_and_versions_is_read_to_its_end(
    volume_root: Path, node_bytes: int
) -> None:
    """Nodes below the root leave out what all their keys begin with."""
    base = f"file://{volume_root}/share/state/"
    config = {"max_inline_value_bytes": 16, "max_decoded_node_bytes": node_bytes}
    files = {"driver": "ocdbt", "base": base, "config": config}
    names = [f"params.layer_{n}.{part}" for n in range(60) for part in ("kernel", "bias")]
    for name in names:
        spec = {"driver": "zarr3", "kvstore": {**files, "path": f"{name}/"}}
        grid = {"name": "regular", "configuration": {"chunk_shape": [4]}}
        spec["metadata"] = {"shape": [12], "data_type": "int32", "chunk_grid": grid}
        array = ts.open(spec, create=True).result()
        array[...] = np.arange(1, 13, dtype=np.int32)
    index = read_index(LocalPlace(volume_root / "share"), CONTEXT, deadline())
    assert sorted(index.metadata) == sorted(names)
    assert all(json.loads(text)["shape"] == [12] for text in index.metadata.values())
    assert {tuple(sorted(chunks)) for chunks in index.chunks.values()} == {((0,), (1,), (2,))}


def test_neighbours_come_in_one_read(volume_root: Path) -> None:
    reads = reads_of(share_of(volume_root / "a"))
    assert read_all(reads) == 1
    for read in reads:
        assert np.array_equal(read.whole, VALUES[read.name])
    apart = reads_of(share_of(volume_root / "b"))
    assert read_all([apart[0], apart[2], apart[3]]) == 2


def test_neighbours_in_each_of_several_shares_come_in_one_read(volume_root: Path) -> None:
    """The chunks of a leaf lie in several shares: of each leaf, one follows the other."""
    shares = [share_of(volume_root / name) for name in ("a", "b", "c")]
    reads = [read for of_leaf in zip(*map(reads_of, shares), strict=True) for read in of_leaf]
    assert read_all(reads) == 3
    for read in reads:
        assert np.array_equal(read.whole, VALUES[read.name])


def test_parts_are_copied_out_of_a_chunk(volume_root: Path) -> None:
    (read, *_) = reads_of(share_of(volume_root / "a"))
    column, rest = np.zeros((2, 1), np.float32), np.zeros((1, 2), np.float32)
    copies = ((column, (slice(0, 2), slice(1, 2))), (rest, (slice(1, 2), slice(0, 2))))
    read_all([dataclasses.replace(read, whole=None, copies=copies)])
    assert np.array_equal(column, VALUES["w0"][:, 1:2])
    assert np.array_equal(rest, VALUES["w0"][1:, :2])


def test_every_bit_is_looked_at(volume_root: Path) -> None:
    share = share_of(volume_root / "a", {"w": VALUES["w0"]})
    stored = share.chunks["w"][0, 0]
    assert isinstance(stored, Stored)
    file = volume_root / "a" / "state" / stored.file
    content = file.read_bytes()
    for bit in range(8 * len(content)):
        harmed = bytearray(content)
        harmed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(harmed)
        with pytest.raises(ShareError, match=r"leaf 'w' is not what was saved"):
            read_all(reads_of(share))
        # Also where only one element of it is wanted.
        copies = ((np.zeros((1, 1), np.float32), (slice(0, 1), slice(0, 1))),)
        parts = [dataclasses.replace(r, whole=None, copies=copies) for r in reads_of(share)]
        with pytest.raises(ShareError, match=r"leaf 'w' is not what was saved"):
            read_all(parts)
        assert not copies[0][0].any(), "nothing of it was passed on"
    file.write_bytes(content[:-1])
    with pytest.raises(
        ShareError, match=re.escape(f"{share.place.name}: leaf 'w': cannot be read")
    ):
        read_all(reads_of(share))
    file.unlink()
    with pytest.raises(ShareError, match="No such file"):
        read_all(reads_of(share))


def test_a_pipe_in_the_place_of_a_data_file_is_not_waited_for(volume_root: Path) -> None:
    share = share_of(volume_root / "a", {"w": VALUES["w0"]})
    stored = share.chunks["w"][0, 0]
    assert isinstance(stored, Stored)
    file = volume_root / "a" / "state" / stored.file
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ShareError, match="is not a file"):
        read_all(reads_of(share))


def test_a_chunk_of_another_size_is_refused_before_it_is_read(volume_root: Path) -> None:
    share = share_of(volume_root / "a", {"w": VALUES["w0"]})
    (read,) = reads_of(share)
    larger = dataclasses.replace(read, box=((0, 1 << 40), (0, 3)), whole=None)
    with pytest.raises(ShareError, match=r"chunk \(0, 0\) has 24 bytes, expected"):
        read_all([larger])


def test_a_chunk_that_lies_in_the_index(volume_root: Path) -> None:
    share = share_of(volume_root / "a", {"w": VALUES["w0"]})
    inline = dataclasses.replace(share, chunks={"w": {(0, 0): VALUES["w0"].tobytes()}})
    (read,) = reads_of(inline)
    read_all([read])
    assert np.array_equal(read.whole, VALUES["w0"])


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "d/../../secret", "d/\0"])
def test_an_index_that_points_out_of_its_share(file: str, volume_root: Path) -> None:
    state = volume_root / "share" / "state"
    (state / "d").mkdir(parents=True)
    made = index_of(
        {"w/zarr.json": b"{}", "w/c/0": Stored(file=file, offset=0, length=4)},
        node_file="d/index",
        database_id="0" * 32,
    )
    (state / made.node_file).write_bytes(made.nodes)
    (state / MANIFEST_FILE).write_bytes(made.manifest(1))
    with pytest.raises(ValueError, match=r"points out of it|[Ii]nvalid|contains"):
        read_index(LocalPlace(volume_root / "share"), CONTEXT, deadline())


def test_an_index_of_several_nodes_is_read_whole(
    volume_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocdbt, "_TARGET_NODE_BYTES", 200)
    share = share_of(volume_root / "a")
    assert {name: list(chunks) for name, chunks in share.chunks.items()} == {
        name: [(0, 0)] for name in VALUES
    }


# From a peer.

CONTENT = bytes(range(256)) * 40


@contextlib.contextmanager
def peer(answer: Callable[[Any, int, int], None]) -> Iterator[PeerPlace]:
    """A peer that answers each request for a range in its own way."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
            assert match is not None and self.headers["Authorization"] == "Bearer secret"
            answer(self, int(match[1]), int(match[2]) + 1)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield PeerPlace(f"http://127.0.0.1:{server.server_port}/0", "secret", 5.0)
        finally:
            server.shutdown()
            thread.join(10)


def send(handler: Any, start: int, stop: int, *, only: int | None = None) -> None:
    """Answers with a range, or with the beginning of one."""
    handler.send_response(206)
    handler.send_header("Content-Length", str(stop - start))
    handler.end_headers()
    handler.wfile.write(CONTENT[start:stop][:only])


def received(place: PeerPlace, start: int, stop: int, limit: Deadline | None = None) -> bytes:
    blocks = [np.empty(size, np.uint8) for size in (10, stop - start - 10)]
    stream = PeerStream(
        place, "state/d/x", offset=start, length=stop - start, deadline=limit or deadline()
    )
    with contextlib.closing(stream):
        stream.fill(blocks)
    return b"".join(block.tobytes() for block in blocks)


def test_a_range_comes_in_one_request() -> None:
    asked = []

    def answer(handler: Any, start: int, stop: int) -> None:
        asked.append((start, stop))
        send(handler, start, stop)

    with peer(answer) as place:
        assert received(place, 100, 9000) == CONTENT[100:9000]
    assert asked == [(100, 9000)]


def test_where_a_connection_ends_another_goes_on() -> None:
    asked = []

    def answer(handler: Any, start: int, stop: int) -> None:
        asked.append(start)
        send(handler, start, stop, only=4000)

    with peer(answer) as place:
        assert received(place, 100, 9000) == CONTENT[100:9000]
    assert asked == [100, 4100, 8100]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_peer_that_is_busy_is_asked_again(status: int) -> None:
    asked = []

    def answer(handler: Any, start: int, stop: int) -> None:
        asked.append(start)
        if len(asked) < 3:
            handler.send_error(status)
        else:
            send(handler, start, stop)

    with peer(answer) as place:
        assert received(place, 0, 500) == CONTENT[:500]
    assert len(asked) == 3


def test_a_peer_that_sends_too_little_for_ever() -> None:
    nothing = lambda handler, start, stop: send(handler, start, stop, only=0)  # noqa: E731
    with peer(nothing) as place, pytest.raises(OSError, match="sent less than it has to"):
        received(place, 0, 500)


def test_a_peer_that_sends_a_byte_now_and_then_does_not_outlast_the_deadline() -> None:
    over = threading.Event()

    def answer(handler: Any, start: int, stop: int) -> None:
        send(handler, start, stop, only=0)
        while not over.wait(0.05):
            try:
                handler.wfile.write(b"x")
            except OSError:
                return

    limit = Deadline.after(1.0)
    with peer(answer) as place:
        try:
            with pytest.raises(TimeoutError, match=r"deadline|timed out"):
                received(place, 0, 5000, limit)
        finally:
            over.set()
    assert limit.remaining() > -4.0


@pytest.mark.parametrize(
    ("status", "length"), [(200, 500), (206, 499), (206, 501), (302, 0), (404, 0)]
)
def test_another_answer_than_the_range_is_refused(status: int, length: int) -> None:
    def answer(handler: Any, start: int, stop: int) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(length))
        handler.send_header("Location", "http://127.0.0.1:9/elsewhere")
        handler.end_headers()
        handler.wfile.write(b"x" * length)

    with peer(answer) as place, pytest.raises(OSError, match=f"answered {status}"):
        received(place, 0, 500)
