"""The job as its owner sees it: started, watched, struck, started again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from pathlib import Path
from types import TracebackType

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint._demo.interrupts import Interrupts
from mtcheckpoint._demo.view import Copies, NodeState, NodeView
from mtcheckpoint._handshake.files import parse_share_name
from mtcheckpoint._replicator.embedded import EmbeddedReplicator
from mtcheckpoint.testing import Event, NodeDirectories, ProcessFailedError, ProcessGroup, ram_disk

__all__ = ["NODES", "Job"]

NODES = 4
_DEVICES_PER_NODE = 2
_BACKUP_INTERVAL_STEPS = 10
_WIPE_SECONDS = 10.0
_SHOWN_LINES = 15


@dataclasses.dataclass(slots=True)
class _Progress:
    """What one process of the current run has reported."""

    events_read: int = 0
    step: int | None = None
    is_restored: bool = False
    restored_step: int | None = None
    tier: str | None = None
    passed_over: list[tuple[int | None, str]] = dataclasses.field(default_factory=list)
    differing: list[str] | None = None
    committed: list[int] = dataclasses.field(default_factory=list)
    failure: str | None = None

    @property
    def newest_committed(self) -> int | None:
        return self.committed[-1] if self.committed else self.restored_step

    @property
    def state(self) -> NodeState:
        if self.step is not None:
            return "training"
        return "compiling" if self.is_restored else "starting"


class Job:
    """A training job on up to `NODES` nodes, their memory, their replicator and its backup.

    A process runs on each of the first nodes.

    A context manager: leaving it ends every process and removes every folder. To be used on the
    main thread, which the processes die with.

    Args:
        interrupts: held back while processes and folders are being made.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._stack = contextlib.ExitStack()
        self._group: ProcessGroup | None = None
        self._run = 0
        self._progress = [_Progress() for _ in range(NODES)]
        # For each run that has begun: the step that it restored, and its processes.
        self._begun: list[tuple[int, int]] = []
        self._losses: dict[int, float] = {}
        self.committed_steps: list[list[int]] = []

    def __enter__(self) -> Job:
        with contextlib.ExitStack() as stack:
            with self._interrupts.held_back():
                self._make_places(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    # Acting.

    def start(self, processes: int = NODES) -> None:
        """Starts a process on each of the first nodes; returns at once."""
        self._run += 1
        self._progress = [_Progress() for _ in range(processes)]
        orders = {
            "run": self._run,
            "nodes": [str(path) for path in self.nodes][:processes],
            "backup": str(self._backup),
            "ledger": str(self._ledger),
            "backup_interval_steps": _BACKUP_INTERVAL_STEPS,
        }
        with self._interrupts.held_back():
            self._group = ProcessGroup(
                "mtcheckpoint._demo.worker:train",
                processes,
                devices=_DEVICES_PER_NODE,
                args=[orders],
            )

    def kill(self, rank: int) -> None:
        """Kills one process, as the kernel does when memory runs out."""
        assert self._group is not None
        self._group.kill(rank)

    def end(self) -> None:
        """Ends all processes: what is left of a job cannot go on without the one that is gone."""
        if self._group is None:
            return
        for rank in range(self.processes):
            self._group.kill(rank)
        self._read_events()
        self.committed_steps.append(self._progress[0].committed)
        self._close_group()

    def wipe(self, rank: int) -> None:
        """The node is replaced: what was in its memory is gone."""

        def look() -> bool | None:
            # The replicator may be copying into it, so it can take more than one go.
            with contextlib.suppress(OSError):
                self.nodes.wipe(rank)
            return True if not self.nodes.entries(rank) else None

        wait_for(look, Deadline.after(_WIPE_SECONDS), f"an empty {self.nodes[rank]}")

    # Watching.

    def check(self) -> None:
        """Reads what is new.

        Raises:
            ProcessFailedError: a process has failed; shows the end of its output, and where the
                outputs of all are kept.
        """
        self._read_events()
        if self._group is None:
            return
        codes = self._group.poll()
        for rank, progress in enumerate(self._progress):
            if progress.failure is not None or codes[rank] is not None:
                raise self._failed(rank)

    @property
    def processes(self) -> int:
        """How many processes this run has."""
        return len(self._progress)

    @property
    def is_restored(self) -> bool:
        """All processes have their state back, or know that there is none."""
        return all(progress.is_restored for progress in self._progress)

    @property
    def is_compared(self) -> bool:
        return all(progress.differing is not None for progress in self._progress)

    @property
    def state_matches(self) -> bool:
        """Every array on every process is what was saved."""
        return all(progress.differing == [] for progress in self._progress)

    @property
    def restored_step(self) -> int | None:
        steps = {progress.restored_step for progress in self._progress}
        assert len(steps) == 1, f"the processes restored different steps: {steps}"
        return steps.pop()

    @property
    def tier(self) -> str | None:
        return self._progress[0].tier

    @property
    def passed_over(self) -> list[tuple[int | None, str]]:
        """Newer steps that did not come back, and why."""
        return self._progress[0].passed_over

    @property
    def step(self) -> int:
        """The last step that all processes have trained; -1 before the first."""
        return min(-1 if p.step is None else p.step for p in self._progress)

    @property
    def trained_steps(self) -> int:
        """Steps trained in this run."""
        restored = self._progress[0].restored_step
        return max(0, self.step - (-1 if restored is None else restored))

    @property
    def saves(self) -> int:
        """Steps that all processes have committed in this run."""
        return min(len(progress.committed) for progress in self._progress)

    @property
    def last_committed_step(self) -> int | None:
        """The newest step that all processes have committed."""
        steps = [progress.newest_committed for progress in self._progress]
        known = [step for step in steps if step is not None]
        return min(known) if len(known) == self.processes else None

    @property
    def backup_step(self) -> int | None:
        """The newest step of which the backup has the shares of all nodes that saved it."""
        holders: dict[int, set[int]] = {}
        for path in self._backup.glob("*/*/*.meta"):
            share = parse_share_name(path.name, "meta")
            if share is not None:
                holders.setdefault(share.step, set()).add(share.node_rank)
        whole = (step for step, ranks in holders.items() if len(ranks) >= self._nodes_of(step))
        return max(whole, default=None)

    @property
    def has_backup(self) -> bool:
        """A step of this run is in the backup."""
        return (self.backup_step or -1) > (self.restored_step or -1)

    @property
    def losses(self) -> list[float]:
        """The loss of every step that still counts, oldest first."""
        return [self._losses[step] for step in sorted(self._losses)]

    def node_views(self) -> list[NodeView]:
        return [self._node_view(rank) for rank in range(NODES)]

    # Inside.

    def _make_places(self, stack: contextlib.ExitStack) -> None:
        # Named by process, so that one that was left by a kill can be told from one in use.
        self.memory = stack.enter_context(ram_disk(f"mtcheckpoint-demo-{os.getpid()}-"))
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mtcheckpoint-demo-")))
        self.nodes = NodeDirectories(self.memory, NODES)
        self._backup, self._ledger = disk / "bucket", disk / "ledger"
        self._backup.mkdir()
        self._ledger.mkdir()
        self._replicator = stack.enter_context(
            EmbeddedReplicator(list(self.nodes), str(self._backup))
        )
        stack.callback(self._close_group)

    def _node_view(self, rank: int) -> NodeView:
        if rank >= self.processes:
            return NodeView(rank=rank, state="gone", step=None, saved_step=None, held={})
        progress = self._progress[rank]
        return NodeView(
            rank=rank,
            state=progress.state,
            step=progress.step,
            saved_step=progress.newest_committed,
            held=self._held(rank),
        )

    def _nodes_of(self, step: int) -> int:
        """On how many nodes the run was that saved a step: the last that began before it."""
        sizes = [processes for restored, processes in self._begun if restored < step]
        return sizes[-1] if sizes else NODES

    def _held(self, rank: int) -> Copies:
        held: dict[int, int] = {}
        for name in self.nodes.entries(rank):
            share = parse_share_name(name, "meta")
            if share is not None:
                held[share.node_rank] = max(share.step, held.get(share.node_rank, -1))
        return held

    def _read_events(self) -> None:
        if self._group is None:
            return
        for rank, progress in enumerate(self._progress):
            events = self._group.events(rank)
            for event in events[progress.events_read :]:
                self._note(rank, progress, event)
            progress.events_read = len(events)

    def _note(self, rank: int, progress: _Progress, event: Event) -> None:
        match event.name:
            case "step":
                progress.step = event["step"]
                self._losses[event["step"]] = event["loss"]
            case "committed":
                progress.committed.append(event["step"])
            case "restored":
                progress.is_restored = True
                progress.restored_step = event["step"]
                progress.tier = event.fields.get("tier")
                progress.passed_over = event.fields.get("passed_over", [])
                self._forget_losses_after(event["step"])
                if rank == 0:
                    self._begun.append((event["step"] or -1, self.processes))
            case "compared":
                progress.differing = event["differing"]
            case "failed":
                progress.failure = event["error"]

    def _forget_losses_after(self, step: int | None) -> None:
        self._losses = {s: loss for s, loss in self._losses.items() if s <= (step or 0)}

    def _failed(self, rank: int) -> ProcessFailedError:
        assert self._group is not None
        outputs = [self._group.output(other) for other in range(self.processes)]
        descriptor, kept = tempfile.mkstemp(prefix="mtcheckpoint-demo-", suffix=".log")
        with os.fdopen(descriptor, "w") as log:
            for other, output in enumerate(outputs):
                log.write(f"--- output of process {other} ---\n{output}\n")
        output = "\n".join(outputs[rank].splitlines()[-_SHOWN_LINES:])
        reason = (self._progress[rank].failure or "").strip().splitlines()
        why = reason[-1] if reason else f"it ended with status {self._group.poll()[rank]}"
        return ProcessFailedError(
            f"process {rank} of the demo's job failed: {why}\n{output}\nAll outputs: {kept}",
            rank=rank,
            output=output,
        )

    def _close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
