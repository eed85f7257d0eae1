"""The benchmarks of decisions, handshakes, intervals and replicators: what their figures mean."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import google_replicator
import pytest

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import goals


def test_what_kills_lose_follows_from_the_commits() -> None:
    interval = pytest.importorskip("benchmarks.interval")
    ends = [float(step) for step in range(101)]
    # Step 0 committed at once, step 40 ten seconds after its end.
    found = sorted(interval.lost_seconds(ends, [(0, 0.0), (40, 50.0)], kills=20_000))
    assert min(found) >= 0.0
    assert max(found) == pytest.approx(60.0, abs=0.1)
    # Uniform over 0 to 50, and over 10 to 60.
    assert sum(found) / len(found) == pytest.approx(30.0, abs=0.5)
    assert interval.lost_seconds(ends, [(0, 0.0)], kills=3) == interval.lost_seconds(
        ends, [(0, 0.0)], kills=3
    )


def test_every_case_has_a_title_and_a_group() -> None:
    from benchmarks.__main__ import CASES

    assert set(CASES) == set(goals.GOALS)
    assert {goal.group for goal in goals.GOALS.values()} == set(goals.GROUPS)


@pytest.mark.extended
@pytest.mark.google_replicator
@pytest.mark.skipif(
    google_replicator.SOURCE_VARIABLE not in os.environ,
    reason=f"{google_replicator.SOURCE_VARIABLE} is not set",
)
def test_both_replicators_copy_what_is_committed() -> None:
    from benchmarks.replicator_lag import CASES
    from benchmarks.results import Settings

    found = CASES["replicator_lag"](Settings(size_mib=2, pairs=1))
    assert found.ours > 0 and found.other > 0


def test_without_a_checkout_cases_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import replicators
    from benchmarks.results import NotInstalledError

    monkeypatch.delenv(google_replicator.SOURCE_VARIABLE, raising=False)
    with pytest.raises(NotInstalledError, match=google_replicator.SOURCE_VARIABLE):
        replicators.running("google")
