"""The plots of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.goals import GOALS, GROUPS, GROWTH, goal_of
from benchmarks.report import amount

__all__ = ["draw"]

# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
_OURS, _OTHER, _GOAL, _MISSED = "#0072B2", "#E69F00", "#000000", "#D55E00"
_GREY = "#666666"

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "mtcheckpoint",
}

Results = Sequence[Mapping[str, Any]]


def draw(found: Mapping[str, Any], folder: Path, digest: str, kind: str = "svg") -> None:
    """Draws all plots that the results allow into `folder`; each says which results it shows."""
    results = sorted(found["results"], key=lambda result: list(GOALS).index(result["case"]))
    timelines = [result["data"] for result in results if "data" in result]
    with plt.rc_context(_STYLE):  # type: ignore[arg-type]
        figures = {"ratios": _ratios(results), "times": _times(results)}
        if timelines:
            figures["timeline"] = _timeline(timelines[0])
        for name, figure in figures.items():
            about = {"Description": f"results {digest}", "Date": None} if kind == "svg" else {}
            figure.savefig(folder / f"{name}.{kind}", metadata=about, bbox_inches="tight", dpi=110)
            plt.close(figure)


# Ratios.


def _ratios(results: Results) -> Figure:
    groups = {g: [r for r in results if goal_of(r).group == g] for g in GROUPS}
    groups = {group: inside for group, inside in groups.items() if inside}
    heights = [len(inside) + 1.2 for inside in groups.values()]
    figure, rows = plt.subplots(
        len(groups),
        1,
        figsize=(9.5, 0.34 * sum(heights) + 1),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
        layout="constrained",
    )
    for axes, (group, inside) in zip(rows[:, 0], groups.items(), strict=True):
        _ratio_bars(axes, group, inside)
    figure.legend(handles=_ratio_legend(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _ratio_bars(axes: Axes, group: str, results: Results) -> None:
    for row, result in enumerate(results):
        goal, ratio, (low, high) = goal_of(result), result["ratio"], result["spread"]
        color = _MISSED if goal.is_met(ratio) is False else _OURS
        axes.barh(row, ratio - 1.0, left=1.0, color=color, height=0.62)
        axes.plot([low, high], [row, row], color=_GREY, linewidth=1.2, marker="|", markersize=7)
        if goal.bound is not None:
            axes.plot([goal.bound], [row], marker="D", color=_GOAL, markersize=5, linestyle="")
    axes.set_yticks(range(len(results)), [goal_of(r).title for r in results])
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlim(*_limits(results))
    axes.axvline(1.0, color=_GREY, linewidth=0.8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    low, high = axes.get_xlim()
    subs = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="y", length=0)
    hint = "less is better" if group == GROWTH else "more is better"
    axes.set_title(f"{group} ({hint})", loc="left", fontsize=10.5, fontweight="bold")
    for row, result in enumerate(results):
        at = max(result["spread"][1], result["ratio"], goal_of(result).bound or 0, 1.0)
        axes.annotate(
            f"{result['ratio']:.3g}",
            (at, row),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )


def _limits(results: Results) -> tuple[float, float]:
    values = [1.0]
    for result in results:
        values += [result["ratio"], *result["spread"]]
        values += [bound] if (bound := goal_of(result).bound) is not None else []
    return min(values) / 1.25, max(values) * 1.9


def _ratio_legend() -> list[Any]:
    patch = matplotlib.patches.Patch
    line = matplotlib.lines.Line2D
    return [
        patch(color=_OURS, label="ratio, the goal is met or there is none"),
        patch(color=_MISSED, label="goal not met"),
        line([], [], color=_GREY, marker="|", markersize=8, label="lowest to highest pair"),
        line([], [], color=_GOAL, marker="D", linestyle="", markersize=5, label="goal"),
    ]


# Times.


def _times(results: Results) -> Figure:
    timed = [result for result in results if result["unit"] == "s"]
    figure, axes = plt.subplots(figsize=(9.5, 0.34 * len(timed) + 1.2), layout="constrained")
    for row, result in enumerate(timed):
        ours, other = result["ours"], result["other"]
        axes.plot([ours, other], [row, row], color="#bbbbbb", linewidth=2, zorder=1)
        axes.plot([ours], [row], "o", color=_OURS, markersize=7, label="ours" if not row else None)
        axes.plot(
            [other], [row], "s", color=_OTHER, markersize=7, label="other" if not row else None
        )
        away = -1 if ours <= other else 1
        for value, side in ((ours, away), (other, -away)):
            axes.annotate(
                amount(value, "s"),
                (value, row),
                xytext=(9 * side, 0),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                va="center",
                fontsize=8.5,
            )
    axes.set_yticks(range(len(timed)), [goal_of(result).title for result in timed])
    axes.set_ylim(len(timed) - 0.4, -0.6)
    axes.set_xscale("log")
    values = [value for result in timed for value in (result["ours"], result["other"])]
    axes.set_xlim(min(values) / 6, max(values) * 6)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, "s")))
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time, medians, less is better")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return figure


# Checkpoints over time.


def _timeline(data: Mapping[str, Any]) -> Figure:
    names = {"continuous": "continuous saves", "period": "a save every 100 steps"}
    figure, rows = plt.subplots(
        2, 1, figsize=(9.5, 4.4), sharex=True, sharey=True, layout="constrained"
    )
    for axes, name, color in zip(rows, names, (_OURS, _OTHER), strict=True):
        times, lost = _sawtooth(data[name])
        axes.fill_between(times, lost, color=color, alpha=0.25, linewidth=0)
        axes.plot(times, lost, color=color, linewidth=1.2)
        commits = [seconds for _, _, seconds in data[name]["committed"]]
        axes.plot(commits, [0.0] * len(commits), "|", color=_GOAL, markersize=9)
        mean = np.trapezoid(lost, times) / (times[-1] - times[0])
        axes.set_title(
            f"{names[name]}: {len(commits)} checkpoints, a kill loses {mean:.2f} s on average",
            loc="left",
            fontsize=10.5,
        )
        axes.set_ylabel("lost by a kill\nat this moment (s)")
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    rows[-1].set_ylim(0.0, 1.05 * max(max(_sawtooth(data[name])[1]) for name in names))
    rows[-1].set_xlabel("seconds since the start; a mark on the axis is a commit on all hosts")
    return figure


def _sawtooth(run: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """What a kill would lose at each moment from the first commit on, in seconds."""
    times: list[float] = []
    lost: list[float] = []
    committed = run["committed"]
    following = [seconds for _, _, seconds in committed[1:]] + [run["seconds"]]
    for (_, ended, seconds), until in zip(committed, following, strict=True):
        times += [seconds, until]
        lost += [seconds - ended, until - ended]
    return times, lost
