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
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint.errors import WaitTimeoutError
from mtcheckpoint.testing._process import Event, Process, ProcessFailedError
from mtcheckpoint.testing._reports import PLACE_VARIABLE, ChildProcess
from mtcheckpoint.testing._starting import child_environment

__all__ = ["ProcessGroup", "Target", "run_processes"]

Target = str | Callable[..., Any]

_SIGKILL = signal.SIGKILL  # `kill` has an argument of the module's name.
_SECONDS_TO_LEAVE = 10.0
_SECONDS_TO_DUMP = 1.0

# Below the range from which the kernel takes the ports of outgoing connections, so that none of
# them takes the port between our look and its use.
_PORTS = range(20_000, 32_000)


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
        orders = {
            "target": _target_name(target),
            "args": list(args),
            "processes": n,
            "coordinator": f"127.0.0.1:{_free_port()}",
            "distributed": distributed,
        }
        environment = child_environment(devices, env or {})
        self._folder = Path(tempfile.mkdtemp(prefix="mtcheckpoint-processes-"))
        self._processes: list[Process] = []
        self._seen: dict[tuple[str, int], int] = {}
        try:
            for process_id in ids:
                self._start({**orders, "process_id": process_id}, environment, python)
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
        return len(self._processes)

    # Watching.

    def wait(self, timeout_secs: float) -> list[Any]:
        """Waits until all have finished; the results in order of rank, None for killed ones.

        Without a killed one, the processes then leave as they would by themselves, so that a
        thread which keeps one from ending is noticed.

        Raises:
            ProcessFailedError: a process raised, or ended without a result.
            WaitTimeoutError: not all had finished in time; the message shows where they hang.
        """
        self._wait_for_each(
            lambda process: process.finished(), "the processes to finish", timeout_secs
        )
        results = [process.outcome().get("value") for process in self._processes]
        if not any(process.killed for process in self._processes):
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
        processes = self._processes if rank is None else [self._processes[rank]]
        try:
            return wait_for(
                lambda: self._next_event(name, processes, where or (lambda event: True)),
                Deadline.after(timeout_secs),
                f"the event {name!r}",
                missing=lambda: [f"process {process.rank}" for process in processes],
            )
        except WaitTimeoutError as late:
            self._add_stacks(late)
            raise

    def wait_for_all(self, name: str, *, timeout_secs: float = 60.0) -> list[Event]:
        """The next event called `name` of each process that was not killed, in order of rank."""
        deadline = Deadline.after(timeout_secs)
        return [
            self.wait_for(name, rank=process.rank, timeout_secs=deadline.remaining())
            for process in self._processes
            if not process.killed
        ]

    def events(self, rank: int) -> list[Event]:
        """Everything that a process has reported so far."""
        return self._processes[rank].events()

    def output(self, rank: int) -> str:
        """What a process has written to stdout and stderr so far."""
        return self._processes[rank].output()

    def poll(self) -> list[int | None]:
        """The exit code of each process; None while it runs, negative for a signal."""
        return [process.poll() for process in self._processes]

    def pid(self, rank: int) -> int:
        """The number that the operating system gave the process."""
        return self._processes[rank].pid

    # Doing harm.

    def kill(self, rank: int, signal: int = _SIGKILL) -> None:
        """Sends a signal to a process and its children; nothing is expected of it any more.

        Returns when SIGKILL has taken effect; does not wait for other signals.
        """
        process = self._processes[rank]
        process.killed = True
        if signal == _SIGKILL:
            process.kill()
        else:
            process.signal(signal)

    def stop(self, rank: int) -> None:
        """Freezes a process."""
        self._processes[rank].signal(signal.SIGSTOP)

    def cont(self, rank: int) -> None:
        """Lets a frozen process go on."""
        self._processes[rank].signal(signal.SIGCONT)

    def close(self) -> None:
        """Kills what still runs and removes the outputs. May be called twice."""
        for process in self._processes:
            process.signal(signal.SIGKILL)
        for process in self._processes:
            process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Inside.

    def _start(
        self, orders: dict[str, Any], environment: dict[str, str], python: str | None
    ) -> None:
        rank = len(self._processes)
        events = self._folder / f"events-{rank}"
        place = ChildProcess(
            rank=rank,
            process_id=orders["process_id"],
            processes=orders["processes"],
            coordinator=orders["coordinator"],
            events=str(events),
        )
        process = Process(
            rank,
            orders=orders,
            folder=self._folder,
            events=events,
            environment={**environment, PLACE_VARIABLE: json.dumps(dataclasses.asdict(place))},
            python=python or sys.executable,
        )
        self._processes.append(process)

    def _wait_for_each(
        self, done: Callable[[Process], bool], what: str, timeout_secs: float
    ) -> None:
        def undone() -> list[str]:
            return [f"process {p.rank}" for p in self._processes if not done(p)]

        def look() -> bool | None:
            # First: how a process has ended is seen when it is done, and not before.
            waiting = undone()
            for process in self._processes:
                self._check(process)
            return None if waiting else True

        try:
            wait_for(look, Deadline.after(timeout_secs), what, missing=undone)
        except WaitTimeoutError as late:
            self._add_stacks(late)
            raise

    def _let_go(self) -> None:
        for process in self._processes:
            process.let_go()
        self._wait_for_each(
            lambda process: process.poll() is not None,
            "the processes to end after their results",
            _SECONDS_TO_LEAVE,
        )

    def _next_event(
        self, name: str, processes: Sequence[Process], where: Callable[[Event], bool]
    ) -> Event | None:
        # Before the events: what was reported just before the end must be seen.
        over = all(process.finished() for process in processes)
        for process in processes:
            seen = self._seen.get((name, process.rank), 0)
            for position, event in enumerate(process.events()[seen:], seen):
                if event.name == name and where(event):
                    self._seen[name, process.rank] = position + 1
                    return event
            self._check(process)
        if over:
            rank = processes[0].rank
            self._fail(processes[0], f"process {rank} ended without the event {name!r}")
        return None

    def _check(self, process: Process) -> None:
        fault = process.fault()
        if fault is not None:
            self._fail(process, fault)

    def _fail(self, process: Process, message: str) -> NoReturn:
        raise ProcessFailedError(
            message + self._outputs(), rank=process.rank, output=process.output_tail()
        )

    def _outputs(self) -> str:
        return "".join(
            f"\n--- output of process {process.rank} ---\n{process.output_tail()}"
            for process in self._processes
        )

    def _add_stacks(self, late: WaitTimeoutError) -> None:
        """Adds to the error what every process wrote and where it is."""
        sizes = [len(process.output()) for process in self._processes]

        def have_all_grown() -> bool | None:
            now = [len(process.output()) for process in self._processes]
            return all(new > old for new, old in zip(now, sizes, strict=True)) or None

        for process in self._processes:
            process.dump_stacks()
        try:
            wait_for(have_all_grown, Deadline.after(_SECONDS_TO_DUMP), "the stacks")
        except WaitTimeoutError:
            pass  # A process that is frozen, or has ended, shows none.
        late.add_note(self._outputs())


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
