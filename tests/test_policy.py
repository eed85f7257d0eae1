"""Save decisions: the wishes of the policies, what holds them up, and what `decide` promises."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtcheckpoint._policy import (
    NEVER,
    AnyOf,
    ClusterState,
    Continuous,
    EveryNSeconds,
    FixedInterval,
    HostReport,
    Policy,
    SpecificSteps,
    Verdict,
    back_pressure,
    decide,
)


def report(process: int, step: int | None = None, **fields: object) -> HostReport:
    values = {"finished_step": step, "taken_step": step, "host": f"host-{process}", **fields}
    return HostReport(process=process, **values)  # type: ignore[arg-type]


def after_save(step: int, *, saved: int | None, at: float = 0.0, now: float = 0.0) -> ClusterState:
    """Two idle hosts at `step`, whose newest save is that of step `saved`."""
    return ClusterState(
        step=step,
        now_seconds=now,
        processes=2,
        reports=(report(0, saved), report(1, saved)),
        saved=() if saved is None else ((saved, at),),
        started_step=saved,
    )


def saved_steps(
    policy: Policy, steps: range, *, busy: range = range(0), first: int = 0
) -> list[int]:
    """What a loop over `steps` saves, when the hosts are unfinished during the steps of `busy`."""
    saved: tuple[tuple[int, float], ...] = ()
    for step in steps:
        started = saved[-1][0] if saved else None
        reports = (report(0, started), report(1, None if step in busy else started))
        if step in busy and started is None:
            reports = (reports[0], report(1, None, free_bytes=0, share_bytes=1))
        state = ClusterState(
            step=step,
            now_seconds=float(step),
            processes=2,
            reports=reports,
            saved=saved,
            started_step=started,
            first_step=first,
        )
        if decide(policy, state, save_on_start=False).save:
            saved = (*saved, (step, float(step)))
    return [step for step, _ in saved]


# Wishes.


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Continuous(), list(range(12))),
        (Continuous(minimum_interval_secs=4), [0, 4, 8]),
        (EveryNSeconds(5), [0, 5, 10]),
        (FixedInterval(5), [5, 10]),
        (SpecificSteps([7, 0, 3, 7]), [0, 3, 7]),
        (AnyOf([FixedInterval(5), SpecificSteps([6])]), [5, 6, 10]),
    ],
    ids=lambda value: str(value),
)
def test_what_an_idle_cluster_saves(policy: Policy, expected: list[int]) -> None:
    assert saved_steps(policy, range(12)) == expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (FixedInterval(5), [5, 13, 15]),
        (SpecificSteps([5, 10]), [5, 13]),
        (Continuous(), [*range(9), 13, 14, 15]),
    ],
    ids=lambda value: str(value),
)
def test_a_step_that_was_held_up_is_made_up_for_once(policy: Policy, expected: list[int]) -> None:
    assert saved_steps(policy, range(16), busy=range(9, 13)) == expected


def test_the_first_save_is_made_up_for_too() -> None:
    assert saved_steps(FixedInterval(5), range(12), busy=range(3, 8)) == [8, 10]


def test_a_restored_run_owes_no_save_from_before_its_start() -> None:
    assert saved_steps(FixedInterval(10), range(58, 75), first=58) == [60, 70]


def test_a_run_that_went_back_owes_nothing_from_before_its_start() -> None:
    state = dataclasses.replace(after_save(58, saved=50), first_step=58)
    verdict = decide(FixedInterval(5), state, save_on_start=False)
    assert not verdict.save and verdict.ask_again_at == 60


def test_any_of_asks_again_when_the_first_policy_may_want_to() -> None:
    policy = AnyOf([FixedInterval(10), SpecificSteps([7])])
    assert policy.wants(after_save(3, saved=2)).ask_again_at == 7


def test_a_list_that_is_done_never_asks_again() -> None:
    assert SpecificSteps([3]).wants(after_save(4, saved=3)).ask_again_at == NEVER


def test_save_on_start_means_step_zero_only() -> None:
    policy = FixedInterval(100)
    assert decide(policy, after_save(0, saved=None), save_on_start=True).save
    assert not decide(policy, after_save(0, saved=None), save_on_start=False).save
    assert not decide(policy, after_save(1, saved=None), save_on_start=True).save


def test_a_preempted_host_makes_all_save() -> None:
    state = after_save(3, saved=2)
    state = dataclasses.replace(state, reports=(report(0, 2), report(1, 2, preempted=True)))
    verdict = decide(FixedInterval(100), state, save_on_start=False)
    assert verdict.save
    assert "host-1 (process 1) is being preempted" in verdict.reason


def test_a_step_is_not_saved_twice() -> None:
    verdict = decide(Continuous(), after_save(3, saved=3), save_on_start=False)
    assert verdict == Verdict(save=False, reason="step 3 is saved already", ask_again_at=4)


def test_times_of_another_clock_do_not_stop_the_saves() -> None:
    state = after_save(8, saved=7, at=1e9, now=5.0)
    assert decide(EveryNSeconds(60), state, save_on_start=False).save


@pytest.mark.parametrize("policy", [Continuous(), FixedInterval(5), SpecificSteps([55])])
def test_steps_that_went_back_are_saved_again(policy: Policy) -> None:
    """Rolled back from 100 to 51; hosts and record still speak of step 100."""
    state = dataclasses.replace(after_save(55, saved=100), first_step=51)
    assert decide(policy, state, save_on_start=False).save


def test_a_report_from_before_the_roll_back_counts_as_unfinished() -> None:
    state = dataclasses.replace(after_save(56, saved=55), reports=(report(0, 55), report(1, 100)))
    assert back_pressure(state) == "host-1 (process 1) has not finished the save of step 55"


@pytest.mark.parametrize(
    "make", [lambda: FixedInterval(0), lambda: EveryNSeconds(0), lambda: AnyOf([])]
)
def test_policies_that_make_no_sense_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"period must be|seconds must be|at least one"):
        make()  # type: ignore[operator]


# What holds a save up.


def test_the_unfinished_host_is_named_with_the_step() -> None:
    state = dataclasses.replace(after_save(6, saved=5), reports=(report(0, 5), report(1, 4)))
    assert back_pressure(state) == "host-1 (process 1) has not finished the save of step 5"


def test_a_process_without_a_report_holds_up_all_but_the_first_save() -> None:
    silent = dataclasses.replace(after_save(6, saved=5), reports=(report(0, 5),))
    assert back_pressure(silent) == "process 1 has not reported on the save of step 5"
    assert back_pressure(dataclasses.replace(silent, saved=(), started_step=None)) is None


def test_the_host_whose_replicator_lags_is_named_with_the_steps() -> None:
    lagging = report(1, 7, taken_step=3)
    state = ClusterState(
        step=8,
        now_seconds=0.0,
        processes=2,
        reports=(report(0, 7), lagging),
        saved=((3, 0.0), (5, 1.0), (7, 2.0)),
        started_step=7,
    )
    assert back_pressure(state) == "host-1 (process 1): the replicator has not taken step 5, 7"
    assert back_pressure(state, untaken_limit=2) is not None
    assert back_pressure(state, untaken_limit=3) is None


@pytest.mark.parametrize(("free", "fits"), [(1049, False), (1050, True), (None, True)])
def test_a_share_must_fit_with_a_margin(free: int | None, fits: bool) -> None:
    full = report(1, 5, free_bytes=free, share_bytes=1000)
    state = dataclasses.replace(after_save(6, saved=5), reports=(report(0, 5), full))
    expected = "host-1 (process 1): the next share needs 1050 bytes, 1049 bytes are free"
    assert back_pressure(state) == (None if fits else expected)


# What `decide` promises, for any state.

STEPS = st.integers(0, 60)
MAYBE_STEP = st.none() | STEPS

SIMPLE_POLICIES: st.SearchStrategy[Policy] = st.one_of(
    st.builds(Continuous, st.none() | st.floats(0, 30)),
    st.builds(EveryNSeconds, st.floats(0.5, 30)),
    st.builds(FixedInterval, st.integers(1, 20)),
    st.builds(SpecificSteps, st.lists(STEPS, max_size=5)),
)
POLICIES = SIMPLE_POLICIES | st.builds(AnyOf, st.lists(SIMPLE_POLICIES, min_size=1, max_size=3))


@st.composite
def cluster_states(draw: st.DrawFn) -> ClusterState:
    saved = draw(st.lists(st.tuples(STEPS, st.floats(0, 100)), max_size=4))
    started = draw(st.sampled_from([None, *[step for step, _ in saved], draw(STEPS)]))
    newest = st.just(started) | MAYBE_STEP
    sizes = st.none() | st.integers(0, 1000)
    reports = [
        HostReport(
            process=process,
            host=f"host-{process}",
            finished_step=draw(newest),
            taken_step=draw(newest),
            free_bytes=draw(sizes),
            share_bytes=draw(sizes),
            preempted=draw(st.booleans()),
        )
        for process in draw(st.sets(st.integers(0, 2)))
    ]
    return ClusterState(
        step=draw(STEPS),
        now_seconds=draw(st.floats(0, 200)),
        processes=3,
        reports=tuple(reports),
        saved=tuple(saved),
        started_step=started,
        first_step=draw(STEPS),
    )


def all_hosts_are_free(state: ClusterState) -> bool:
    """The rule, said differently from the code: for a limit of one untaken step."""
    quiet = state.started_step is None or (
        len(state.reports) == state.processes
        and all(r.finished_step == r.taken_step == state.started_step for r in state.reports)
    )
    return quiet and all(
        r.free_bytes is None or r.share_bytes is None or r.free_bytes >= r.share_bytes * 1.05
        for r in state.reports
    )


@given(POLICIES, cluster_states(), st.booleans())
def test_nothing_is_saved_while_a_host_is_busy_behind_or_full(
    policy: Policy, state: ClusterState, save_on_start: bool
) -> None:
    verdict = decide(policy, state, save_on_start=save_on_start)
    if verdict.save:
        assert all_hosts_are_free(state)
    assert (back_pressure(state) is None) == all_hosts_are_free(state)
    assert verdict.reason and verdict.ask_again_at > state.step


@given(POLICIES, cluster_states(), st.booleans(), st.floats(0, 5))
def test_no_step_before_ask_again_would_be_saved(
    policy: Policy, state: ClusterState, save_on_start: bool, seconds_per_step: float
) -> None:
    verdict = decide(policy, state, save_on_start=save_on_start)
    if verdict.save:
        return
    for step in range(state.step + 1, min(verdict.ask_again_at, state.step + 70)):
        now = state.now_seconds + (step - state.step) * seconds_per_step
        later = dataclasses.replace(state, step=step, now_seconds=now)
        assert not decide(policy, later, save_on_start=save_on_start).save


@given(POLICIES, cluster_states())
def test_the_same_state_gives_the_same_answer(policy: Policy, state: ClusterState) -> None:
    assert decide(policy, state, save_on_start=True) == decide(policy, state, save_on_start=True)
