"""``python -m benchmarks.report [FILE]``: results as a page with a table and plots, for docs/.

`FILE` is what ``python -m benchmarks --json`` wrote; it is kept beside the page, so that a test can
compare the two. Without it the page is made anew from what is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.goals import GOALS, GROUPS, Goal, goal_of

__all__ = ["PAGE", "PLOTS", "README", "RESULTS", "digest_of", "main", "page", "with_figures"]

_ROOT = Path(__file__).parents[1]
README = _ROOT / "README.md"
PAGE = _ROOT / "docs" / "benchmarks.md"
FOLDER = _ROOT / "docs" / "benchmarks"
RESULTS = FOLDER / "results.json"
REASONS = FOLDER / "reasons.yaml"
PLOTS = {
    "ratios.svg": "Ratio of each case with its spread and its goal",
    "times.svg": "Time of each case, ours and the other's",
    "timeline.svg": "Work that a kill would lose, with continuous saves and with a period",
}

_FIGURES = re.compile(
    r"<!-- benchmark figures -->\n.*<!-- end of the benchmark figures -->\n", re.S
)
_QUOTED = (
    "save_vs_orbax_replicator",
    "restore_vs_orbax_replicator",
    "blocked_vs_orbax_replicator",
    "save_vs_torch_dcp",
    "load_vs_torch_dcp",
    "save_vs_raw_tmpfs",
    "restore_vs_raw_tmpfs",
    "handshake",
    "interval",
    "step_slowdown",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="results; those kept in docs/ without")
    arguments = parser.parse_args(argv)
    if arguments.file is not None:
        FOLDER.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(json.loads(arguments.file.read_text()), indent=1) + "\n")
    write()
    return 0


def write() -> None:
    """Writes the page, the plots and the README's figures from the results that are kept."""
    from benchmarks import plots  # matplotlib is not needed to read the page

    found, reasons = read()
    PAGE.write_text(page(found, reasons))
    README.write_text(with_figures(README.read_text(), found))
    plots.draw(found, FOLDER, digest_of(RESULTS))


def read() -> tuple[dict[str, Any], dict[str, str]]:
    """The results that are kept, and why some goals are not met."""
    reasons = yaml.safe_load(REASONS.read_text()) if REASONS.exists() else None
    return json.loads(RESULTS.read_text()), reasons or {}


def digest_of(results: Path) -> str:
    """Names the results, so that a plot can say which ones it shows."""
    return hashlib.sha256(results.read_bytes()).hexdigest()[:16]


# The page.


def page(found: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """The whole page, as Markdown."""
    results = sorted(found["results"], key=lambda result: list(GOALS).index(result["case"]))
    parts = [
        _HEAD,
        _machine(found["machine"]),
        *(_plot(name) for name in PLOTS if name != "timeline.svg" or _has_timeline(results)),
        *_tables(results),
        _unmet(results, reasons),
        _notes(results),
        _missing(results),
    ]
    return "\n".join(part for part in parts if part)


_HEAD = """# Benchmarks

<!-- Written by `python -m benchmarks.report` from benchmarks/results.json: change that instead. -->

What the library costs, measured beside what people would use instead and beside the limit of the
machine, in turns in one run. A ratio is the median over pairs that were measured one after the
other, with the lowest and the highest pair. Absolute times depend on the machine and are not
judged.

To measure again: `pip install -e '.[test,bench]'`, then the command below with `--json FILE`, then
`python -m benchmarks.report FILE`. Cases opposite Google's replicator need
`MTCHECKPOINT_REPLICATOR_SRC`, see [CONTRIBUTING](../CONTRIBUTING.md).
"""


def _machine(machine: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    rows = {
        "command": f"`{machine['command']}`" if "command" in machine else "",
        "processor": f"{machine['cpu']}, {machine['cores']} cores, no accelerator",
        "memory": f"{machine['memory_bytes'] / 2**30:.0f} GiB",
        "system": machine["system"],
        "versions": f"Python {machine['python']}, {packages}",
        "load average before": f"{machine['load_average']:.1f}"
        if "load_average" in machine
        else "",
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value]
    return "\n".join(["| | |", "| --- | --- |", *lines, ""])


def _plot(name: str) -> str:
    return f"![{PLOTS[name]}](benchmarks/{name})\n"


def _has_timeline(results: Sequence[Mapping[str, Any]]) -> bool:
    return any("data" in result for result in results)


def _tables(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for group, meaning in GROUPS.items():
        inside = [result for result in results if goal_of(result).group == group]
        if inside:
            yield f"## {group}\n\n{meaning}\n"
            yield "| case | compared with | ratio | pairs | goal | met | ours | other |"
            yield "| --- | --- | ---: | --- | --- | --- | ---: | ---: |"
            yield "\n".join(map(_row, inside)) + "\n"


def _row(result: Mapping[str, Any]) -> str:
    goal = goal_of(result)
    low, high = result["spread"]
    cells = [
        f"`{result['case']}`",
        goal.title,
        _number(result["ratio"]),
        f"{_number(low)} to {_number(high)}",
        str(goal),
        _met(goal, result["ratio"]),
        amount(result["ours"], result["unit"]),
        amount(result["other"], result["unit"]),
    ]
    return f"| {' | '.join(cells)} |"


def _met(goal: Goal, ratio: float) -> str:
    return {True: "yes", False: "**no**", None: ""}[goal.is_met(ratio)]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


def amount(value: float, unit: str) -> str:
    """A value with its unit, as people read it."""
    scales: list[tuple[float, str]] = {
        "s": [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs")],
        "B": [(2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")],
    }.get(unit, [(1.0, unit)])
    scale, name = next((pair for pair in scales if value >= pair[0]), scales[-1])
    return f"{value / scale:.3g} {name}"


def _unmet(results: Sequence[Mapping[str, Any]], reasons: Mapping[str, str]) -> str:
    unmet = [r["case"] for r in results if goal_of(r).is_met(r["ratio"]) is False]
    if not unmet:
        return ""
    lines = [_item(case, reasons.get(case, "no reason is noted yet.")) for case in unmet]
    return "\n".join(["## Goals that are not met\n", *lines, ""])


def _notes(results: Sequence[Mapping[str, Any]]) -> str:
    lines = [_item(result["case"], result["notes"]) for result in results]
    return "\n".join(["## What was measured\n", *lines, ""])


def _item(case: str, text: str) -> str:
    return _wrapped(f"- `{case}`: {text}", subsequent_indent="  ")


def _wrapped(text: str, **options: Any) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False, **options)


def _missing(results: Sequence[Mapping[str, Any]]) -> str:
    names = [f"`{case}`" for case in GOALS if case not in {r["case"] for r in results}]
    return _wrapped(f"Not part of this run: {', '.join(names)}.") + "\n" if names else ""


# The README.


def with_figures(readme: str, found: Mapping[str, Any]) -> str:
    """The README with the figures of these results; unchanged without a place for them."""
    results = {result["case"]: result for result in found["results"]}
    lines = [_quote(results[case]) for case in _QUOTED if case in results]
    machine = found["machine"]
    block = "\n".join(
        [
            "<!-- benchmark figures -->",
            "| compared with | ratio | ours | other |",
            "| --- | ---: | ---: | ---: |",
            *lines,
            "",
            f"On {machine['cpu']} with {machine['cores']} cores, without an accelerator; medians of"
            " alternating pairs.",
            "All figures, goals and how they were measured:"
            " [docs/benchmarks.md](docs/benchmarks.md).",
            "<!-- end of the benchmark figures -->\n",
        ]
    )
    return _FIGURES.sub(lambda _: block, readme)


def _quote(result: Mapping[str, Any]) -> str:
    unit = result["unit"]
    ours, other = amount(result["ours"], unit), amount(result["other"], unit)
    title = goal_of(result).title
    return f"| {title} | {_number(result['ratio'])} | {ours} | {other} |"


if __name__ == "__main__":
    sys.exit(main())
