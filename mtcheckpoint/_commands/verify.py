"""``mtcheckpoint verify``."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from mtcheckpoint._verifying import Verdict

__all__ = ["add_arguments", "run"]

_COLOURS = {"good": "green", "bad": "red", "unreadable": "red", "no seal": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "places",
        nargs="+",
        metavar="PLACE",
        help="a node's volume, or a backup root, a job's folder in it or one dated backup: a path"
        " or any fsspec URL",
    )
    parser.add_argument("--job", metavar="NAME", help="verify this job's shares only")
    parser.add_argument("--json", action="store_true", help="print a list of objects, as JSON")
    parser.add_argument(
        "--require-seal",
        action="store_true",
        help="fail on shares without a seal, such as Orbax's own managers write",
    )
    parser.add_argument(
        "--timeout",
        type=_positive_seconds,
        default=60.0,
        metavar="SECS",
        help="seconds that one request or one chunk may take (default: 60)",
    )


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from mtcheckpoint._verifying import verify_places

    out = Console(highlight=False, markup=False, soft_wrap=True)
    verdicts = []
    # Where lines and bar share a terminal, one console must draw both.
    bar = out if out.is_terminal and not arguments.json else Console(stderr=True)
    with _progress(bar) as (on_total, on_bytes):
        for verdict in verify_places(
            arguments.places,
            timeout_secs=arguments.timeout,
            job=arguments.job,
            on_total=on_total,
            on_bytes=on_bytes,
        ):
            verdicts.append(verdict)
            if not arguments.json:
                _show(verdict, out)
    if arguments.json:
        print(json.dumps([verdict.to_json() for verdict in verdicts], indent=1))
    else:
        out.print(_summary(verdicts, arguments.places))
    failing = {"bad", "unreadable"} | ({"no seal"} if arguments.require_seal else set())
    return int(any(verdict.state in failing for verdict in verdicts))


@contextlib.contextmanager
def _progress(
    console: Console,
) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A bar of bytes on a terminal; nothing elsewhere."""
    from rich import progress

    columns = (
        progress.TextColumn("reading"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    bar = progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    )
    task = bar.add_task("", total=None)
    with bar:
        yield (
            lambda size_bytes: bar.update(task, total=size_bytes),
            lambda size_bytes: bar.advance(task, size_bytes),
        )


def _show(verdict: Verdict, out: Console) -> None:
    whose = [] if verdict.job is None else [verdict.job]
    whose += [] if verdict.step is None else [f"step {verdict.step}"]
    whose += [] if verdict.rank is None else [f"rank {verdict.rank}"]
    read = f"{_counted(verdict.chunks, 'chunk')}, {verdict.bytes:,} bytes"
    said = verdict.faults or ([read] if verdict.state == "good" else ["nothing to compare with"])
    where = f"{verdict.place} ({', '.join(whose)})" if whose else verdict.place
    for text in said:
        out.print(f"{verdict.state}: ", style=_COLOURS[verdict.state], end="")
        out.print(f"{where}: {text}")


def _summary(verdicts: Sequence[Verdict], places: Sequence[str]) -> str:
    if not verdicts:
        return f"no shares lie in {', '.join(places)}"
    counts = collections.Counter(verdict.state for verdict in verdicts)
    listed = ", ".join(f"{counts[state]} {state}" for state in sorted(counts))
    size_bytes = sum(verdict.bytes for verdict in verdicts)
    return f"{_counted(len(verdicts), 'share')}: {listed}; {size_bytes:,} bytes read"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _positive_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds above 0, found {text}")
    return seconds
