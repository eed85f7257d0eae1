"""Names of shares equal those of Google's public replicator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorstore as ts
from blake3 import blake3
from google_replicator import SOURCE_VARIABLE
from shares import write_share

from mtcheckpoint._handshake import files
from mtcheckpoint._ocdbt_index import Stored
from mtcheckpoint._replicator.hashing import _value_digest, share_digest

_SCRIPT = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
import framework
print("digest", framework.hash_file(pathlib.Path(sys.argv[2])))
"""


def google_digest(directory: Path, framework: str, scratch: Path) -> str:
    environment = {
        **os.environ,
        "FRAMEWORK": framework,
        "PROMETHEUS_MULTIPROC_DIR": str(scratch),
        "LOCAL_VOLUME": str(scratch),
    }
    arguments = [sys.executable, "-c", _SCRIPT, os.environ[SOURCE_VARIABLE], str(directory)]
    done = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("digest "))
    return line.removeprefix("digest ")


def orbax_share(directory: Path) -> Path:
    return write_share(directory, "some values")


def other_directory(directory: Path) -> Path:
    (directory / "deep" / "er").mkdir(parents=True)
    (directory / "deep" / "er" / "a.bin").write_bytes(b"x" * 100_000)
    (directory / "deep" / "empty").touch()
    (directory / "b.bin").write_bytes(b"y")
    return directory


@pytest.mark.google_replicator
@pytest.mark.skipif(SOURCE_VARIABLE not in os.environ, reason=f"{SOURCE_VARIABLE} is not set")
@pytest.mark.parametrize("framework", ["orbax", "pytorch.distributed"])
@pytest.mark.parametrize("make", [orbax_share, other_directory])
def test_same_name_as_the_public_replicator(
    make: object, framework: str, volume_root: Path, tmp_path: Path
) -> None:
    directory = make(volume_root / "share")
    assert share_digest(directory, framework) == google_digest(directory, framework, tmp_path)


def test_the_hash_covers_values_not_their_layout(volume_root: Path) -> None:
    first = write_share(volume_root / "first", "values")
    again = write_share(volume_root / "again", "values", item="default", committed=False)
    other = write_share(volume_root / "other", "values!")
    digests = [share_digest(share, "orbax") for share in (first, again, other)]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]
    assert all(files.DATA_NAME.fullmatch(files.data_name(digest)) for digest in digests)


def large_store(item: Path) -> Path:
    """Values in the index, values beside it, one of several blocks, many keys, two commits."""
    item.mkdir(parents=True)
    config = {"max_inline_value_bytes": 100, "max_decoded_node_bytes": 4096}
    spec = {"driver": "ocdbt", "base": f"file://{item}/", "config": config}
    store = ts.KvStore.open(spec).result()
    values = {f"in/{n}": b"i" * n for n in range(90)}
    values |= {f"out/{n}": os.urandom(200 + n) for n in range(300)}
    for key, value in values.items():
        store[key] = b"before"
        store[key] = value
    store["large"] = os.urandom((5 << 20) + 3)
    store["empty"] = b""
    del store["in/3"]
    return item


def test_the_hash_is_that_of_the_values_as_tensorstore_reads_them(volume_root: Path) -> None:
    item = large_store(volume_root / "share" / "state")
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
    keys = sorted(store.list().result())
    lines = "".join(f"{key!r}\t{blake3(store[key]).hexdigest()}\n" for key in keys)
    assert len(keys) == 390 + 1
    expected = "D" + blake3(lines.encode()).hexdigest()
    assert share_digest(item.parent, "orbax") == expected


def test_a_value_beyond_the_end_of_its_file_has_no_hash(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 100)
    _value_digest(tmp_path, Stored(file="data", offset=10, length=90))
    with pytest.raises(ValueError, match="data ends 1 bytes before the end of a value at 10"):
        _value_digest(tmp_path, Stored(file="data", offset=10, length=91))


def test_files_beside_the_item_do_not_count(volume_root: Path) -> None:
    share = write_share(volume_root / "share", "values")
    before = share_digest(share, "orbax")
    (share / "extras.json").write_text("{}")
    assert share_digest(share, "orbax") == before
    assert share_digest(share, "pytorch.distributed") != before
