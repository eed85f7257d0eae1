"""Names of shares equal those of Google's public replicator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from google_replicator import SOURCE_VARIABLE
from shares import write_share

from mtcheckpoint._handshake import files
from mtcheckpoint._replicator.hashing import share_digest

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


def test_files_beside_the_item_do_not_count(volume_root: Path) -> None:
    share = write_share(volume_root / "share", "values")
    before = share_digest(share, "orbax")
    (share / "extras.json").write_text("{}")
    assert share_digest(share, "orbax") == before
    assert share_digest(share, "pytorch.distributed") != before
