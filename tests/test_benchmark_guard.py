"""That nothing has become much slower beside what it is compared with: ratios only, small sizes.

A bound is about half of what a machine of two cores reached, and the best pair counts, because
other work on the machine disturbs single ones. docs/benchmarks.md has the figures themselves.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[1]

# By the number of pairs that they are measured in.
BOUNDS = {
    3: {
        "save_vs_orbax_replicator": 4.0,
        "blocked_vs_orbax_replicator": 8.0,
        "blocked_queued_vs_orbax_replicator": 5.0,
        "save_vs_raw_tmpfs": 0.5,
        "restore_vs_orbax_replicator": 2.5,
        "restore_vs_raw_tmpfs": 0.3,
    },
    1: {
        "decision_us": 0.5,
        "decision_asked_us": 0.5,
        "handshake": 3.0,
        "interval": 2.5,
    },
}
if importlib.util.find_spec("torch") is not None:
    BOUNDS[3] |= {"save_vs_torch_dcp": 2.5, "load_vs_torch_dcp": 1.0}


@pytest.fixture(scope="module", params=BOUNDS, ids=lambda pairs: f"{pairs} pairs")
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Results by case, of all cases with so many pairs, and the bounds of these."""
    bounds = BOUNDS[request.param]
    target = tmp_path_factory.mktemp("guard") / "results.json"
    chosen = [part for case in bounds for part in ("--case", case)]
    command = [sys.executable, "-m", "benchmarks", *chosen, "--json", str(target)]
    done = subprocess.run(
        [*command, "--size-mib", "64", "--pairs", str(request.param)],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = {result["case"]: result for result in json.loads(target.read_text())["results"]}
    return {"bounds": bounds, "results": results}


def test_ratios_are_not_far_below_what_they_were(measured: dict[str, Any]) -> None:
    results = measured["results"]
    best = {case: max(results[case]["spread"]) for case in measured["bounds"]}
    print({case: round(ratio, 2) for case, ratio in best.items()})
    low = {case: best[case] for case, bound in measured["bounds"].items() if best[case] < bound}
    assert not low, f"bounds: {measured['bounds']}, notes: {[results[c]['notes'] for c in low]}"
