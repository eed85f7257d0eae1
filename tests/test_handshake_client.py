"""The handshake on real files, opposite a scripted replicator: cases 5, 6 and 7."""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import os
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from handshake_peer import (
    StepClock,
    ThreadedReplicator,
    lay_out,
    make_share,
    ram_directory,
    take_yaml,
)

from mtcheckpoint._clock import Clock
from mtcheckpoint._handshake.client import HandshakeResult, ReplicatorWatch, run_handshake
from mtcheckpoint._handshake.files import ERRORS_FILE, FAILED_FILE, PRERESTORE_FILE
from mtcheckpoint.errors import (
    HandshakeError,
    MarkerError,
    ReplicatorFailedError,
    WaitTimeoutError,
)

MARKERS = yaml.safe_load((Path(__file__).parent / "cases" / "markers.yaml").read_text())
JOB, RANK, LIMIT = "train-a", 1, 300.0
NOTHING = f"{JOB}-s0-n{RANK}-w0.restore"
SETTINGS: dict[str, Any] = {
    "job-name": JOB,
    "framework": "orbax",
    "node-rank": RANK,
    "nodes": 4,
    "peer-ranks": [3],
    "backup-interval-minutes": 30,
}


@pytest.fixture
def volume() -> Iterator[Path]:
    with ram_directory() as path:
        yield path


@pytest.fixture
def clock() -> StepClock:
    return StepClock()


def handshake(volume: Path, clock: Clock | None = None, limit: float = LIMIT) -> HandshakeResult:
    return run_handshake(volume, SETTINGS, job=JOB, node_rank=RANK, timeout_secs=limit, clock=clock)


def answer_nothing(volume: Path) -> None:
    (volume / NOTHING).touch()


def answer_step_40(volume: Path) -> None:
    make_share(volume, "Dxx.data")
    (volume / f"{JOB}-s40-n{RANK}-w0.restore").symlink_to("Dxx.data")


def take_and(volume: Path, answer: Callable[[Path], object]) -> Callable[[], None]:
    def act() -> None:
        take_yaml(volume)
        answer(volume)

    return act


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


# What comes back.


def test_a_first_start_with_errors_of_no_checkpoints_is_no_fault(
    volume: Path, clock: StepClock, caplog: pytest.LogCaptureFixture
) -> None:
    def first_start(volume: Path) -> None:
        append(volume / ERRORS_FILE, "ERROR: no valid checkpoints\n")
        (volume / PRERESTORE_FILE).write_text("{}\n")
        answer_nothing(volume)

    clock.at(0.02, take_and(volume, first_start))
    result = handshake(volume, clock)
    assert (result.step, result.share, result.restore_backup) == (None, None, None)
    assert result.errors == "ERROR: no valid checkpoints\n"
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    assert (volume / ERRORS_FILE).exists()
    assert (volume / NOTHING).exists()
    assert not list(volume.glob("replicator.yaml*"))


def test_a_step_comes_back_with_its_share_and_its_backup(volume: Path) -> None:
    def from_backup(volume: Path) -> None:
        (volume / PRERESTORE_FILE).write_text(
            "restore-step: 40\nrestore-backup: 2026-01-02_03-04\n"
        )
        answer_step_40(volume)

    with ThreadedReplicator(volume, from_backup) as replicator:
        result = handshake(volume)
    assert yaml.safe_load(replicator.text) == SETTINGS
    assert (result.step, result.share) == (40, volume.resolve() / "Dxx.data")
    assert result.restore_backup == "2026-01-02_03-04"
    assert set(result.seconds) == {"stale_yaml", "consumption", "marker"}
    assert result.errors == ""


def test_a_volume_reached_by_a_link_gives_a_resolved_share(volume: Path) -> None:
    real = volume / "real"
    real.mkdir()
    link = volume / "link"
    link.symlink_to(real)
    with ThreadedReplicator(link, answer_step_40):
        assert handshake(link).share == real.resolve() / "Dxx.data"


@pytest.mark.parametrize("text", ["", "[", "- 1", "restore-step: 40", "\udcff"])
def test_a_prerestore_without_a_backup_is_no_fault(
    volume: Path, clock: StepClock, text: str
) -> None:
    def answer(volume: Path) -> None:
        (volume / PRERESTORE_FILE).write_bytes(text.encode(errors="surrogateescape"))
        answer_step_40(volume)

    clock.at(0.02, take_and(volume, answer))
    assert handshake(volume, clock).restore_backup is None


@pytest.mark.parametrize("row", MARKERS, ids=lambda row: row["title"])
def test_marker_case(volume: Path, clock: StepClock, row: dict[str, Any]) -> None:
    clock.at(0.5, take_and(volume, lambda volume: lay_out(volume, row["entries"])))
    outcome = row["outcome"]
    if outcome == "wait":
        with pytest.raises(WaitTimeoutError) as timeout:
            handshake(volume, clock, limit=20.0)
        assert all(
            name in str(timeout.value) for name in row["entries"] if name.endswith(".restore")
        )
    elif outcome == "error":
        with pytest.raises(MarkerError, match="not a valid answer") as fault:
            handshake(volume, clock)
        assert row["names"] in str(fault.value)
        assert fault.value.entry in row["entries"]
    else:
        result = handshake(volume, clock)
        assert outcome == ("nothing" if result.step is None else f"restore {result.step}")
        assert (result.share is None) == (result.step is None)
    assert all(os.path.lexists(volume / name) for name in row["entries"]), "we delete nothing"


# When the YAML is taken, or not.


def test_yaml_taken_after_a_moment(volume: Path) -> None:
    with ThreadedReplicator(volume, answer_nothing, after=0.1):
        result = handshake(volume)
    assert 0.05 < result.seconds["consumption"] < 5.0


def test_yaml_taken_after_5_s(volume: Path, clock: StepClock) -> None:
    clock.at(5.0, take_and(volume, answer_step_40))
    result = handshake(volume, clock)
    assert result.step == 40
    assert result.seconds["consumption"] == pytest.approx(5.0, abs=0.05)


def test_yaml_never_taken(volume: Path, clock: StepClock) -> None:
    with pytest.raises(WaitTimeoutError, match=r"replicator\.yaml.*Check that a replicator") as t:
        handshake(volume, clock)
    assert str(volume) in str(t.value)
    assert (t.value.seconds, clock.now) == (300.0, pytest.approx(300.0, abs=0.1))
    assert yaml.safe_load((volume / "replicator.yaml").read_text()) == SETTINGS


def test_marker_never_written(volume: Path, clock: StepClock) -> None:
    clock.at(1.0, take_and(volume, lambda v: append(v / ERRORS_FILE, "node 3 is late\n")))
    with pytest.raises(WaitTimeoutError, match="node 3 is late") as timeout:
        handshake(volume, clock)
    assert timeout.value.missing == (f"{JOB}-s<step>-n{RANK}-w0.restore",)
    assert clock.now == pytest.approx(301.0, abs=0.1)


def test_the_look_after_the_deadline_still_counts(volume: Path, clock: StepClock) -> None:
    clock.at(300.0, take_and(volume, answer_nothing))
    assert handshake(volume, clock).step is None


def test_a_stale_yaml_is_never_overwritten(volume: Path, clock: StepClock) -> None:
    yaml_file = volume / "replicator.yaml"
    yaml_file.write_text("job-name: earlier\n")
    seen: list[str] = []
    clock.at(6.9, lambda: seen.append(yaml_file.read_text()))
    clock.at(7.0, lambda: seen.append(take_yaml(volume)))
    clock.at(8.0, take_and(volume, answer_nothing))
    result = handshake(volume, clock)
    assert seen == ["job-name: earlier\n"] * 2
    assert result.seconds["stale_yaml"] == pytest.approx(7.0, abs=0.05)


def test_a_stale_yaml_that_stays(volume: Path, clock: StepClock) -> None:
    (volume / "replicator.yaml").write_text("job-name: earlier\n")
    with pytest.raises(WaitTimeoutError, match="of an earlier run"):
        handshake(volume, clock)
    assert (volume / "replicator.yaml").read_text() == "job-name: earlier\n"
    assert not (volume / "replicator.yaml.tmp").exists()


def test_a_leftover_temporary_file_is_no_obstacle(volume: Path) -> None:
    (volume / "replicator.yaml.tmp").write_text("half of a")
    with ThreadedReplicator(volume, answer_nothing) as replicator:
        handshake(volume)
    assert yaml.safe_load(replicator.text) == SETTINGS


# replicator.failed and replicator.errors.


@pytest.mark.parametrize("text", ["CRITICAL: old\n", ""])
def test_failed_of_an_earlier_run_is_ignored(volume: Path, clock: StepClock, text: str) -> None:
    (volume / FAILED_FILE).write_text(text)
    (volume / ERRORS_FILE).write_text("old\n")

    def answer_without_clearing() -> None:
        (volume / "replicator.yaml").unlink()
        answer_nothing(volume)

    clock.at(1.0, answer_without_clearing)
    result = handshake(volume, clock)
    assert (result.step, result.errors) == (None, "")
    assert (volume / FAILED_FILE).read_text() == text, "files of errors are kept"


def test_failed_before_the_yaml_is_gone_is_forgiven_when_it_is_taken(
    volume: Path, clock: StepClock
) -> None:
    clock.at(1.0, lambda: append(volume / FAILED_FILE, "expected sync, got restore"))
    clock.at(9.0, take_and(volume, answer_step_40))
    assert handshake(volume, clock).step == 40


def test_failed_instead_of_taking_the_yaml(volume: Path, clock: StepClock) -> None:
    clock.at(1.0, lambda: append(volume / FAILED_FILE, "unknown key backup-interval-steps"))
    with pytest.raises(ReplicatorFailedError, match=r"left replicator\.yaml where it is") as fault:
        handshake(volume, clock)
    assert fault.value.text == "unknown key backup-interval-steps"
    assert clock.now == pytest.approx(31.0, abs=0.1)


@pytest.mark.parametrize("text", ["CRITICAL: disk full\n", ""])
def test_failed_after_the_yaml_is_gone_is_fatal_at_once(
    volume: Path, clock: StepClock, text: str
) -> None:
    def fail(volume: Path) -> None:
        append(volume / ERRORS_FILE, "peer 3 is gone\n")
        append(volume / FAILED_FILE, text)

    clock.at(1.0, take_and(volume, fail))
    with pytest.raises(ReplicatorFailedError, match="peer 3 is gone") as fault:
        handshake(volume, clock)
    assert fault.value.text == text
    assert text.strip() in str(fault.value)
    assert clock.now < 1.1
    assert (volume / FAILED_FILE).exists()


def test_failed_that_grows_after_the_yaml_is_gone_is_fatal(volume: Path, clock: StepClock) -> None:
    (volume / FAILED_FILE).write_text("old\n")
    clock.at(1.0, (volume / "replicator.yaml").unlink)
    clock.at(2.0, lambda: append(volume / FAILED_FILE, "new\n"))
    with pytest.raises(ReplicatorFailedError) as fault:
        handshake(volume, clock)
    assert fault.value.text == "new\n"


def test_failed_that_replaces_a_stale_one_with_the_same_text_is_fatal(
    volume: Path, clock: StepClock
) -> None:
    (volume / FAILED_FILE).write_text("same\n")
    clock.at(1.0, take_and(volume, lambda v: append(v / FAILED_FILE, "same\n")))
    with pytest.raises(ReplicatorFailedError):
        handshake(volume, clock)


def test_errors_are_logged_and_do_not_end_the_handshake(
    volume: Path, clock: StepClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.at(1.0, take_and(volume, lambda v: append(v / ERRORS_FILE, "fetch failed\n")))
    clock.at(2.0, lambda: answer_step_40(volume))
    with caplog.at_level(logging.WARNING, logger="mtcheckpoint.handshake"):
        result = handshake(volume, clock)
    assert (result.step, result.errors) == (40, "fetch failed\n")
    assert "fetch failed" in caplog.text


# The watch during the run.


def test_watch_reports_errors_once_and_keeps_them(
    volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append(volume / ERRORS_FILE, "no valid checkpoints\n")
    watch = ReplicatorWatch(volume, seen_errors="no valid checkpoints\n")
    with caplog.at_level(logging.ERROR, logger="mtcheckpoint.handshake"):
        watch.check()
        assert caplog.messages == []
        append(volume / ERRORS_FILE, "copy to 3 failed\n")
        watch.check()
        watch.check()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith(f"{ERRORS_FILE}: copy to 3 failed")
    assert (volume / ERRORS_FILE).exists()


@pytest.mark.parametrize("text", ["CRITICAL: gone\n", ""])
def test_watch_raises_on_failed_every_time(volume: Path, text: str) -> None:
    watch = ReplicatorWatch(volume)
    watch.check()
    (volume / FAILED_FILE).write_text(text)
    for _ in range(2):
        with pytest.raises(ReplicatorFailedError) as fault:
            watch.check()
        assert fault.value.text == text
    assert (volume / FAILED_FILE).exists()


def test_long_texts_are_quoted_from_their_end(volume: Path) -> None:
    (volume / FAILED_FILE).write_text("x" * 100_000 + "the cause")
    with pytest.raises(ReplicatorFailedError, match="the cause") as fault:
        ReplicatorWatch(volume).check()
    assert len(str(fault.value)) < 5000


# A volume that cannot be used.


def test_missing_volume(volume: Path) -> None:
    with pytest.raises(HandshakeError, match="local_checkpoint_directory"):
        handshake(volume / "nowhere")
    assert list(volume.iterdir()) == []


def test_volume_that_is_a_file(volume: Path) -> None:
    file = volume / "file"
    file.touch()
    with pytest.raises(HandshakeError, match="not a directory"):
        handshake(file)


def test_volume_that_is_not_writable(volume: Path) -> None:
    directory = volume / "locked"
    directory.mkdir(mode=0o555)
    volume.chmod(0o755)
    user = os.geteuid()
    if user == 0:
        # The superuser may write anywhere.
        os.seteuid(65534)
    try:
        with pytest.raises(HandshakeError, match="not writable for user"):
            handshake(directory)
    finally:
        os.seteuid(user)
    assert list(directory.iterdir()) == []


def test_volume_that_disappears(volume: Path, clock: StepClock) -> None:
    directory = volume / "ram"
    directory.mkdir()

    def vanish() -> None:
        (directory / "replicator.yaml").unlink()
        directory.rmdir()

    clock.at(1.0, vanish)
    with pytest.raises(HandshakeError, match="cannot be read"):
        handshake(directory, clock)


# How it is seen from outside.

IN_MODIFY, IN_CLOSE_WRITE, IN_MOVED_TO, IN_CREATE = 0x2, 0x8, 0x80, 0x100


class Inotify:
    """The kernel's events of one directory, as the replicator sees them."""

    def __init__(self, directory: Path) -> None:
        self._libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK)
        mask = IN_MODIFY | IN_CLOSE_WRITE | IN_MOVED_TO | IN_CREATE
        watch = self._libc.inotify_add_watch(self._fd, os.fsencode(directory), mask)
        assert self._fd >= 0 and watch >= 0

    def events(self) -> list[tuple[int, str]]:
        data, found = os.read(self._fd, 65536), []
        while data:
            _, mask, _, length = struct.unpack_from("iIII", data)
            found.append((mask, os.fsdecode(data[16 : 16 + length].rstrip(b"\0"))))
            data = data[16 + length :]
        os.close(self._fd)
        return found


def test_the_yaml_is_only_ever_seen_by_rename(volume: Path) -> None:
    inotify = Inotify(volume)
    with ThreadedReplicator(volume, answer_nothing):
        handshake(volume)
    events = inotify.events()
    assert [mask for mask, name in events if name == "replicator.yaml"] == [IN_MOVED_TO]
    temporary = [mask for mask, name in events if name == "replicator.yaml.tmp"]
    assert temporary[-1] == IN_CLOSE_WRITE


def test_reaction_to_a_file_takes_well_under_50_ms(volume: Path) -> None:
    delays = []
    for _ in range(9):
        with ThreadedReplicator(volume, answer_nothing, after=0.02) as replicator:
            handshake(volume)
            returned_at = time.monotonic()
        delays.append(returned_at - replicator.answered_at)
    # The median: a busy machine may hold up single ones.
    assert statistics.median(delays) < 0.05


def test_no_threads_are_left(volume: Path, clock: StepClock) -> None:
    before = set(threading.enumerate())
    clock.at(1.0, take_and(volume, answer_nothing))
    handshake(volume, clock)
    assert set(threading.enumerate()) == before
