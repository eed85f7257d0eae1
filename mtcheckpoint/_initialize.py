"""Starts jax.distributed: from the volume's ``jax-init-info.txt``, or as JAX does by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import socket
from pathlib import Path

import jax

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint._handshake.files import JAX_INIT_INFO_FILE
from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.errors import CoordinationError, HandshakeError

__all__ = ["InitInfo", "initialize", "parse_init_info"]

_log = logging.getLogger("mtcheckpoint.initialize")

# How often file and address are tried, and how long one try may take, in seconds.
_POLL_SECONDS = 0.1
_CONNECT_TRY_SECONDS = 2.0

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(?P<port>[0-9]{1,5})")

# Signs that JAX was meant to find other processes. Without any, one process is the whole job.
_CLUSTER_SIGNS = (
    "JAX_COORDINATOR_ADDRESS",
    "KUBERNETES_SERVICE_HOST",
    "OMPI_MCA_orte_hnp_uri",
    "SLURM_JOB_ID",
    "TPU_WORKER_HOSTNAMES",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InitInfo:
    """The content of ``jax-init-info.txt``.

    Attributes:
        process_id: id of this process, 0..n-1.
        host: the coordinator's name or address, without brackets.
        port: the coordinator's port.
        address: both, as written.
    """

    process_id: int
    host: str
    port: int
    address: str


def initialize(
    config: CheckpointConfig,
    *,
    wait_for_init_info: bool | None = None,
    num_processes: int | None = None,
) -> None:
    """Starts ``jax.distributed``, unless it is running already. Call before any other use of JAX.

    With multi-tier checkpointing the process id and the coordinator come from the volume's
    ``jax-init-info.txt``, so that a node keeps its rank over restarts. Without the file JAX looks
    for a cluster by itself; where it finds none, this process is the whole job and nothing is done.

    Process 0 cannot tell who never came: JAX ends the process (SIGABRT) when not all have connected
    within the limit.

    Args:
        config: `local_checkpoint_directory` and `jax_distributed_initialization_timeout` are used.
            The limit holds for each of: the file, the coordinator's answer, all processes.
        wait_for_init_info: whether the file must come. None: when it is there already, or on
            Kubernetes (KUBERNETES_SERVICE_HOST is set).
        num_processes: processes of the job, which the file does not say. None: the environment's
            JAX_NUM_PROCESSES, else NNODES, else what JAX finds out.

    Raises:
        WaitTimeoutError: the file did not come or is half-written, or the coordinator in it does
            not answer: the file may be left from an earlier run.
        HandshakeError: the file's content makes no sense.
        CoordinationError: JAX was used before, or does not know how many processes there are.
    """
    if jax.distributed.is_initialized():
        _log.debug("jax.distributed is running already")
        return
    path = _init_info_path(config, wait_for_init_info)
    if path is None:
        _initialize_by_itself(config.jax_distributed_initialization_timeout)
    else:
        _initialize_from(path, config.jax_distributed_initialization_timeout, num_processes)


def parse_init_info(text: str, place: str) -> InitInfo | None:
    """Reads two lines, process id and coordinator ``host:port``; None: not all is there yet.

    Raises:
        HandshakeError: the lines cannot become right by waiting; `place` is named.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    if len(lines) > 2 or (lines and not re.fullmatch(r"[0-9]{1,9}", lines[0])):
        raise _malformed(place, text)
    if len(lines) < 2:
        return None
    match = _ADDRESS.fullmatch(lines[1])
    if match is None or not 0 < int(match["port"]) < 65536:
        # Without its line break the address may still be being written.
        if text.endswith("\n"):
            raise _malformed(place, text)
        return None
    return InitInfo(
        process_id=int(lines[0]),
        host=match["host"].strip("[]"),
        port=int(match["port"]),
        address=lines[1],
    )


def _malformed(place: str, text: str) -> HandshakeError:
    return HandshakeError(
        f"{place}: expected two lines, the process id and the coordinator's ip:port, found"
        f" {text[:200]!r}: the file is written by the RAM disk's CSI driver, see its log"
    )


def _init_info_path(config: CheckpointConfig, wanted: bool | None) -> Path | None:
    """The file to start from; None: JAX starts by itself."""
    multi_tier = config.enable_checkpointing and config.enable_multi_tier_checkpointing
    if not multi_tier:
        return None
    path = Path(config.local_checkpoint_directory) / JAX_INIT_INFO_FILE
    if wanted is None:
        wanted = path.exists() or "KUBERNETES_SERVICE_HOST" in os.environ
    return path if wanted else None


def _initialize_by_itself(timeout_secs: int) -> None:
    try:
        jax.distributed.initialize(initialization_timeout=timeout_secs)
    except ValueError as error:
        # What JAX says when neither the environment nor a cluster names a coordinator.
        if "coordinator_address" not in str(error):
            raise CoordinationError(f"jax.distributed cannot start: {error}") from error
        _log.info("no cluster in sight: this process is the whole job")
    except RuntimeError as error:
        if any(sign in os.environ for sign in _CLUSTER_SIGNS):
            raise CoordinationError(f"jax.distributed cannot start: {error}") from error
        _log.info("JAX is in use already and no cluster in sight: this process is the whole job")


def _initialize_from(path: Path, timeout_secs: int, num_processes: int | None) -> None:
    info = _wait_for_coordinator(path, Deadline.after(timeout_secs))
    processes = num_processes if num_processes is not None else _processes_in_environment()
    _log.info("process %d of %s, coordinator %s", info.process_id, processes or "?", info.address)
    try:
        jax.distributed.initialize(
            coordinator_address=info.address,
            num_processes=processes,
            process_id=info.process_id,
            initialization_timeout=timeout_secs,
        )
    except (ValueError, RuntimeError) as error:
        raise CoordinationError(
            f"jax.distributed cannot start as process {info.process_id} with the coordinator"
            f" {info.address} from {path}: {error}. The number of processes can be given as"
            " num_processes or in JAX_NUM_PROCESSES"
        ) from error


def _processes_in_environment() -> int | None:
    for name in ("JAX_NUM_PROCESSES", "NNODES"):
        text = os.environ.get(name, "")
        if text:
            if not text.isdigit():
                raise CoordinationError(f"{name}={text!r}: expected the number of processes")
            return int(text)
    return None


def _wait_for_coordinator(path: Path, deadline: Deadline) -> InitInfo:
    """Waits for the file, then until the coordinator in it can be reached.

    JAX ends the process when it gives up on a coordinator, so an address that does not answer is
    found out before it is asked. The file is read again at each try: the CSI driver replaces one
    that is left from an earlier run.
    """
    wait_for(
        _Settled(path).look,
        deadline,
        f"both lines of {path}",
        missing=lambda: [_found(path)],
        hint="The RAM disk's CSI driver writes it once every pod has a rank: check that all pods"
        " of the job run, and the driver's log",
        poll_seconds=_POLL_SECONDS,
    )
    return wait_for(
        lambda: _reachable(_read_init_info(path)),
        Deadline.after(deadline.seconds, deadline.clock),
        f"the coordinator in {path}",
        missing=lambda: [_unreachable(path)],
        hint="Process 0 does not run, or the file is left from an earlier run",
        poll_seconds=_POLL_SECONDS,
    )


class _Settled:
    """Takes the file when its last line is ended, or when two looks see the same."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: str | None = None

    def look(self) -> InitInfo | None:
        last, self._last = self._last, _read(self._path)
        if self._last is None or not (self._last.endswith("\n") or self._last == last):
            return None
        return parse_init_info(self._last, str(self._path))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HandshakeError(f"{path} cannot be read: {error}") from error


def _read_init_info(path: Path) -> InitInfo | None:
    text = _read(path)
    return None if text is None else parse_init_info(text, str(path))


def _found(path: Path) -> str:
    text = _read(path)
    return "the file" if text is None else f"a line, found {text[:200]!r}"


def _unreachable(path: Path) -> str:
    info = _read_init_info(path)
    if info is None:
        return "an address"
    if info.process_id == 0:
        return f"{info.address} (should be this process: the port is taken, or not of this machine)"
    return info.address


def _reachable(info: InitInfo | None) -> InitInfo | None:
    """`info` when a process can start from it now: 0 serves the port, the others find it served."""
    if info is None:
        return None
    return info if (_is_own(info) if info.process_id == 0 else _answers(info)) else None


def _answers(info: InitInfo) -> bool:
    try:
        with socket.create_connection((info.host, info.port), timeout=_CONNECT_TRY_SECONDS):
            return True
    except OSError:
        return False


def _is_own(info: InitInfo) -> bool:
    """Whether a connection to the address comes back to this machine, where JAX will serve it."""
    with contextlib.ExitStack() as stack:
        try:
            family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
            stack.enter_context(
                socket.create_server(
                    ("", info.port), family=family, dualstack_ipv6=family == socket.AF_INET6
                )
            )
        except OSError:
            return False
        return _answers(info)
