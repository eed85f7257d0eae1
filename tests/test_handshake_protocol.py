"""The table of the handshake: its shape, what a look at the volume means, how markers are read."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import yaml
from handshake_peer import lay_out, ram_directory
from hypothesis import given, settings
from hypothesis import strategies as st

from mtcheckpoint._handshake.client import _scan
from mtcheckpoint._handshake.protocol import (
    END_STATES,
    TRANSITIONS,
    WAITS,
    Entry,
    Event,
    FileText,
    Observation,
    State,
    Target,
    diagram,
    event_of,
    fresh_text,
    read_markers,
)

CASES = Path(__file__).parent / "cases"
MARKERS = yaml.safe_load((CASES / "markers.yaml").read_text())
JOB, RANK = "train-a", 1

ENTRIES = {
    "link": Entry(kind="link", link="D.data", target=Target.DIRECTORY, share="D.data"),
    "dangling": Entry(kind="link", link="D.data", target=Target.MISSING),
    "empty": Entry(kind="file"),
    "file": Entry(kind="file", size_bytes=3),
    "directory": Entry(kind="directory"),
    "other": Entry(kind="other"),
}


# The table.


def test_every_state_and_event_is_used_and_explained() -> None:
    used = {state for state, _ in TRANSITIONS} | set(TRANSITIONS.values())
    assert used == set(State)
    assert {event for _, event in TRANSITIONS} == set(Event)
    assert len({state.value for state in State}) == len(State)
    assert all(len(member.value) > 10 for enumeration in (State, Event) for member in enumeration)


def test_end_states_have_no_way_out_and_all_others_do() -> None:
    with_way_out = {state for (state, _), following in TRANSITIONS.items() if following != state}
    assert with_way_out == set(State) - END_STATES


def test_every_state_is_reached_from_the_first() -> None:
    reached, frontier = {State.STALE_YAML}, {State.STALE_YAML}
    while frontier:
        frontier = {
            following
            for (state, _), following in TRANSITIONS.items()
            if state in frontier and following not in reached
        }
        reached |= frontier
    assert reached == set(State)


def test_every_wait_has_a_deadline_and_says_what_to_check() -> None:
    waiting = set(State) - END_STATES - {State.WRITING}
    assert set(WAITS) == waiting
    assert {state for state, event in TRANSITIONS if event is Event.DEADLINE} == waiting
    assert all(wait.what and wait.hint for wait in WAITS.values())


def test_the_table_has_no_loop_over_several_states() -> None:
    order = list(State)
    for (state, _), following in TRANSITIONS.items():
        assert order.index(following) >= order.index(state)


LOOKS = [
    Observation(entries=entries, yaml_present=present, failed=failed)
    for entries in ({}, *({"train-a-s0-n1-w0.restore": entry} for entry in ENTRIES.values()))
    for present in (True, False)
    for failed in (None, FileText(identity=(1,), text=""))
]


@pytest.mark.parametrize("state", WAITS, ids=lambda state: state.name)
@pytest.mark.parametrize("before", [Observation(), LOOKS[1]], ids=["clean", "stale-failed"])
def test_whatever_is_seen_the_table_knows_what_follows(state: State, before: Observation) -> None:
    for seen in LOOKS:
        event = event_of(state, seen, before, job=JOB, node_rank=RANK)
        assert (state, event) in TRANSITIONS


@pytest.mark.parametrize("state", [State.STALE_YAML, State.CONSUMPTION, State.REFUSAL])
def test_a_marker_is_not_looked_at_before_the_yaml_is_gone(state: State) -> None:
    seen = Observation(entries={"train-a-s4-n1-w0.restore": ENTRIES["link"]}, yaml_present=True)
    event = event_of(state, seen, Observation(), job=JOB, node_rank=RANK)
    assert event is Event.YAML_PRESENT


def test_diagram_has_every_change_of_state() -> None:
    lines = diagram().splitlines()
    changes = [pair for pair in TRANSITIONS.items() if pair[0][0] is not pair[1]]
    assert len(lines) == 2 + len(changes) + len(END_STATES)


# Files of errors.


def test_fresh_text_is_what_was_added() -> None:
    old = FileText(identity=(1, 3), text="abc")
    assert fresh_text(None, old) is None
    assert fresh_text(old, old) is None
    assert fresh_text(FileText(identity=(1, 6), text="abcdef"), old) == "def"
    assert fresh_text(FileText(identity=(2, 2), text="xy"), old) == "xy"
    assert fresh_text(FileText(identity=(2, 0), text=""), None) == ""


# Markers: the published cases.


@pytest.mark.parametrize("row", MARKERS, ids=lambda row: row["title"])
def test_marker_case(row: dict[str, object]) -> None:
    entries, outcome = row["entries"], row["outcome"]
    assert isinstance(entries, dict)
    with ram_directory() as volume:
        lay_out(volume, entries)
        verdict = read_markers(_scan(volume, Observation()).entries, JOB, RANK)
    if outcome == "error":
        assert verdict.event is Event.MARKER_BAD
        assert str(row["names"]) in f"{verdict.entry} {verdict.fault}"
        assert verdict.entry in entries
    elif outcome == "wait":
        assert verdict.event is Event.NO_MARKER
    elif outcome == "nothing":
        assert (verdict.event, verdict.step) == (Event.MARKER_NOTHING, None)
    else:
        assert (verdict.event, f"restore {verdict.step}") == (Event.MARKER_RESTORE, outcome)
        assert entries[verdict.share] == "dir"


# And their whole kind.

WORDS = "train-a train-a-2 train -s -n -w -g - 0 1 7 40 040 .restore .restore.tmp .meta é"
PIECES = st.sampled_from([*WORDS.split(), "\n", "train-a-s40-n1-w0", "-s9-n1-w0"])
NEARLY = st.one_of(
    st.lists(PIECES, min_size=1, max_size=8).map("".join),
    st.builds(
        "{}-s{}-n{}-{}{}{}".format,
        st.sampled_from(["train-a", "train-b", "train-a-2", "train-a-s9-n1", "x-train-a", ""]),
        st.sampled_from(["0", "7", "40", "007", "-4", "", "4x", "٣"]),
        st.sampled_from(["1", "3", "01", "-1", ""]),
        st.sampled_from(["w", "g", "W", ""]),
        st.sampled_from(["0", "1", "00", ""]),
        st.sampled_from([".restore", ".restore.tmp", ".meta", "", ".restore\n"]),
    ),
)
VOLUMES = st.dictionaries(NEARLY, st.sampled_from(sorted(ENTRIES)), max_size=6)


def own_step(name: str) -> int | None:
    """The step of a name that is exactly this node's marker, by other means than the reader."""
    head, tail = f"{JOB}-s", f"-n{RANK}-w0.restore"
    middle = name[len(head) : len(name) - len(tail)]
    fits = name == f"{head}{middle}{tail}" and bool(middle) and set(middle) <= set(string.digits)
    return int(middle) if fits and str(int(middle)) == middle else None


@settings(max_examples=400, deadline=None)
@given(VOLUMES)
def test_only_the_newest_own_marker_decides(kinds: dict[str, str]) -> None:
    verdict = read_markers({name: ENTRIES[kind] for name, kind in kinds.items()}, JOB, RANK)
    own = {step: kinds[name] for name in kinds if (step := own_step(name)) is not None}
    if not own:
        assert verdict.event in (Event.NO_MARKER, Event.MARKER_BAD)
    elif own[max(own)] == "link":
        assert (verdict.event, verdict.step) == (Event.MARKER_RESTORE, max(own))
    elif own == {0: "empty"}:
        assert verdict.event is Event.MARKER_NOTHING
    else:
        assert verdict.event is Event.MARKER_BAD
        assert own_step(verdict.entry) == max(own)


@settings(max_examples=400, deadline=None)
@given(VOLUMES)
def test_a_fault_is_always_about_a_name_of_our_job(kinds: dict[str, str]) -> None:
    verdict = read_markers({name: ENTRIES[kind] for name, kind in kinds.items()}, JOB, RANK)
    if verdict.event is Event.MARKER_BAD:
        assert verdict.entry in kinds
        assert verdict.entry.startswith(f"{JOB}-s")
        assert verdict.entry.endswith(".restore")
        assert verdict.fault


@pytest.mark.parametrize(
    "name",
    [
        "train-a-2-s40-n1-g0.restore",
        "train-a-s9-n1-w0-s40-n1-w0.restore",
        "train-a-s9-n1-s40-n1-g0.restore",
        "train-a.restore",
        ".restore",
    ],
)
def test_what_may_be_another_jobs_is_left_alone(name: str) -> None:
    assert read_markers({name: ENTRIES["link"]}, JOB, RANK).event is Event.NO_MARKER


@pytest.mark.parametrize("name", ["train-a-s40-n1-w1.restore", "train-a-s40-n01-w0.restore"])
def test_misspelt_names_of_ours_are_faults(name: str) -> None:
    verdict = read_markers({name: ENTRIES["link"]}, JOB, RANK)
    assert (verdict.event, verdict.entry) == (Event.MARKER_BAD, name)


def test_a_bad_newer_marker_is_not_passed_over_for_an_older_one() -> None:
    entries = {
        "train-a-s40-n1-w0.restore": ENTRIES["link"],
        "train-a-s60-n1-w0.restore": ENTRIES["dangling"],
    }
    verdict = read_markers(entries, JOB, RANK)
    assert (verdict.event, verdict.step) == (Event.MARKER_BAD, 60)


def test_job_name_with_a_marker_inside() -> None:
    name = "job-s9-n1-w0-s5-n1-w0.restore"
    assert read_markers({name: ENTRIES["link"]}, "job-s9-n1-w0", 1).step == 5
    assert read_markers({name: ENTRIES["link"]}, "job", 1).event is Event.NO_MARKER
