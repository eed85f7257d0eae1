"""The end of the demo: two tables for people, a JSON file for programs."""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from mtcheckpoint._demo.view import Recovery

__all__ = ["FIXED_PERIOD_STEPS", "checkpoint_distances", "summary_tables", "write_json"]

FIXED_PERIOD_STEPS = 100

_STYLE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "title_justify": "left",
    "title_style": "bold",
    "padding": (0, 2, 0, 0),
}

_FIELDS = (
    "scenario",
    "last_committed_step",
    "restored_step",
    "tier",
    "state_matches",
    "recovery_seconds",
)


def checkpoint_distances(committed_steps: Iterable[Sequence[int]]) -> list[int]:
    """Steps between neighbouring checkpoints of the same run of the job."""
    return [
        later - earlier for steps in committed_steps for earlier, later in itertools.pairwise(steps)
    ]


def summary_tables(recoveries: Sequence[Recovery], distances: Sequence[int]) -> RenderableType:
    """What was lost, what came back, and what a fixed period would have cost."""
    return Group(_recoveries_table(recoveries), _distances_table(distances))


def _recoveries_table(recoveries: Sequence[Recovery]) -> Table:
    table = Table(**_STYLE, title="How the job came back")
    table.add_column("what happened", no_wrap=True)
    table.add_column("back from", no_wrap=True)
    for name in ("saved", "back at", "lost", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("arrays", no_wrap=True)
    for recovery in recoveries:
        style = "green" if recovery.state_matches else "bold red"
        table.add_row(
            recovery.scenario.replace("-", " "),
            recovery.tier,
            str(recovery.last_committed_step),
            str(recovery.restored_step),
            str(recovery.steps_lost),
            f"{recovery.recovery_seconds:.1f}",
            f"[{style}]{'equal' if recovery.state_matches else 'DIFFERENT'}[/]",
        )
    return table


def _distances_table(distances: Sequence[int]) -> Table:
    table = Table(**_STYLE, title="What a loss costs")
    table.add_column("checkpoints")
    table.add_column("median distance", justify="right")
    table.add_column("lost on average", justify="right")
    rows = (
        ("continuous, as in this run", statistics.median(distances)),
        (f"fixed period of {FIXED_PERIOD_STEPS} steps", FIXED_PERIOD_STEPS),
    )
    for name, distance in rows:
        table.add_row(name, f"{distance:g} steps", f"{distance / 2:g} steps")
    return table


def write_json(
    path: Path, *, ok: bool, recoveries: Sequence[Recovery], distances: Sequence[int]
) -> None:
    """Writes the result, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    result: dict[str, Any] = {
        "ok": ok,
        "recoveries": [{name: getattr(r, name) for name in _FIELDS} for r in recoveries],
        "checkpoint_interval_p50_steps": float(statistics.median(distances)),
    }
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
