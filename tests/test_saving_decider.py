"""Decisions of process 0 that the others read: bounded in number, and asked for when it matters."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any

import pytest

from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._decider import Decider, _UserPolicy
from mtcheckpoint._jax import MemoryStore
from mtcheckpoint._policy import Continuous, FixedInterval, Policy
from mtcheckpoint._reports import Reports
from mtcheckpoint.errors import CoordinationError


def _job(policy: Policy, processes: int = 2) -> tuple[MemoryStore, list[Reports], list[Decider]]:
    store = MemoryStore()
    coordinators = [
        Coordinator(store, process=p, processes=processes, namespace="test")
        for p in range(processes)
    ]
    reports = [Reports(coordinator) for coordinator in coordinators]
    deciders = [
        Decider(coordinator, policy, told, save_on_start=False, now=lambda: 0.0)
        for coordinator, told in zip(coordinators, reports, strict=True)
    ]
    return store, reports, deciders


def _finish(reports: list[Reports], process: int, step: int) -> None:
    """A process has finished a save, and process 0 hears of it."""
    reports[process].tell({"host": "h", "finished_step": step, "taken_step": step})
    reports[0].listen()


def test_answers_are_deleted_although_nothing_is_ever_saved() -> None:
    store, _, deciders = _job(Continuous())
    for decider in deciders:
        decider.started(0)  # and never finished, as behind a replicator that hangs
    most = 0
    for step in range(1, 3000):
        decisions = [decider.decide(step) for decider in deciders]
        assert decisions[0] == decisions[1]
        assert not decisions[0].save
        most = max(most, len(store.list("test/lead")))
    assert most < 1000


def test_answers_that_a_slow_process_has_not_read_stay() -> None:
    _, _, (first, slow) = _job(Continuous())
    first.started(0)
    slow.started(0)
    answers = [first.decide(step) for step in range(1, 1500)]
    assert [slow.decide(step) for step in range(1, 1500)] == answers


def test_a_save_in_progress_is_asked_about_at_every_step() -> None:
    _, reports, (first, _) = _job(FixedInterval(1000))
    assert first.decide(1000).save
    first.started(1000)
    assert first.decide(1001).ask_again_at == 1002
    _finish(reports, 0, 1000)
    assert first.decide(1002).ask_again_at == 1003
    _finish(reports, 1, 1000)
    assert first.decide(1003).ask_again_at == 2000


def test_it_is_asked_again_until_all_know_how_a_save_has_ended() -> None:
    """All have reported before process 0 knows that the others know."""
    _, reports, deciders = _job(FixedInterval(1000))
    for decider in deciders:
        assert decider.decide(1000, commits=0).save
        decider.started(1000)
    for process in range(2):
        _finish(reports, process, 1000)
    for decider in deciders:
        assert decider.decide(1001, commits=0) == deciders[0].decide(1001, commits=0)
        assert decider.decide(1001).ask_again_at == 1002
    # What process 0 knows counts, not what the other one does.
    for decider, commits in zip(deciders, (1, 0), strict=True):
        decision = decider.decide(1002, commits=commits)
        assert (decision.commits, decision.ask_again_at) == (1, 2000)
        assert decider.decide(1003, commits=commits).commits == 1


def test_the_training_thread_never_asks_for_the_reports() -> None:
    store, reports, (first, second) = _job(Continuous())
    for decider in (first, second):
        decider.started(0)
    listed = []
    listing = store.list
    store.list = lambda folder: listed.append(folder) or listing(folder)  # type: ignore[method-assign]
    assert not first.decide(1).save
    reports[0].tell({"host": "h", "finished_step": 0, "taken_step": 0})
    assert "process 1" in first.decide(2).reason, "its own is known without listening"
    reports[1].tell({"host": "h", "finished_step": 0, "taken_step": 0})
    assert not first.decide(3).save, "not heard yet"
    assert "test/announced/report" not in listed
    reports[0].listen()
    assert first.decide(4).save
    assert [second.decide(step) for step in (1, 2, 3, 4)][-1].save


def test_process_0_listens_closely_while_it_waits_for_others() -> None:
    _, reports, _ = _job(Continuous())
    assert not any(told.awaited for told in reports), "nothing was saved yet"
    reports[0].tell({"finished_step": 3, "taken_step": None})
    assert not reports[0].awaited, "its own replicator comes first"
    reports[0].tell({"finished_step": 3, "taken_step": 3})
    assert reports[0].awaited
    for taken in (None, 3):
        before = reports[0].awaited
        reports[1].tell({"finished_step": 3, "taken_step": taken})
        assert reports[0].awaited == before, "it has not listened"
        reports[0].listen()
        assert reports[0].awaited == (taken is None)
    assert not reports[1].awaited, "only process 0 listens"
    reports[1].listen()
    assert list(reports[1].known) == [1]


def test_a_call_that_takes_long_is_not_repeated_at_once() -> None:
    store, reports, _ = _job(Continuous())
    reports[0].tell({"finished_step": 3, "taken_step": 3})
    calls: list[str] = []
    listing = store.list

    def slow(folder: str) -> dict[str, bytes]:
        calls.append(folder)
        threading.Event().wait(0.05)
        return listing(folder)

    store.list = slow  # type: ignore[method-assign]
    reports[0].listen()
    begun = time.monotonic()
    while len(calls) < 2:
        assert time.monotonic() - begun < 10
        reports[0].listen_when_due()
    assert time.monotonic() - begun >= 0.2


# Answers that are given before anybody asks.


def _ahead(reports: list[Reports], deciders: list[Decider], *, commits: int) -> None:
    """What the background threads do when the last save is over everywhere."""
    reports[0].listen()
    for decider in deciders:
        decider.look_ahead(failed=(), commits=commits)


def _saved_on_all(policy: Policy, step: int) -> tuple[MemoryStore, list[Reports], list[Decider]]:
    """A job whose first save is over, and whose next question is answered already if it can be."""
    store, reports, deciders = _job(policy)
    for decider in deciders:
        assert decider.decide(step, commits=0).save
        decider.started(step)
    for process in range(2):
        _finish(reports, process, step)
    _ahead(reports, deciders, commits=1)
    return store, reports, deciders


def _forbid_calls(store: MemoryStore) -> None:
    for call in ("get", "set", "set_once", "wait", "list", "delete"):
        setattr(store, call, None)


def test_a_save_that_may_start_is_decided_before_training_asks() -> None:
    store, _, deciders = _saved_on_all(Continuous(), 5)
    _forbid_calls(store)
    answers = [decider.decide(6, commits=1) for decider in deciders]
    assert answers[0] == answers[1]
    assert (answers[0].save, answers[0].commits, answers[0].step) == (True, 1, 6)


def test_an_answer_ahead_holds_for_later_steps() -> None:
    _, _, deciders = _saved_on_all(Continuous(), 5)
    answers = [decider.decide(9, commits=1) for decider in deciders]
    assert [(a.save, a.step) for a in answers] == [(True, 6)] * 2


@pytest.mark.parametrize("event", ["a forced save", "a restore"])
def test_an_answer_ahead_ends_when_something_else_comes_in_between(event: str) -> None:
    _, _, deciders = _saved_on_all(Continuous(), 5)
    for decider in deciders:
        if event == "a restore":
            decider.resume_after(2)
        else:
            decider.started(6)
    step = 3 if event == "a restore" else 7
    answers = [decider.decide(step, commits=1) for decider in deciders]
    assert answers[0] == answers[1]
    assert answers[0].step == step
    assert answers[0].save == (event == "a restore"), "step 6 is still being saved"


def test_nothing_is_answered_ahead_that_may_become_a_no() -> None:
    def is_ahead(policy: Policy, commits: int, **report: Any) -> bool:
        _, reports, deciders = _job(policy)
        for decider in deciders:
            decider.decide(5)
            decider.started(5)
        for told in reports:
            told.tell({"host": "h", "finished_step": 5, "taken_step": 5, **report})
        _ahead(reports, deciders, commits=commits)
        return deciders[0]._answers.is_ahead

    assert is_ahead(Continuous(), 1)
    assert not is_ahead(Continuous(), 0), "process 0 does not know that the others know"
    assert not is_ahead(Continuous(), 1, taken_step=None)
    assert not is_ahead(Continuous(), 1, fault="the replicator is gone")
    assert not is_ahead(Continuous(), 1, free_bytes=1, share_bytes=10)
    assert not is_ahead(Continuous(minimum_interval_secs=1.0), 1)
    assert not is_ahead(FixedInterval(1000), 1), "the next question is asked long before it is due"
    assert is_ahead(FixedInterval(3), 1)
    assert not is_ahead(_UserPolicy(PreservingPolicy()), 1), "asked at its step only"


class PreservingPolicy:
    """As Orbax's, which may look at a clock or at what they answered before."""

    def should_save(self, *_: Any, **__: Any) -> bool:
        return True


def test_a_yes_ahead_ends_what_the_log_says_of_a_backlog(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mtcheckpoint.decider")
    times = iter(range(1000))
    store = MemoryStore()
    coordinator = Coordinator(store, process=0, processes=1, namespace="test")
    reports = Reports(coordinator)
    decider = Decider(
        coordinator, Continuous(), reports, save_on_start=False, now=lambda: next(times) * 10.0
    )
    decider.started(5)
    reports.tell({"host": "h", "finished_step": 5, "taken_step": None})
    for step in range(6, 400, 3):
        decider.decide(step)
    assert "has not taken step 5" in caplog.text
    reports.tell({"host": "h", "finished_step": 5, "taken_step": 5})
    decider.look_ahead(failed=(), commits=1)
    assert decider.decide(500, commits=1).save
    assert "saving goes on after" in caplog.text


def test_between_the_yes_and_its_save_nothing_is_answered_ahead() -> None:
    _, reports, deciders = _saved_on_all(Continuous(), 5)
    for decider in deciders:
        assert decider.decide(6, commits=1).save
    _ahead(reports, deciders, commits=1)
    assert not any(decider._answers.is_ahead for decider in deciders)


def test_an_answer_that_does_not_come_is_looked_for_a_few_times_only() -> None:
    store, reports, (first, second) = _job(Continuous(minimum_interval_secs=1e9))
    for decider in (first, second):
        decider.decide(5)
        decider.started(5)
    for process in range(2):
        _finish(reports, process, 5)
    gets: list[str] = []
    getting = store.get
    store.get = lambda key: gets.append(key) or getting(key)  # type: ignore[method-assign]
    deadline = time.monotonic() + 10
    while second.look_ahead(failed=(), commits=1):
        assert time.monotonic() < deadline
    assert len(gets) == 6
    assert not second.look_ahead(failed=(), commits=1)
    assert len(gets) == 6
    assert first.decide(6, commits=1) == second.decide(6, commits=1)


def test_a_fetch_that_fails_is_one_of_the_few_tries() -> None:
    _, _, deciders = _job(Continuous())
    answers = deciders[1]._answers
    deciders[0].decide(5)
    deciders[1].decide(5)
    calls = []

    def fail(topic: str) -> Any:
        calls.append(topic)
        raise CoordinationError("the store does not answer")

    answers._coordinator.led = fail  # type: ignore[method-assign]
    deadline = time.monotonic() + 10
    while len(calls) < 6:
        assert time.monotonic() < deadline
        with contextlib.suppress(CoordinationError):
            answers.fetch_ahead()
    assert not answers.fetch_ahead()
    assert len(calls) == 6


def test_many_answers_given_ahead_or_not_are_the_same_on_all() -> None:
    """Whatever each process has fetched, forced, skipped or restored in between."""
    rng = random.Random(7)
    store, reports, deciders = _job(Continuous(), processes=3)
    ahead = saves = step = 0
    for _ in range(2000):
        step += rng.randint(1, 3)
        for process, decider in enumerate(deciders):
            if rng.random() < 0.5:
                reports[0].listen()
            if rng.random() < (0.9 if process == 0 else 0.4):
                decider.look_ahead(failed=(), commits=saves)
        ahead += deciders[0]._answers.is_ahead
        decisions = [decider.decide(step, commits=saves) for decider in deciders]
        assert decisions[0] == decisions[1] == decisions[2]
        if decisions[0].save or rng.random() < 0.02:
            for decider in deciders:
                decider.started(step)
            saves += 1
            for told in reports:
                told.tell({"host": "h", "finished_step": step, "taken_step": step})
        elif rng.random() < 0.02:
            step = max(0, step - rng.randint(0, 10))
            for decider in deciders:
                decider.resume_after(step)
    assert ahead > 200 and saves > 200
    assert len({decider.asked for decider in deciders}) == 1
    assert len(store.list("test/lead")) < 600
