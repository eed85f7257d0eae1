"""Twenty seeds of the crash harness; more with `python -m tests.crash --seeds 500`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from tests.crash import points
from tests.crash.seeds import main


@pytest.mark.parametrize("point", points.ALL)
def test_every_point_is_in_the_code(point: str) -> None:
    owner, name = points.place_of(point)
    assert callable(getattr(owner, name))


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_what_comes_back_is_right_for_twenty_seeds() -> None:
    assert main(["--first", "1000", "--seeds", "20", "--jobs", "2"]) == 0
