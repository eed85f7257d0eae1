"""How often process 0 is asked while saves keep the hosts busy, and what that costs in saves."""

from __future__ import annotations

import random

import pytest

from mtcheckpoint._pace import Pace


def saves_and_questions(
    lengths: list[float], step_seconds: float, *, steps: int, always: bool = False
) -> tuple[int, int]:
    """Saves and questions of a run in which the saves take `lengths` seconds, one after the other.

    `always`: every step asks.
    """
    pace, rng = Pace(), random.Random(7)
    now = free_at = 1000.0
    ask_at = saves = questions = 0
    for step in range(steps):
        now += step_seconds * rng.uniform(0.8, 1.3)
        if step < ask_at and not always:
            continue
        questions += 1
        if now < free_at:
            ask_at = pace.busy(step, now)
            continue
        pace.started(step, now)
        free_at = now + lengths[saves % len(lengths)]
        saves, ask_at = saves + 1, step + 1
    return saves, questions


def spread(seconds: float, factor: float) -> list[float]:
    rng = random.Random(3)
    return [seconds * factor ** rng.uniform(-1, 1) for _ in range(40)]


@pytest.mark.parametrize(
    ("lengths", "asked", "kept"),
    [
        (spread(0.5, 1.2), 0.15, 0.97),
        (spread(0.5, 2.0), 0.3, 0.96),
        (spread(4.0, 1.5), 0.05, 0.95),
        # The first short one after long ones is noticed late.
        ([0.4] * 20 + [1.6] * 20, 0.2, 0.9),
    ],
    ids=["steady", "varied", "long", "four times as long"],
)
def test_most_steps_ask_nothing_and_hardly_a_save_is_lost(
    lengths: list[float], asked: float, kept: float
) -> None:
    steps = 40_000
    most, _ = saves_and_questions(lengths, 0.005, steps=steps, always=True)
    saves, questions = saves_and_questions(lengths, 0.005, steps=steps)
    assert saves >= kept * most
    assert questions <= asked * steps


def test_saves_as_short_as_a_step_lose_nothing() -> None:
    most, _ = saves_and_questions([0.012], 0.005, steps=3000, always=True)
    saves, _ = saves_and_questions([0.012], 0.005, steps=3000)
    assert saves == most


def test_nothing_is_known_at_first_nor_by_a_clock_that_stands_or_runs_back() -> None:
    pace = Pace()
    assert pace.busy(3, 10.0) == 4
    pace.started(3, 10.0)
    assert [pace.busy(4, 10.0), pace.busy(5, 9.0), pace.busy(2, 11.0)] == [5, 6, 3]


def test_seconds_are_told_in_steps() -> None:
    pace = Pace()
    assert pace.after(60.0, 5, 10.0) == 6
    pace.started(0, 10.0)
    assert pace.after(60.0, 10, 11.0) == 610
    assert pace.after(0.0, 10, 11.0) == 11
