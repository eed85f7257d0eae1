"""Extras that come back to another number of processes."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

import mtcheckpoint as mtc
from mtcheckpoint import _extras

FOUR = [{"offset": at} for at in (40, 41, 42, 43)]


def halves(extra: Any, parts: int) -> list[dict[str, Any]]:
    return [{"of": extra["offset"], "part": part, "parts": parts} for part in range(parts)]


def joined(several: Any) -> dict[str, Any]:
    return {"offsets": [extra["offset"] for extra in several]}


def refused(*_: Any) -> Any:
    raise AssertionError("not to be called")


def test_as_many_processes_get_what_they_had() -> None:
    assert mtc.spread_extras(FOUR, 4, split=refused, merge=refused) == tuple(FOUR)


@pytest.mark.parametrize("processes", [1, 3, 8])
def test_equal_extras_are_for_everybody(processes: int) -> None:
    spread = mtc.spread_extras([{"seed": 1}] * 4, processes, split=refused, merge=refused)
    assert spread == ({"seed": 1},) * processes


def test_neighbours_are_merged() -> None:
    assert mtc.spread_extras(FOUR, 2, merge=joined) == (
        {"offsets": [40, 41]},
        {"offsets": [42, 43]},
    )
    assert mtc.spread_extras(FOUR, 1, merge=joined) == ({"offsets": [40, 41, 42, 43]},)


def test_each_is_split_in_rank_order() -> None:
    assert mtc.spread_extras(FOUR[:2], 4, split=halves) == (
        {"of": 40, "part": 0, "parts": 2},
        {"of": 40, "part": 1, "parts": 2},
        {"of": 41, "part": 0, "parts": 2},
        {"of": 41, "part": 1, "parts": 2},
    )


@pytest.mark.parametrize(
    ("processes", "options", "said"),
    [
        (8, {"merge": joined}, "4 processes .* over 8: give split="),
        (2, {"split": halves}, "4 processes .* over 2: give merge="),
        (3, {"split": halves, "merge": joined}, "neither count is a multiple"),
        (6, {"split": halves, "merge": joined}, "neither count is a multiple"),
        (0, {}, "at least 1, found 0"),
        (8, {"split": lambda extra, parts: [extra]}, "make 2 mappings of one, and made 1"),
    ],
)
def test_what_cannot_be_spread_is_refused(
    processes: int, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        mtc.spread_extras(FOUR, processes, **options)


def test_without_extras_nothing_is_invented() -> None:
    with pytest.raises(ValueError, match="no extras to spread"):
        mtc.spread_extras((), 2)


def test_the_example_of_the_docstring() -> None:
    outcome = doctest.testmod(_extras)
    assert (outcome.attempted, outcome.failed) == (2, 0)
