"""Agreement: over threads with a store in memory, and over real processes with JAX's store."""

from __future__ import annotations

import inspect
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest

import mtcheckpoint.testing as mtt
from mtcheckpoint import _jax, errors
from mtcheckpoint._coordination import Coordinator, job_coordinator
from mtcheckpoint._jax import DistributedStore, KeyValueStore, MemoryStore
from mtcheckpoint.errors import CoordinationError, MtCheckpointError, WaitTimeoutError


def on_threads(
    body: Callable[[Coordinator], Any],
    processes: Sequence[int] = (0, 1, 2),
    *,
    store: KeyValueStore | None = None,
    timeout_secs: float = 20.0,
) -> list[Any]:
    """What `body` returns or raises on each of three processes, of which only some come."""
    store = store or MemoryStore()
    for absent in {0, 1, 2} - set(processes):
        Coordinator(store, process=absent, processes=3, namespace="t", host=f"host-{absent}")
    outcomes: dict[int, Any] = {}

    def run(process: int) -> None:
        coordinator = Coordinator(
            store,
            process=process,
            processes=3,
            namespace="t",
            timeout_secs=timeout_secs,
            host=f"host-{process}",
            grace_secs=0.3,
        )
        try:
            outcomes[process] = body(coordinator)
        except Exception as error:
            outcomes[process] = error

    threads = [threading.Thread(target=run, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [outcomes[process] for process in processes]


def assert_all_the_same(outcomes: Sequence[Any], kind: type[Exception]) -> Any:
    first = outcomes[0]
    assert isinstance(first, kind)
    assert {(type(error), str(error)) for error in outcomes} == {(kind, str(first))}
    return first


# Rounds.


def test_all_get_the_values_of_all_in_process_order() -> None:
    outcomes = on_threads(lambda c: c.gather("sizes", {"p": c.process, "big": "x" * 200_000}))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert [value["p"] for value in outcomes[0]] == [0, 1, 2]
    assert [len(value["big"]) for value in outcomes[0]] == [200_000] * 3


def test_only_process_0_chooses() -> None:
    chosen_by = []

    def body(coordinator: Coordinator) -> Any:
        def choose(values: tuple[int, ...]) -> int:
            chosen_by.append(coordinator.process)
            return max(values)

        return coordinator.decide("newest step", coordinator.process * 10, choose)

    assert on_threads(body) == [20, 20, 20]
    assert chosen_by == [0]


@pytest.mark.parametrize("present", [(0, 1), (0, 2), (1, 2), (0,), (2,)])
def test_who_is_missing_is_named_alike_on_all(present: tuple[int, ...]) -> None:
    outcomes = on_threads(lambda c: c.gather("start", 1), present, timeout_secs=0.3)
    error = assert_all_the_same(outcomes, WaitTimeoutError)
    absent = sorted({0, 1, 2} - set(present))
    assert error.missing == tuple(f"process {index} (host-{index})" for index in absent)
    assert "all processes at 'start'" in str(error)


def test_who_comes_late_hears_the_same_verdict_at_once() -> None:
    store = MemoryStore()
    early = on_threads(lambda c: c.gather("start", 1), (0, 2), store=store, timeout_secs=0.3)
    late = on_threads(lambda c: c.gather("start", 1), (1,), store=store, timeout_secs=60)
    assert_all_the_same([*early, *late], WaitTimeoutError)


def test_a_late_leader_cannot_overrule_those_who_gave_up() -> None:
    store = MemoryStore()
    early = on_threads(lambda c: c.gather("start", 1), (1, 2), store=store, timeout_secs=0.3)
    late = on_threads(lambda c: c.gather("start", 1), (0,), store=store)
    error = assert_all_the_same([*early, *late], WaitTimeoutError)
    assert error.missing == ("process 0 (host-0)",)


def test_a_round_after_a_failed_one_works_and_cleans_up() -> None:
    store = MemoryStore()

    def body(coordinator: Coordinator) -> Any:
        if coordinator.process == 1:
            gone = store.wait("t/rounds/a/1/verdict", 10)
            assert gone is not None
        with pytest.raises(WaitTimeoutError):
            coordinator.gather("a", 1, timeout_secs=0.3)
        return coordinator.gather("a", 2)

    assert on_threads(body, store=store) == [(2, 2, 2)] * 3
    assert set(store.list("t/rounds")) == {"a/2/verdict"}


def test_topics_may_be_used_from_several_threads() -> None:
    def body(coordinator: Coordinator) -> Any:
        found: dict[str, Any] = {}

        def rounds(topic: str) -> None:
            found[topic] = [coordinator.gather(topic, [topic, i]) for i in range(50)]

        threads = [threading.Thread(target=rounds, args=(f"a/{n}",)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found

    expected = {f"a/{n}": [([f"a/{n}", i],) * 3 for i in range(50)] for n in range(3)}
    assert on_threads(body) == [expected] * 3


def test_a_process_alone_agrees_with_itself() -> None:
    coordinator = job_coordinator("alone")
    assert coordinator.gather("a", 1) == (1,)
    assert coordinator.agree("b", lambda: 2) == 2
    assert coordinator.lead("c", lambda: 3) == 3
    assert job_coordinator("alone").gather("a", 4) == (4,)
    assert _jax.node_ranks_by_process(1.0) == (0,)


# Errors.


def example(kind: type[MtCheckpointError]) -> MtCheckpointError:
    """An error of this class, with some value for each of its arguments."""
    samples = {
        "what": "x",
        "seconds": 1.5,
        "missing": ("a",),
        "hint": "do that",
        "step": 3,
        "processes": (1, 2),
        "available": (4, 5),
        "fields": ("a", "b"),
        "paths": ("p",),
    }
    if kind.__init__ is Exception.__init__ or "__init__" not in {
        name for base in kind.__mro__ if base.__module__ == errors.__name__ for name in vars(base)
    }:
        return kind("what happened")
    names = list(inspect.signature(kind).parameters)
    arguments = {name: samples.get(name, f"some {name}") for name in names}
    first = arguments.pop(names[0])
    return kind(first, **arguments)


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_of_ours_is_the_same_on_all(name: str) -> None:
    original = example(getattr(errors, name))

    def choose(values: tuple[Any, ...]) -> Any:
        raise original

    outcomes = on_threads(lambda c: c.decide("restore", 1, choose))
    assert_all_the_same(outcomes, type(original))
    assert all(vars(error) == vars(original) for error in outcomes)


def test_any_other_error_says_where_it_was_raised() -> None:
    def choose(values: tuple[Any, ...]) -> Any:
        raise ZeroDivisionError("no steps")

    outcomes = on_threads(lambda c: c.decide("restore", 1, choose))
    assert isinstance(outcomes[0], ZeroDivisionError)
    error = assert_all_the_same(outcomes[1:], CoordinationError)
    assert str(error) == "process 0 failed at 'restore': ZeroDivisionError: no steps"
    assert error.processes == (0,)


def test_an_answer_that_is_no_json_is_an_error_on_all() -> None:
    outcomes = on_threads(lambda c: c.decide("restore", 1, lambda values: {1, 2}))
    assert isinstance(outcomes[0], TypeError)
    assert_all_the_same(outcomes[1:], CoordinationError)


def test_a_failed_attempt_is_an_error_on_all() -> None:
    def attempt(process: int) -> str:
        if process > 0:
            raise errors.SaveError(f"disk {process} is full", step=7)
        return "done"

    outcomes = on_threads(lambda c: c.agree("writing", lambda: attempt(c.process)))
    text = (
        "'writing' failed: process 1 (host-1): SaveError: disk 1 is full;"
        " process 2 (host-2): SaveError: disk 2 is full"
    )
    assert isinstance(outcomes[0], CoordinationError)
    assert str(outcomes[0]) == text and outcomes[0].processes == (1, 2)
    assert [str(error) for error in outcomes[1:]] == ["disk 1 is full", "disk 2 is full"]
    assert [error.__notes__ for error in outcomes[1:]] == [[text], [text]]


def test_attempts_that_all_succeed_keep_their_own_results() -> None:
    assert on_threads(lambda c: c.agree("writing", lambda: c.process)) == [0, 1, 2]


def test_a_failed_attempt_comes_out_even_when_another_process_is_missing() -> None:
    def body(coordinator: Coordinator) -> Any:
        return coordinator.agree("writing", lambda: 1 // coordinator.process)

    failed, waited = on_threads(body, (0, 1), timeout_secs=0.3)
    assert isinstance(failed, ZeroDivisionError)
    assert "missing: process 2 (host-2)" in failed.__notes__[0]
    assert isinstance(waited, WaitTimeoutError)


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupt_is_told_to_the_others_and_waits_for_nobody(interrupted: int) -> None:
    def attempt(process: int) -> None:
        if process == interrupted:
            raise KeyboardInterrupt

    def body(coordinator: Coordinator) -> Any:
        try:
            return coordinator.agree("writing", lambda: attempt(coordinator.process))
        except KeyboardInterrupt:
            return "interrupted"

    outcomes = on_threads(body, timeout_secs=60)
    assert outcomes.pop(interrupted) == "interrupted"
    error = assert_all_the_same(outcomes, CoordinationError)
    assert error.processes == (interrupted,)
    assert "KeyboardInterrupt" in str(error)


# Reports, and decisions without a round.


def test_reports_are_overwritten_and_read_without_waiting() -> None:
    store = MemoryStore()

    def body(coordinator: Coordinator) -> None:
        assert coordinator.announced("nothing") == {}
        coordinator.announce("state", {"step": 1})
        coordinator.announce("state", {"step": 2 + coordinator.process})

    on_threads(body, (0, 2), store=store)
    reader = Coordinator(store, process=1, processes=3, namespace="t")
    assert reader.announced("state") == {0: {"step": 2}, 2: {"step": 4}}


def test_a_lead_does_not_wait_and_is_computed_once() -> None:
    store = MemoryStore()
    assert on_threads(lambda c: c.lead("save/1", lambda: "yes"), (0,), store=store) == ["yes"]
    others = on_threads(lambda c: c.lead("save/1", lambda: "no"), (1, 2), store=store)
    assert others == ["yes", "yes"]


def test_what_a_leader_has_published_is_seen_without_waiting() -> None:
    store = MemoryStore()
    leader, other = (Coordinator(store, process=p, processes=2, namespace="t") for p in (0, 1))
    assert other.led("answer") is None
    leader.lead("answer", lambda: 7)
    assert [c.led("answer") for c in (leader, other)] == [7, 7]
    with pytest.raises(ZeroDivisionError):
        leader.lead("fault", lambda: 1 // 0)
    with pytest.raises(CoordinationError, match="ZeroDivisionError"):
        other.led("fault")


def test_a_leader_that_does_not_come_is_named() -> None:
    store = MemoryStore()
    outcomes = on_threads(
        lambda c: c.lead("save/1", lambda: 1), (1, 2), store=store, timeout_secs=0.3
    )
    outcomes += on_threads(lambda c: c.lead("save/1", lambda: 1), (0,), store=store)
    error = assert_all_the_same(outcomes, WaitTimeoutError)
    assert error.missing == ("process 0 (host-0)",)


def test_forgotten_leads_leave_nothing() -> None:
    store = MemoryStore()

    def body(coordinator: Coordinator) -> None:
        for step in range(5):
            coordinator.lead(f"save/{step}", lambda: 1)
        coordinator.gather("read", None)
        coordinator.forget("save/0", "save/1")

    on_threads(body, store=store)
    assert sorted(store.list("t/lead")) == [f"save/{step}/verdict" for step in (2, 3, 4)]
    Coordinator(store, process=1, processes=3, namespace="t").forget("save")
    assert len(store.list("t/lead")) == 3
    Coordinator(store, process=0, processes=3, namespace="t").forget("save")
    assert store.list("t/lead") == {}


# Real processes.


def exercise_store() -> list[Any]:
    """One story, told to a store; the same for every kind of store."""
    store = _jax.job_store()
    told: list[Any] = [store.get("s/a"), store.wait("s/a", 0.05), store.list("s")]
    store.set("s/a", b"\x00\xff")
    store.set("s/a", b"")
    told += [store.get("s/a"), store.wait("s/a", 1.0), store.set_once("s/a", b"2")]
    told += [store.set_once("s/b/c", b"3"), store.set_once("st", b"4")]
    told += [sorted(store.list("s").items())]
    store.delete("s")
    store.delete("s")
    told += [store.get("s/b/c"), store.list("s"), store.get("st")]
    return [repr(item) for item in told]


def test_all_stores_tell_the_same_story() -> None:
    (distributed,) = mtt.run_processes(exercise_store, 1)
    assert distributed == exercise_store()
    assert "[('a', b''), ('b/c', b'3')]" in distributed


def play_many_rounds(rounds: int) -> list[Any]:
    """Thousands of rounds with random delays; a digest of all answers, and the keys left over."""
    coordinator = job_coordinator("rounds", timeout_secs=30)
    me = coordinator.process
    delays = random.Random(me)
    digest = 0
    for number in range(rounds):
        if delays.random() < 0.02:
            time.sleep(delays.random() * 0.005)
        values = coordinator.gather("round", [me, number, delays.random()])
        assert [value[:2] for value in values] == [[p, number] for p in range(4)]
        digest = hash((digest, tuple(value[2] for value in values)))
        coordinator.announce("state", number)
        save = coordinator.lead(f"save/{number}", lambda: delays.random() < 0.5)
        digest = hash((digest, save))
        if number % 100 == 99:
            coordinator.gather("read", None)
            coordinator.forget("save")
    coordinator.gather("end", None)
    store = _jax.job_store()
    return [digest, sorted(store.list("mtcheckpoint"))]


def test_thousands_of_rounds_are_equal_on_all_and_leave_few_keys() -> None:
    results = mtt.run_processes(play_many_rounds, 4, args=[1000], timeout_secs=60)
    assert len({digest for digest, _ in results}) == 1
    for _, keys in results:
        # Hosts and states of 4, the last verdict of 3 topics, and what is about to be deleted.
        assert len(keys) <= 8 + 3 + 8, keys


def meet_with_one_missing(absent: int) -> list[Any]:
    coordinator = job_coordinator("meeting", timeout_secs=1.0)
    ranks = _jax.node_ranks_by_process(20)
    began = time.monotonic()
    if coordinator.process == absent:
        coordinator.announce("absent", True)
        return ["absent", 0.0, ranks]
    try:
        coordinator.gather("start", 1)
    except WaitTimeoutError as error:
        return [str(error), time.monotonic() - began, ranks]
    return ["no error", 0.0, ranks]


@pytest.mark.parametrize(("absent", "limit_secs"), [(3, 3.0), (0, 5.0)])
def test_a_missing_process_is_named_within_the_limit(absent: int, limit_secs: float) -> None:
    results = mtt.run_processes(meet_with_one_missing, 4, devices=1, args=[absent])
    assert results.pop(absent)[0] == "absent"
    assert len({text for text, _, _ in results}) == 1
    assert f"missing: process {absent} (" in results[0][0]
    assert max(seconds for _, seconds, _ in results) < limit_secs
    assert results[0][2] == [0, 1, 2, 3]


def write_or_fail() -> list[str]:
    coordinator = job_coordinator("writing", timeout_secs=20)

    def attempt() -> None:
        if coordinator.process == 2:
            raise OSError(28, "no space", "/volume")

    try:
        coordinator.agree("step 5", attempt)
    except Exception as error:
        return [type(error).__name__, str(error), *getattr(error, "__notes__", [])]
    return []


def test_one_that_fails_is_known_to_all() -> None:
    results = mtt.run_processes(write_or_fail, 4, devices=1)
    kind, text, note = results.pop(2)
    assert (kind, text) == ("OSError", "[Errno 28] no space: '/volume'")
    assert results == [["CoordinationError", note]] * 3
    assert "process 2 (" in note


def test_several_processes_without_distributed_jax_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(CoordinationError, match=r"2 processes, but jax\.distributed is not"):
        _jax.job_store()


def test_an_unknown_status_of_the_store_is_translated() -> None:
    class Broken:
        def key_value_try_get_bytes(self, key: str) -> bytes:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset\nmore")

    with pytest.raises(CoordinationError, match="does not answer: UNAVAILABLE: connection reset"):
        DistributedStore(Broken()).get("a")
