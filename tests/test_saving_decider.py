"""Decisions of process 0 that the others read: bounded in number, and asked for when it matters."""

from __future__ import annotations

import threading
import time

from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._decider import Decider
from mtcheckpoint._jax import MemoryStore
from mtcheckpoint._policy import Continuous, FixedInterval, Policy
from mtcheckpoint._reports import Reports


def _job(
    policy: Policy, processes: int = 2
) -> tuple[MemoryStore, list[Reports], list[Decider]]:
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
