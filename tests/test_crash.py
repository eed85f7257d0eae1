"""A few seeds of the crash harness; more with `python -m tests.crash --seeds 20`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from tests.crash.driver import play

pytestmark = pytest.mark.extended

SEEDS = int(os.environ.get("MTCHECKPOINT_CRASH_SEEDS", "20"))


@pytest.mark.parametrize("seed", [1002, 1007])
def test_what_comes_back_is_right(seed: int) -> None:
    play(seed, rounds=3)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_comes_back_is_right_for_many_seeds(seed: int) -> None:
    play(seed)
