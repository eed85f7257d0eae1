"""Nothing waits for ever or anonymously, and a process that has given up can end."""

from __future__ import annotations

import ast
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest
import waits_job
from replicator_cluster import eventually

from mtcheckpoint._jax import _ANSWER_SECONDS
from mtcheckpoint.testing import ram_disk

pytestmark = pytest.mark.extended

PACKAGE = Path(__file__).parents[1] / "mtcheckpoint"

# Every wait of a frozen job may run into its limit, and the store's too; the machine may be busy.
LIMIT_SECONDS = 8 * programs.LIMIT_SECONDS + 2 * _ANSWER_SECONDS + 30.0
CASES = [(phase, frozen) for phase in ("save", "restore", "decision") for frozen in (0, 1)]


class FrozenJob:
    """Two processes, of which one freezes itself as soon as step 0 is saved."""

    def __init__(self, root: Path, phase: str, frozen: int) -> None:
        folder = Path(tempfile.mkdtemp(dir=root))
        self.frozen = frozen
        self._outputs = [folder / f"output-{rank}" for rank in range(2)]
        port = _free_port()
        words = [folder, port, phase, frozen]
        self._processes = [
            programs.start(waits_job.__file__, [rank, *words], output)
            for rank, output in enumerate(self._outputs)
        ]
        self.begun = 0.0

    def wait_until_frozen(self) -> None:
        for output in self._outputs:
            eventually(lambda o=output: "saved" in o.read_text(), "the first save", 120.0)
        self.begun = time.monotonic()

    def exit_code(self) -> int:
        """How the process that is not frozen ends."""
        remaining = LIMIT_SECONDS - (time.monotonic() - self.begun)
        return self._processes[1 - self.frozen].wait(timeout=max(remaining, 0.1))

    def said(self) -> str:
        return self._outputs[1 - self.frozen].read_text()

    def kill(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)


def _free_port() -> int:
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port")


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[tuple[str, int], FrozenJob]]:
    """All at once: most of their time passes in waits."""
    started: dict[tuple[str, int], FrozenJob] = {}
    with ram_disk() as root:
        try:
            for case in CASES:
                started[case] = FrozenJob(root, *case)
            for job in started.values():
                job.wait_until_frozen()
            yield started
        finally:
            for job in started.values():
                job.kill()
            shutil.rmtree(root, ignore_errors=True)


@pytest.mark.parametrize(("phase", "frozen"), CASES)
def test_the_others_name_a_frozen_process_and_end(
    jobs: dict[tuple[str, int], FrozenJob], phase: str, frozen: int
) -> None:
    job = jobs[phase, frozen]
    assert job.exit_code() == 1, job.said()
    last = job.said().strip().splitlines()[-1]
    assert last.startswith("mtcheckpoint.errors."), job.said()
    assert f"process {frozen}" in last


# Calls that wait: which words in the source show that they do not wait for ever.

_BOUNDED_BY_ARGUMENT = {"result", "join", "get", "wait"}


def test_the_source_has_no_wait_without_a_limit() -> None:
    """`.result()` and the like without arguments, unless they are listed with a reason."""
    found = {
        f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _BOUNDED_BY_ARGUMENT
        and not node.args
        and not node.keywords
    }
    assert found <= ALLOWED.keys(), found - ALLOWED.keys()


ALLOWED = {
    "_chunk_reads.py: future.result()": "each read has the deadline of the restore",
    "_shares/peers.py: self._stop.wait()": "the server's life; `stop` ends it",
    "manager.py: self._saver.wait()": "has a limit of its own for each phase",
}
