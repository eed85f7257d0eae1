"""That the page of the benchmarks, its plots and the README's figures belong to the results."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from benchmarks import goals, report  # noqa: E402

kept = pytest.mark.skipif(not report.RESULTS.exists(), reason="no results are kept")


def results(**changes: Any) -> dict[str, Any]:
    """Two results, of which one does not meet its goal."""
    machine = {
        "cpu": "a processor",
        "cores": 2,
        "memory_bytes": 2**34,
        "system": "Linux",
        "python": "3.13",
        "packages": {"jax": "0.12"},
    }
    one = {"ours": 0.5, "unit": "s", "spread": [0.9, 1.1], "notes": "two processes"}
    return {
        "machine": machine,
        "results": [
            {"case": "scale_bytes", "ratio": 11.5, "other": 0.05, **one},
            {"case": "save_vs_orbax_replicator", "ratio": 3.0, "other": 1.5, **one, **changes},
        ],
    }


@kept
def test_page_readme_and_plots_show_the_results_that_are_kept() -> None:
    found, reasons = report.read()
    assert report.PAGE.read_text() == report.page(found, reasons), "python -m benchmarks.report"
    readme = report.README.read_text()
    assert readme == report.with_figures(readme, found), "python -m benchmarks.report"
    digest = report.digest_of(report.RESULTS)
    for name in report.PLOTS:
        if name in report.PAGE.read_text():
            assert f"results {digest}" in (report.FOLDER / name).read_text(), name


@kept
def test_reasons_are_given_for_goals_that_are_not_met() -> None:
    found, reasons = report.read()
    unmet = {
        result["case"]
        for result in found["results"]
        if goals.goal_of(result).is_met(result["ratio"]) is False
    }
    assert set(reasons) <= set(goals.GOALS)
    assert unmet <= set(reasons), f"why: {report.REASONS}"


def test_a_page_says_which_goals_are_met_and_why_others_are_not() -> None:
    text = report.page(results(), {"save_vs_orbax_replicator": "a reason"})
    assert "| ≥ 8 | **no** | 500 ms | 1.5 s |" in text
    assert "| ≤ 12 | yes | 500 ms | 50 ms |" in text
    assert "- `save_vs_orbax_replicator`: a reason" in text
    assert "Not part of this run: `restore_vs_orbax_replicator`" in text
    met = report.page(results(ratio=9.0), {})
    assert "Goals that are not met" not in met


def test_the_readme_takes_figures_where_it_has_a_place_for_them() -> None:
    place = "<!-- benchmark figures -->\nold\n<!-- end of the benchmark figures -->\n"
    text = report.with_figures(f"before\n{place}after", results())
    assert text.startswith("before\n<!-- benchmark figures -->\n| compared")
    assert "| 3 | 500 ms | 1.5 s |" in text and text.endswith("-->\nafter")
    assert report.with_figures(text, results()) == text
    assert report.with_figures("no place", results()) == "no place"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2.345, "s", "2.35 s"),
        (0.0123, "s", "12.3 ms"),
        (1.7e-5, "s", "17 µs"),
        (3 * 2**20, "B", "3 MiB"),
        (15, "steps", "15 steps"),
    ],
)
def test_amounts_have_units(value: float, unit: str, text: str) -> None:
    assert report.amount(value, unit) == text


def test_plots_are_drawn_and_name_their_results(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots", reason="matplotlib is not installed")
    found = copy.deepcopy(results())
    runs = {"seconds": 3.0, "committed": [[0, 0.1, 0.3], [10, 1.1, 1.4]]}
    found["results"][1]["data"] = {"continuous": runs, "period": runs}
    plots.draw(found, tmp_path, "1234")
    assert {path.name for path in tmp_path.iterdir()} == set(report.PLOTS)
    for path in tmp_path.iterdir():
        assert "results 1234" in path.read_text()


def test_goals_can_be_told_from_json() -> None:
    found = json.loads(json.dumps(results()))
    assert [goals.goal_of(result).is_met(result["ratio"]) for result in found["results"]] == [
        *(True, False)
    ]
    assert goals.GOALS["interval_lost_work"].is_met(0.1) is None
