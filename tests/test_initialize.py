"""Starting jax.distributed from the volume's file, in real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from handshake_peer import ram_directory

from mtcheckpoint._initialize import InitInfo, parse_init_info
from mtcheckpoint.errors import HandshakeError

LIMIT_SECONDS = 60
PROGRAM = """
import sys, warnings
warnings.simplefilter("error")
import jax
import mtcheckpoint.errors as errors
from mtcheckpoint._initialize import initialize
from mtcheckpoint.config import CheckpointConfig

directory, timeout, multi_tier, wait, use_jax_first = sys.argv[1:]
if use_jax_first == "True":
    jax.devices()
config = CheckpointConfig(
    enable_multi_tier_checkpointing=multi_tier == "True",
    local_checkpoint_directory=directory,
    local_checkpoint_period=1,
    multi_tier_checkpointing_backup_interval_minutes=30,
    run_name="train-a",
    jax_distributed_initialization_timeout=int(timeout),
)
try:
    for _ in range(2):
        initialize(config, wait_for_init_info={"True": True, "False": False, "None": None}[wait])
except errors.MtCheckpointError as error:
    print(f"{type(error).__name__}: {error}")
else:
    print("process", jax.process_index(), "of", jax.process_count())
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
"""
CLUSTER_VARIABLES = ("JAX_", "KUBERNETES_", "SLURM_", "OMPI_", "TPU_", "NNODES")


@pytest.fixture
def volume() -> Iterator[Path]:
    with ram_directory() as path:
        yield path


def start(
    volume: Path,
    *,
    timeout_secs: int = 30,
    multi_tier: bool = True,
    wait: bool | None = None,
    use_jax_first: bool = False,
    **environment: str,
) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(CLUSTER_VARIABLES)}
    arguments = (volume, timeout_secs, multi_tier, wait, use_jax_first)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env={**kept, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What the process printed; it must end by itself and in order."""
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def write_info(volume: Path, text: str) -> None:
    """As the CSI driver does it: by rename."""
    temporary = volume / "info.tmp"
    temporary.write_text(text)
    temporary.replace(volume / "jax-init-info.txt")


# Reading the file.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3\n10.0.0.1:8080\n", (3, "10.0.0.1", 8080)),
        ("0\n10.0.0.1:8080", (0, "10.0.0.1", 8080)),
        ("0\r\n[fd00::1]:8080\r\n", (0, "fd00::1", 8080)),
        ("12\nhost-0.job.default:1\n\n", (12, "host-0.job.default", 1)),
    ],
)
def test_good_content(text: str, expected: tuple[int, str, int]) -> None:
    info = parse_init_info(text, "file")
    assert isinstance(info, InitInfo)
    assert (info.process_id, info.host, info.port) == expected
    assert info.address == text.split()[1]


@pytest.mark.parametrize("text", ["", "\n", "1", "12\n", "1\n10.0", "1\n10.0.0.1", "1\n10.0.0.1:"])
def test_half_written_content_is_waited_for(text: str) -> None:
    assert parse_init_info(text, "file") is None


@pytest.mark.parametrize(
    "text",
    [
        "one\n10.0.0.1:80\n",
        "-1\n10.0.0.1:80\n",
        "10.0.0.1:80\n1\n",
        "1\n10.0.0.1\n",
        "1\n10.0.0.1:0\n",
        "1\n10.0.0.1:70000\n",
        "1\nfd00::1:80\n",
        "1\n10.0.0.1:80\nmore\n",
        "\0",
    ],
    ids=ascii,
)
def test_content_that_no_waiting_makes_right(text: str) -> None:
    with pytest.raises(HandshakeError, match="place: expected two lines") as fault:
        parse_init_info(text, "place")
    assert repr(text[:200]) in str(fault.value)


# Real processes.


def test_two_processes_start_from_their_files() -> None:
    address = f"127.0.0.1:{free_port()}"
    with ram_directory() as first, ram_directory() as second:
        # The second is there first, and its file has no line break at its end.
        write_info(second, f"1\n{address}")
        late = start(second, JAX_NUM_PROCESSES="2")
        write_info(first, f"0\n{address}\n")
        processes = [start(first, NNODES="2"), late]
        outputs = [finish(process) for process in processes]
    assert ["process 0 of 2" in outputs[0], "process 1 of 2" in outputs[1]] == [True, True], outputs


def test_a_half_written_file_is_waited_for(volume: Path) -> None:
    (volume / "jax-init-info.txt").write_text("0\n127.0.0.1")
    process = start(volume, JAX_NUM_PROCESSES="1")
    threading.Event().wait(0.2)
    write_info(volume, f"0\n127.0.0.1:{free_port()}\n")
    assert "process 0 of 1" in finish(process)


def test_a_stale_file_is_found_out_before_jax_would_abort(volume: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    write_info(volume, f"1\n{address}\n")
    began = time.monotonic()
    output = finish(start(volume, timeout_secs=2, JAX_NUM_PROCESSES="2"))
    assert time.monotonic() - began < LIMIT_SECONDS / 2
    assert "WaitTimeoutError: waited 2.0 s for the coordinator in" in output
    assert address in output
    assert "jax-init-info.txt" in output
    assert "left from an earlier run" in output


def test_process_0_is_ended_by_jax_when_others_never_come(volume: Path) -> None:
    """What the docstring of `initialize` warns of; JAX's own way, in bounded time."""
    write_info(volume, f"0\n127.0.0.1:{free_port()}\n")
    process = start(volume, timeout_secs=1, JAX_NUM_PROCESSES="2")
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == -signal.SIGABRT, output


def test_a_coordinator_whose_port_is_taken(volume: Path) -> None:
    with socket.create_server(("", 0)) as other:
        write_info(volume, f"0\n127.0.0.1:{other.getsockname()[1]}\n")
        output = finish(start(volume, timeout_secs=1, JAX_NUM_PROCESSES="1"))
    assert "WaitTimeoutError" in output
    assert "should be this process" in output


def test_a_file_that_is_replaced_while_its_coordinator_is_awaited(volume: Path) -> None:
    write_info(volume, f"1\n127.0.0.1:{free_port()}\n")
    process = start(volume, JAX_NUM_PROCESSES="1")
    threading.Event().wait(0.2)
    write_info(volume, f"0\n127.0.0.1:{free_port()}\n")
    assert "process 0 of 1" in finish(process)


def test_a_malformed_file_is_refused_at_once(volume: Path) -> None:
    write_info(volume, "nobody\n127.0.0.1:80\n")
    output = finish(start(volume))
    assert "HandshakeError" in output
    assert "jax-init-info.txt: expected two lines" in output


@pytest.mark.parametrize(
    ("wait", "environment"), [(True, {}), (None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})]
)
def test_a_file_that_must_come_and_does_not(
    volume: Path, wait: bool | None, environment: dict[str, str]
) -> None:
    output = finish(start(volume, timeout_secs=1, wait=wait, **environment))
    assert f"waited 1.0 s for both lines of {volume}/jax-init-info.txt" in output
    assert "missing: the file" in output


@pytest.mark.parametrize("use_jax_first", [False, True], ids=["jax-unused", "jax-used"])
def test_without_file_and_cluster_one_process_is_the_job(volume: Path, use_jax_first: bool) -> None:
    assert "process 0 of 1" in finish(start(volume, use_jax_first=use_jax_first))


def test_without_multi_tier_the_file_is_not_looked_at(volume: Path) -> None:
    write_info(volume, "nonsense")
    assert "process 0 of 1" in finish(start(volume, multi_tier=False))


def test_the_number_of_processes_must_be_known(volume: Path) -> None:
    write_info(volume, f"0\n127.0.0.1:{free_port()}\n")
    output = finish(start(volume))
    assert "CoordinationError" in output
    assert "JAX_NUM_PROCESSES" in output


def test_jax_used_too_early_in_a_job_of_several(volume: Path) -> None:
    write_info(volume, f"0\n127.0.0.1:{free_port()}\n")
    output = finish(start(volume, use_jax_first=True, JAX_NUM_PROCESSES="2"))
    assert "CoordinationError" in output
    assert "before any JAX" in output
