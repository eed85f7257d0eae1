"""Decisions of process 0 that the others read: bounded in number, and asked for when it matters."""

from __future__ import annotations

from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._decider import Decider
from mtcheckpoint._jax import MemoryStore
from mtcheckpoint._policy import Continuous, FixedInterval, Policy


def _job(
    policy: Policy, processes: int = 2
) -> tuple[MemoryStore, list[Coordinator], list[Decider]]:
    store = MemoryStore()
    coordinators = [
        Coordinator(store, process=p, processes=processes, namespace="test")
        for p in range(processes)
    ]
    deciders = [
        Decider(coordinator, policy, save_on_start=False, now=lambda: 0.0)
        for coordinator in coordinators
    ]
    return store, coordinators, deciders


def _report(coordinator: Coordinator, finished_step: int | None) -> None:
    coordinator.announce(
        "report", {"host": "h", "finished_step": finished_step, "taken_step": finished_step}
    )


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
    _, coordinators, (first, _) = _job(FixedInterval(1000))
    assert first.decide(1000).save
    first.started(1000)
    assert first.decide(1001).ask_again_at == 1002
    _report(coordinators[0], 1000)
    assert first.decide(1002).ask_again_at == 1003
    _report(coordinators[1], 1000)
    assert first.decide(1003).ask_again_at == 2000


def test_it_is_asked_again_until_all_know_how_a_save_has_ended() -> None:
    """All have reported before process 0 knows that the others know."""
    _, coordinators, deciders = _job(FixedInterval(1000))
    for decider in deciders:
        assert decider.decide(1000, commits=0).save
        decider.started(1000)
    for coordinator in coordinators:
        _report(coordinator, 1000)
    for decider in deciders:
        assert decider.decide(1001, commits=0) == deciders[0].decide(1001, commits=0)
        assert decider.decide(1001).ask_again_at == 1002
    # What process 0 knows counts, not what the other one does.
    for decider, commits in zip(deciders, (1, 0), strict=True):
        decision = decider.decide(1002, commits=commits)
        assert (decision.commits, decision.ask_again_at) == (1, 2000)
        assert decider.decide(1003, commits=commits).commits == 1


def test_the_store_is_not_asked_while_process_0_is_still_saving() -> None:
    store, coordinators, (first, second) = _job(Continuous())
    listed = []
    listing = store.list
    store.list = lambda folder: listed.append(folder) or listing(folder)  # type: ignore[method-assign]
    for coordinator in coordinators:
        _report(coordinator, None)
    for decider in (first, second):
        decider.started(0)
    listed.clear()
    assert not first.decide(1).save
    assert "test/announced/report" not in listed
    _report(coordinators[0], 0)
    assert "process 1" in first.decide(2).reason
    _report(coordinators[1], 0)
    assert first.decide(3).save
    assert [second.decide(step) for step in (1, 2, 3)][-1].save
