"""The benchmarks, small: that each runs, checks what it measured, and says so as agreed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from benchmarks import (  # noqa: E402
    agreement,
    memory,
    planning,
    restoring,
    saving,
    scaling,
    stepping,
)
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.results import Pair, compared  # noqa: E402

RESTORES = [case for case in restoring.CASES if case.startswith("restore_vs")]
TIMES = [*scaling.CASES, *memory.CASES]
TIERS = {"restore_other_mesh": "peer", "elastic_restore": "peer", "backup_restore": "backup"}


def run(folder: Path, *cases: str) -> dict[str, Any]:
    """What ``python -m benchmarks`` writes for some cases, on as little as possible.

    Also ``output``, what it prints.
    """
    target = folder / "results.json"
    chosen = [part for case in cases for part in ("--case", case)]
    command = [sys.executable, "-m", "benchmarks", *chosen, "--json", str(target)]
    done = subprocess.run(
        [*command, "--size-mib", "1", "--pairs", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(target.read_text())
    assert all(case in done.stdout for case in cases)
    return {**found, "output": done.stdout}


def test_pure_cases_have_the_agreed_form(tmp_path: Path) -> None:
    found = run(tmp_path, "plan_scale", "agreement_bytes")

    assert set(found) - {"output"} == {"machine", "results"}
    assert {"cpu", "cores", "memory_bytes", "python", "packages"} <= set(found["machine"])
    keys = {"case", "ratio", "ours", "other", "unit", "spread", "notes"}
    assert all(set(result) == keys for result in found["results"])
    plan, sizes = found["results"]
    assert [plan["case"], plan["unit"], sizes["case"], sizes["unit"]] == [
        *("plan_scale", "s"),
        *("agreement_bytes", "B"),
    ]
    # The goal, on whatever machine the tests run: memory is checked by the case itself.
    assert plan["ours"] <= planning.LIMIT_SECONDS


# Each side's state is compared, element for element, by the cases themselves.


@pytest.mark.parametrize(
    "cases",
    [[*saving.CASES], RESTORES, [*stepping.CASES]],
    ids=["saves", "restores", "slowdowns"],
)
def test_sides_are_checked_and_compared(cases: list[str], tmp_path: Path) -> None:
    results = run(tmp_path, *cases)["results"]
    assert [result["case"] for result in results] == cases
    for result in results:
        assert result["ours"] > 0 and result["other"] > 0
        assert result["ratio"] == pytest.approx(result["other"] / result["ours"])
        assert "CPU seconds" in result["notes"]


def test_what_should_be_few_times_is_ours_over_the_other(tmp_path: Path) -> None:
    results = run(tmp_path, *TIMES)["results"]
    assert [result["case"] for result in results] == TIMES
    for result in results:
        assert result["ratio"] == pytest.approx(result["ours"] / result["other"])


def test_torch_is_measured_or_said_to_be_missing(tmp_path: Path) -> None:
    found = run(tmp_path, "save_vs_torch_dcp", "load_vs_torch_dcp")
    if importlib.util.find_spec("torch") is None:
        assert found["results"] == []
        assert found["output"].count("skipped: torch is not installed") == 2
    else:
        assert all(result["ratio"] > 0 for result in found["results"])


@pytest.mark.parametrize(("case", "tier"), TIERS.items())
def test_restores_read_the_tier_that_they_measure(case: str, tier: str, tmp_path: Path) -> None:
    (result,) = run(tmp_path, case)["results"]
    assert result["ratio"] > 0
    assert f"MiB {tier}" in result["notes"].partition("read: ")[2]


def test_planning_finds_every_chunk_at_any_size() -> None:
    for nodes in (64, 256):
        planned = planning.plan_at_scale(nodes, 40)  # asserts that the plan is right
        # A process that lies in the middle of two old ones needs both, and little else.
        assert planned["opened"] <= 6


def test_agreement_grows_slower_than_the_cluster() -> None:
    small, large = agreement.traffic(16), agreement.traffic(256)
    assert large.sent < 1.1 * small.sent
    assert large.received < 16 * small.received
    assert small.received < small.everything


def test_unknown_cases_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--case", "no-such"])
    assert "no-such" in capsys.readouterr().err


def test_a_ratio_is_the_median_of_pairs() -> None:
    found = compared("x", [Pair(1.0, 2.0), Pair(2.0, 2.0), Pair(1.0, 8.0)], "notes")
    assert (found.ratio, found.ours, found.other, found.spread) == (2.0, 1.0, 2.0, (1.0, 8.0))
