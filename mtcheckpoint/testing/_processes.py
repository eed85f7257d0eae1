"""Real processes for tests of a distributed loop: started, watched, killed, cleaned up after."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint.errors import MtCheckpointError, WaitTimeoutError
from mtcheckpoint.testing._reports import PLACE_VARIABLE, ChildProcess

__all__ = ["Event", "ProcessFailedError", "ProcessGroup", "Target", "run_processes"]

Target = str | Callable[..., Any]

_CHILD = Path(__file__).with_name("_child.py")
_PACKAGE_ROOT = Path(__file__).parents[2]

_SIGKILL = signal.SIGKILL  # `kill` has an argument of the module's name.
_SHOWN_LINES = 40
_SECONDS_TO_LEAVE = 10.0
_SECONDS_TO_DUMP = 1.0

# Below the range from which the kernel takes the ports of outgoing connections, so that none of
# them takes the port between our look and its use.
_PORTS = range(20_000, 32_000)


class ProcessFailedError(MtCheckpointError, RuntimeError):
    """A process of a group raised, or ended without a result.

    Attributes:
        rank: its place in the group.
        output: the end of what it wrote to stdout and stderr.
    """

    def __init__(self, message: str, *, rank: int, output: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.output = output


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One call of `mtcheckpoint.testing.report`."""

    name: str
    rank: int
    fields: dict[str, Any]

    def __getitem__(self, field: str) -> Any:
        return self.fields[field]


def run_processes(
    target: Target,
    n: int,
    *,
    devices: int = 2,
    args: Sequence[Any] = (),
    timeout_secs: float = 120.0,
    env: Mapping[str, str] | None = None,
    python: str | None = None,
    process_ids: Sequence[int] | None = None,
    distributed: bool = True,
) -> list[Any]:
    """Calls `target` in `n` processes of one JAX job, and returns their results in order.

    The arguments are those of `ProcessGroup`.

    Raises:
        ProcessFailedError: a process raised; shows which, with its traceback and output.
        WaitTimeoutError: not all had finished after `timeout_secs` seconds; shows where they hang.

    Example:
        A test file with a function of its own::

            def rank_and_count() -> list[int]:
                import jax

                return [jax.process_index(), jax.device_count()]


            def test_two_processes() -> None:
                assert run_processes(rank_and_count, 2) == [[0, 4], [1, 4]]
    """
    group = ProcessGroup(
        target,
        n,
        devices=devices,
        args=args,
        env=env,
        python=python,
        process_ids=process_ids,
        distributed=distributed,
    )
    with group:
        return group.wait(timeout_secs)


class ProcessGroup:
    """The processes of one JAX job on this machine, on CPU devices.

    They run from the moment this is made, and are killed when the ``with`` ends, whatever
    happened. They also die with the thread that made the group, so make it in one that stays.

    Args:
        target: what each process calls: a function at the top of a module, or
            ``"module:function"`` or ``"path/file.py:function"``. Returns what JSON can carry.
        n: number of processes.
        devices: CPU devices of each.
        args: arguments of the target, the same for all; what JSON can carry. A process learns its
            own place from `this_process`.
        env: environment variables on top of this process' own.
        python: the interpreter; this one by default.
        process_ids: the id for ``jax.distributed`` of each process, when it shall differ from its
            rank.
        distributed: False leaves ``jax.distributed.initialize`` to the target.

    Example:
        Kill one process in the middle of its work::

            with ProcessGroup(train, 4, args=[str(folder)]) as group:
                group.wait_for("saved", rank=2, timeout_secs=60)
                group.kill(2)
    """

    def __init__(
        self,
        target: Target,
        n: int,
        *,
        devices: int = 2,
        args: Sequence[Any] = (),
        env: Mapping[str, str] | None = None,
        python: str | None = None,
        process_ids: Sequence[int] | None = None,
        distributed: bool = True,
    ) -> None:
        ids = list(process_ids) if process_ids is not None else list(range(n))
        if sorted(ids) != list(range(n)):
            raise ValueError(f"process_ids must be the numbers 0 to {n - 1} in some order: {ids}")
        self._folder = Path(tempfile.mkdtemp(prefix="mtcheckpoint-processes-"))
        self._killed: set[int] = set()
        self._seen: dict[tuple[str, int], int] = {}
        self._events: dict[int, list[Event]] = defaultdict(list)
        self._read_bytes: dict[int, int] = defaultdict(int)
        self._children: list[subprocess.Popen[str]] = []
        address = f"127.0.0.1:{_free_port()}"
        environment = _environment(devices, env or {})
        orders = {
            "target": _target_name(target),
            "args": list(args),
            "processes": n,
            "coordinator": address,
            "distributed": distributed,
            "parent_pid": os.getpid(),
            "package_root": str(_PACKAGE_ROOT),
        }
        try:
            for rank, process_id in enumerate(ids):
                place = ChildProcess(
                    rank=rank,
                    process_id=process_id,
                    processes=n,
                    coordinator=address,
                    events=str(self._file("events", rank)),
                )
                self._start(python or sys.executable, orders, place, environment)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._children)

    # Watching.

    def wait(self, timeout_secs: float) -> list[Any]:
        """Waits until all have finished; the results in order of rank, None for killed ones.

        Raises:
            ProcessFailedError: a process raised, or ended without a result.
            WaitTimeoutError: not all had finished in time; the message shows where they hang.
        """
        deadline = Deadline.after(timeout_secs)
        try:
            wait_for(
                self._all_finished,
                deadline,
                "the processes to finish",
                missing=lambda: [f"process {rank}" for rank in self._unfinished()],
            )
        except WaitTimeoutError as late:
            self._show_stacks(late)
        results = [self._outcome(rank).get("value") for rank in range(len(self))]
        self._let_go()
        return results

    def wait_for(
        self,
        name: str,
        *,
        rank: int | None = None,
        where: Callable[[Event], bool] | None = None,
        timeout_secs: float = 60.0,
    ) -> Event:
        """Waits for the next event called `name`: each event is returned once.

        Args:
            name: of the event, as given to `report`.
            rank: of the process; None for any.
            where: passes over the events for which it is false.
            timeout_secs: seconds to wait.

        Raises:
            ProcessFailedError: the process raised, or ended without the event.
            WaitTimeoutError: the event did not come; the message shows where the process hangs.
        """
        ranks = range(len(self)) if rank is None else (rank,)
        try:
            return wait_for(
                lambda: self._next_event(name, ranks, where or (lambda event: True)),
                Deadline.after(timeout_secs),
                f"the event {name!r}",
                missing=lambda: [f"process {rank}" for rank in ranks],
            )
        except WaitTimeoutError as late:
            self._show_stacks(late)

    def wait_for_all(self, name: str, *, timeout_secs: float = 60.0) -> list[Event]:
        """The next event called `name` of each process that was not killed, in order of rank."""
        deadline = Deadline.after(timeout_secs)
        return [
            self.wait_for(name, rank=rank, timeout_secs=deadline.remaining())
            for rank in range(len(self))
            if rank not in self._killed
        ]

    def events(self, rank: int) -> list[Event]:
        """Everything that a process has reported so far."""
        for line in self._new_lines(rank):
            parsed = json.loads(line)
            self._events[rank].append(Event(parsed["name"], rank, parsed["fields"]))
        return list(self._events[rank])

    def output(self, rank: int) -> str:
        """What a process has written to stdout and stderr so far."""
        return self._file("output", rank).read_text(encoding="utf-8", errors="replace")

    def poll(self) -> list[int | None]:
        """The exit code of each process; None while it runs, negative for a signal."""
        return [child.poll() for child in self._children]

    def pid(self, rank: int) -> int:
        """The process id that the operating system gave."""
        return self._children[rank].pid

    # Doing harm.

    def kill(self, rank: int, signal: int = _SIGKILL) -> None:
        """Sends a signal to a process and its children; returns when SIGKILL has taken effect."""
        self._killed.add(rank)
        self._signal(rank, signal)
        if signal == _SIGKILL:
            self._children[rank].wait()

    def stop(self, rank: int) -> None:
        """Freezes a process."""
        self._signal(rank, signal.SIGSTOP)

    def cont(self, rank: int) -> None:
        """Lets a frozen process go on."""
        self._signal(rank, signal.SIGCONT)

    def close(self) -> None:
        """Kills what still runs and removes the outputs. May be called twice."""
        for rank in range(len(self)):
            self._signal(rank, signal.SIGKILL)
        for child in self._children:
            child.wait()
            if child.stdin:
                child.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Inside.

    def _start(
        self, python: str, orders: dict[str, Any], place: ChildProcess, environment: dict[str, str]
    ) -> None:
        path = self._file("orders", place.rank)
        result = str(self._file("result", place.rank))
        path.write_text(json.dumps({**orders, "process_id": place.process_id, "result": result}))
        with open(self._file("output", place.rank), "wb") as output:
            child = subprocess.Popen(
                [python, "-P", str(_CHILD), str(path)],
                env={**environment, PLACE_VARIABLE: json.dumps(dataclasses.asdict(place))},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                # Its own process group, so that a signal reaches its children too.
                start_new_session=True,
            )
        self._children.append(child)

    def _file(self, kind: str, rank: int) -> Path:
        return self._folder / f"{kind}-{rank}"

    def _new_lines(self, rank: int) -> list[bytes]:
        """The whole lines that were added to the events of a process since the last look."""
        try:
            with open(self._file("events", rank), "rb") as events:
                events.seek(self._read_bytes[rank])
                # The last line may still be under way.
                whole, newline, _ = events.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read_bytes[rank] += len(whole) + len(newline)
        return whole.splitlines()

    def _signal(self, rank: int, number: int) -> None:
        child = self._children[rank]
        if child.poll() is None:
            os.killpg(child.pid, number)

    def _outcome(self, rank: int) -> dict[str, Any]:
        """The result or error of a process; empty while there is none."""
        try:
            found: dict[str, Any] = json.loads(self._file("result", rank).read_text())
        except FileNotFoundError:
            return {}
        return found

    def _unfinished(self) -> Iterator[int]:
        for rank in range(len(self)):
            if rank not in self._killed and not self._outcome(rank):
                yield rank

    def _all_finished(self) -> bool | None:
        for rank in range(len(self)):
            self._check(rank)
        return True if not list(self._unfinished()) else None

    def _check(self, rank: int) -> None:
        """Raises when a process failed, except a killed one."""
        code = self._children[rank].poll()
        outcome = self._outcome(rank)
        if "error" in outcome and rank not in self._killed:
            message = f"process {rank} raised {outcome['summary']}\n\n{outcome['error']}"
            self._fail(rank, message)
        if code is not None and not outcome and rank not in self._killed:
            self._fail(rank, f"process {rank} ended with {_ending(code)} and without a result")

    def _fail(self, rank: int, message: str) -> NoReturn:
        raise ProcessFailedError(
            message + self._outputs(), rank=rank, output=_tail(self.output(rank))
        )

    def _outputs(self) -> str:
        return "".join(
            f"\n--- output of process {rank} ---\n{_tail(self.output(rank))}"
            for rank in range(len(self))
        )

    def _show_stacks(self, late: WaitTimeoutError) -> NoReturn:
        """Raises `late` again, with what every process wrote and where it is."""
        sizes = [len(self.output(rank)) for rank in range(len(self))]
        for rank in range(len(self)):
            self._signal(rank, signal.SIGUSR1)
        try:
            wait_for(
                lambda: self._have_grown(sizes) or None,
                Deadline.after(_SECONDS_TO_DUMP),
                "the stacks of the processes",
            )
        except WaitTimeoutError:
            pass  # A frozen or starting process shows none.
        late.add_note(self._outputs())
        raise late

    def _have_grown(self, sizes: Sequence[int]) -> bool:
        return all(len(self.output(rank)) > size for rank, size in enumerate(sizes))

    def _next_event(
        self, name: str, ranks: Sequence[int], where: Callable[[Event], bool]
    ) -> Event | None:
        for rank in ranks:
            # Before the events: what it reported just before its end must be seen.
            ended = self._children[rank].poll() is not None or bool(self._outcome(rank))
            for position, event in enumerate(self.events(rank)):
                fresh = position >= self._seen.get((name, rank), 0)
                if fresh and event.name == name and where(event):
                    self._seen[name, rank] = position + 1
                    return event
            self._check(rank)
            if ended and len(ranks) == 1:
                self._fail(rank, f"process {rank} ended without the event {name!r}")
        return None

    def _let_go(self) -> None:
        """Lets the processes end by themselves; `close` kills those that do not."""
        if self._killed:
            return  # The others would wait for the killed ones.
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("leave\n")
            child.stdin.close()
        deadline = Deadline.after(_SECONDS_TO_LEAVE)
        for rank, child in enumerate(self._children):
            try:
                child.wait(deadline.remaining())
            except subprocess.TimeoutExpired:
                self._fail(rank, f"process {rank} returned a result, but did not end")


def _environment(devices: int, extra: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        # Threads of the small arrays of tests only get into each other's way.
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **extra,
    }


def _target_name(target: Target) -> str:
    if isinstance(target, str):
        return target
    if "." in target.__qualname__:
        raise ValueError(f"{target.__qualname__} must be at the top of its module")
    module = inspect.getmodule(target)
    if module is not None and module.__package__ and module.__name__ != "__main__":
        return f"{module.__name__}:{target.__name__}"
    # A module outside any package, as test modules are: by its path.
    return f"{os.path.abspath(inspect.getfile(target))}:{target.__name__}"


def _free_port() -> int:
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port from {_PORTS.start} to {_PORTS.stop}")


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_SHOWN_LINES:])
