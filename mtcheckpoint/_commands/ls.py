"""``mtcheckpoint ls``."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from mtcheckpoint._listed import Row

__all__ = ["add_arguments", "run"]

_COLOURS = {"complete": "green", "incomplete": "yellow", "damaged": "red", "foreign": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "places",
        nargs="+",
        metavar="PLACE",
        help="a node's volume (several are judged together), or a backup root, a job's folder in"
        " it or one dated backup: a path or any fsspec URL",
    )
    parser.add_argument("--job", metavar="NAME", help="show this job only")
    parser.add_argument("--json", action="store_true", help="print a list of objects, as JSON")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECS",
        help="seconds that one request to a bucket may take (default: 60)",
    )


def run(arguments: argparse.Namespace) -> int:
    from mtcheckpoint._listing import list_places

    rows = list_places(arguments.places, job=arguments.job, timeout_secs=arguments.timeout)
    if arguments.json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    else:
        _show(rows, arguments.places)
    return 0


def _show(rows: Sequence[Row], places: Sequence[str]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not rows:
        console.print(f"nothing lies in {', '.join(places)}")
    for place, group in itertools.groupby(rows, key=lambda row: row.place):
        together = list(group)
        console.print(place, style="bold")
        steps = [row for row in together if row.step is not None]
        if steps:
            console.print(_table(steps))
        for row in together:
            if row.step is None:
                console.print(f"  {_state(row)}", style=_COLOURS[row.state])


def _table(rows: Iterable[Row]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("job", overflow="fold")
    table.add_column("step", justify="right")
    table.add_column("ranks", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for row in rows:
        table.add_row(
            Text(row.job or "?"),
            str(row.step),
            _ranks(row),
            _size(row.size_bytes) if row.size_bytes else "",
            "" if row.age_secs is None else _age(row.age_secs),
            Text(_state(row), style=_COLOURS[row.state]),
        )
    return table


def _ranks(row: Row) -> str:
    from mtcheckpoint._listed import spelled_ranks

    if not row.ranks:
        return ""
    held = spelled_ranks(row.ranks).partition(" ")[2]
    return f"{held} of {row.nodes}" if row.nodes else held


def _state(row: Row) -> str:
    text = {"complete": "complete", "incomplete": row.note}.get(
        row.state, f"{row.state}: {row.note}"
    )
    return f"{text}, by Orbax" if row.written_by == "orbax" else text


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def _age(seconds: float) -> str:
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds / unit)} {name}"
    return f"{int(seconds / 86400)} d"
