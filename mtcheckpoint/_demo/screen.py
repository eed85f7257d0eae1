"""A live view in a terminal, and a few lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mtcheckpoint._demo.view import NodeView, View

__all__ = ["LiveScreen", "PlainScreen", "Screen", "clock_text", "screen_for", "sparkline"]

_REFRESH_SECONDS = 0.15
_BARS = "▁▂▃▄▅▆▇█"
_SPARKS = 40
_STATE_STYLES = {"starting": "yellow", "compiling": "cyan", "training": "green", "gone": "dim red"}


class Screen(Protocol):
    """Where the demo is shown."""

    def __enter__(self) -> Screen: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def say(self, text: str, seconds: float, *, style: str = "") -> None:
        """Something has happened, `seconds` after the start."""

    def update(self, view: Callable[[], View]) -> None:
        """Shows the job as it is now; `view` is called only when it is time for it."""


def screen_for(console: Console, *, live: bool) -> Screen:
    """The live view when it is wanted and `console` is a terminal, else plain lines."""
    return LiveScreen(console) if live and console.is_terminal else PlainScreen(console)


class PlainScreen:
    """One line for each event."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def say(self, text: str, seconds: float, *, style: str = "") -> None:
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(Text(clock_text(seconds), style="dim"), Text(text, style=style))
        self._console.print(line)
        self._console.file.flush()

    def update(self, view: Callable[[], View]) -> None:
        """Nothing: what counts is said."""


class LiveScreen(PlainScreen):
    """The job at the bottom of the terminal, the events above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._next_refresh = 0.0

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def update(self, view: Callable[[], View]) -> None:
        now = time.monotonic()
        if now >= self._next_refresh:
            self._next_refresh = now + _REFRESH_SECONDS
            self._live.update(rendered(view()), refresh=True)


def rendered(view: View) -> RenderableType:
    """The view as a table of nodes between two lines; 9 lines, at most 80 columns."""
    act = Text.assemble((clock_text(view.seconds), "dim"), "  ", (view.act, "bold"))
    return Padding(
        Group(act, _nodes_table(view), _loss_line(view), _safety_line(view)), (1, 0, 0, 0)
    )


def _nodes_table(view: View) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("node")
    table.add_column("process", min_width=9)
    table.add_column("step", justify="right", min_width=5)
    table.add_column("saved", justify="right", min_width=5)
    table.add_column("in this node's memory", no_wrap=True)
    for node in view.nodes:
        style = _STATE_STYLES[node.state]
        table.add_row(
            str(node.rank),
            f"[{style}]{node.state}[/]",
            _number(node.step),
            _number(node.saved_step),
            _held_text(node, view.replicated_step),
        )
    return table


def _held_text(node: NodeView, replicated_step: int | None) -> Text:
    """Own share first; green where it is of the newest step that all nodes hold."""
    if not node.held:
        return Text("-" if node.state == "gone" else "nothing", style="dim")
    parts = []
    for rank, step in sorted(node.held.items(), key=lambda item: item[0] != node.rank):
        owner = "own share" if rank == node.rank else f"copy of {rank}"
        fresh = replicated_step is not None and step >= replicated_step
        parts.append(Text(f"{owner} {step}", style="green" if fresh else "yellow"))
    return Text("  ").join(parts)


def _loss_line(view: View) -> Text:
    if not view.losses:
        return Text("loss  -", style="dim")
    return Text.assemble(
        ("loss  ", "dim"), f"{view.losses[-1]:.2f}  ", (sparkline(view.losses), "magenta")
    )


def _safety_line(view: View) -> Text:
    return Text.assemble(
        ("newest step on all nodes, with copies  ", "dim"),
        (_number(view.replicated_step), "green"),
        ("    in the backup  ", "dim"),
        (_number(view.backup_step), "blue"),
    )


def sparkline(values: Sequence[float], width: int = _SPARKS) -> str:
    """`values` as bars, evened out to at most `width` of them; the lowest is the smallest bar."""
    size = -(-len(values) // width)
    pieces = [values[start : start + size] for start in range(0, len(values), size)]
    means = [sum(piece) / len(piece) for piece in pieces]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BARS[int((mean - low) / span * (len(_BARS) - 1))] for mean in means)


def clock_text(seconds: float) -> str:
    """Minutes and seconds, as on a stopwatch."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
