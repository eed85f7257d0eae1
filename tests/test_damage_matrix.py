"""Every file of a share is damaged in every way, wherever it lies: no wrong state comes back.

One real save of two steps by two processes; then each file of one share of the newer step is harmed
and mended again, one after the other, and a restore by the real restorer is asked for. Either it
returns the older step and says why, or the newer one, right in every element.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from restoring_jobs import alone, extras_of, open_manager

from mtcheckpoint._attempt import Means
from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._jax import MemoryStore
from mtcheckpoint._restored import Candidate, Request
from mtcheckpoint._restorer import Restorer
from mtcheckpoint._shares.peers import ShareServer
from mtcheckpoint._shares.places import LocalPlace, PeerPlace, Place
from mtcheckpoint._shares.shardings import SHARDINGS_FILE
from mtcheckpoint.errors import MtCheckpointError
from mtcheckpoint.testing import (
    abstract_state,
    assert_state,
    case_mesh,
    case_state,
    ram_disk,
    run_processes,
)

OLD, NEW = 1, 2
VICTIM = 1
TIERS = ["local", "peer", "backup"]

Harm = Callable[[Path, Path], None]  # on a file; the other is the same file of another share


# The save.


def state_of(step: int) -> dict[str, Any]:
    """The standard state, and leaves of the kinds that it lacks."""
    counts = np.arange(5) + step
    return {**case_state(case_mesh(), step), "name": f"step {step}", "counts": counts, "lr": 0.5}


def save_two_steps(root: str) -> None:
    with open_manager(alone(root)) as manager:
        for step in (OLD, NEW):
            assert manager.save(step, state_of(step), extras=extras_of(step), force=True)


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    with ram_disk() as root:
        run_processes(save_two_steps, 2, devices=4, args=[str(root)])
        yield root


def share(root: Path, rank: int, step: int) -> Path:
    return root / f"node{rank}" / str(step)


# Harm.


def flip(at: float) -> Harm:
    """Flips one bit, so far into the file."""

    def harm(file: Path, other: Path) -> None:
        content = bytearray(file.read_bytes())
        place = min(int(len(content) * at), len(content) - 1)
        content[place] ^= 1 << (place % 8)
        file.write_bytes(content)

    return harm


def cut(file: Path, other: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3])


def empty(file: Path, other: Path) -> None:
    file.write_bytes(b"")


def grow(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0" * 16)


def remove(file: Path, other: Path) -> None:
    file.unlink()


def swap(file: Path, other: Path) -> None:
    file.write_bytes(other.read_bytes())


HARMS: dict[str, tuple[Harm, int, int]] = {
    # What is done, and the share whose file is put in its place by `swap`.
    **{f"bit at {at:.0%}": (flip(at), 0, NEW) for at in (0, 0.13, 0.4, 0.63, 0.87, 1)},
    "cut": (cut, 0, NEW),
    "empty": (empty, 0, NEW),
    "longer": (grow, 0, NEW),
    "removed": (remove, 0, NEW),
    "swapped with another rank's": (swap, 0, NEW),
    "swapped with an older step's": (swap, VICTIM, OLD),
}


def counterpart(file: Path, victim: Path, other: Path) -> Path:
    """The file of another share that has the same part there."""
    same = other / file.relative_to(victim)
    if same.is_file():
        return same
    # Data files have random names: the one at the same position of the same kind of folder.
    name = str(file.parent.relative_to(victim)).partition("process_")[0]
    ours = files_of(victim, name)
    theirs = files_of(other, name)
    return theirs[ours.index(file) % len(theirs)]


def files_of(share: Path, folder: str = "") -> list[Path]:
    found = [path for path in share.rglob("*") if path.is_file()]
    return sorted(p for p in found if str(p.parent.relative_to(share)).startswith(folder))


# Restoring.


@contextlib.contextmanager
def candidates(root: Path, tier: str) -> Iterator[Callable[[], list[Candidate]]]:
    """The newer step where a tier has it, and then the older one."""
    token = secrets.token_urlsafe(8)
    named = {str(rank): share(root, rank, NEW) for rank in (0, VICTIM)}
    with ShareServer(named, token=token, host="127.0.0.1") as server:

        def place(rank: int) -> Place:
            if tier == "peer":
                return PeerPlace(f"{server.url}/{rank}", token)
            return LocalPlace(share(root, rank, NEW), tier="backup")

        older = {rank: LocalPlace(share(root, rank, OLD)) for rank in (0, VICTIM)}
        newer = {rank: LocalPlace(path) for rank, path in enumerate(named.values())}
        common: dict[str, Any] = {"arrived_from": "local", "own_rank": VICTIM}
        new = Candidate(step=NEW, source=tier, own=lambda: newer, served=True, **common)
        if tier != "local":
            far = lambda: {rank: place(rank) for rank in (0, VICTIM)}  # noqa: E731
            new = dataclasses.replace(new, own=dict, served=False, backup=far)
        yield lambda: [new, Candidate(step=OLD, source="older", own=lambda: older, **common)]


def restore(found: list[Candidate], verify: Any = "full") -> Any:
    alone = Coordinator(MemoryStore(), process=0, processes=1, namespace="matrix", timeout_secs=30)
    restorer = Restorer(
        Means(
            coordinator=alone,
            mesh=case_mesh(),
            address="127.0.0.1",
            concurrent_bytes=1 << 20,
            timeout_secs=30.0,
            verify=verify,
        )
    )
    arrays = abstract_state(case_state(case_mesh(), 0))
    tree = {**arrays, "name": "", "counts": np.zeros(5, int), "lr": 0.0}
    return restorer.restore(iter(found), Request(tree=tree), {})


def outcome(found: list[Candidate], verify: Any = "full") -> tuple[str, int | None]:
    """What is wrong with what comes back, empty when nothing is; and its step."""
    try:
        restored = restore(found, verify)
    except MtCheckpointError as error:
        return f"{type(error).__name__}: {error}", None
    return wrong_in(restored, verify), restored.step


def wrong_in(restored: Any, verify: str) -> str:
    state, step = dict(restored.state), restored.step
    extras = [state.pop(name) for name in ("name", "counts", "lr")]
    try:
        assert_state(state, step)
    except AssertionError as error:
        return f"step {step}: {error}"
    if extras[0] != f"step {step}" or list(extras[1]) != [*range(step, step + 5)]:
        return f"step {step}: {extras}"
    if extras[2] != 0.5 or list(restored.extras) != [dict(extras_of_rank(r, step)) for r in (0, 1)]:
        return f"step {step}: {extras}, {restored.extras}"
    if verify == "full" and restored.report.unverified:
        return f"step {step}: {restored.report.unverified} were not compared with a seal"
    if step == OLD and not any(p.step == NEW and p.reason for p in restored.report.passed_over):
        return f"the newer step was passed over in silence: {restored.report}"
    return ""


def extras_of_rank(rank: int, step: int) -> Mapping[str, Any]:
    return {**extras_of(step), "rank": rank}


@pytest.mark.parametrize("tier", ["local", "peer", "backup"])
def test_without_verification_what_lies_there_comes_back_and_the_report_says_so(
    tier: str, saved: Path
) -> None:
    victim = share(saved, VICTIM, NEW)
    # The other one is the index, which has checksums of its own.
    (data,) = [p for p in victim.glob("state/d/*") if p.read_bytes()[:4] != b"\x0c\xdb\x20\xde"]
    content = data.read_bytes()
    flip(0.5)(data, data)
    try:
        with candidates(saved, tier) as found:
            restored = restore(found(), "off")
    finally:
        data.write_bytes(content)
    assert restored.step == NEW
    assert len(restored.report.unverified) == 2
    assert wrong_in(restored, "off").startswith(f"step {NEW}: "), "the flipped bit is in it"


# The matrix.

# Of these every change is noticed. Of data files only what is read: Orbax writes some bytes that
# nobody ever reads again. The rest (commit_success.txt and the like) is of no use to a restore.
ALWAYS_NOTICED = {
    *("mtcheckpoint/identity.json", "mtcheckpoint/seal.json", "mtcheckpoint/extras.json"),
    *("state/_METADATA", SHARDINGS_FILE, "state/_strings.json", "state/manifest.ocdbt"),
    "process_metadata/global_process_metadata.json",
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("tier", TIERS)
def test_no_harm_to_a_file_brings_back_a_wrong_state(saved: Path, tier: str, harm: str) -> None:
    rows = restore_after_each(saved, tier, harm)
    assert {name for name in rows if "/d/" not in name} >= ALWAYS_NOTICED
    assert sum("/d/" in name for name in rows) >= 2
    wrong = {name: fault for name, (fault, _) in rows.items() if fault}
    assert not wrong, "\n".join(f"{name}: {fault}" for name, fault in wrong.items())
    unnoticed = {name for name, (_, step) in rows.items() if step == NEW}
    # The ranks have some files in common.
    same = {"extras.json", "global_process_metadata.json", "_METADATA", "shardings.json"}
    same |= {"_strings.json"} if "rank" in harm else set()
    excused = {n for n in unnoticed if "swapped" in harm and n.rpartition("/")[2] in same}
    assert not (unnoticed & ALWAYS_NOTICED) - excused


@pytest.mark.parametrize("harm", ["cut", "empty", "longer", "removed"])
@pytest.mark.parametrize("tier", TIERS)
def test_sizes_alone_show_what_is_cut(saved: Path, tier: str, harm: str) -> None:
    rows = restore_after_each(saved, tier, harm, verify="size")
    assert {fault for fault, _ in rows.values()} == {""}
    assert {name for name, (_, step) in rows.items() if step == NEW} == set()


def restore_after_each(
    root: Path, tier: str, harm: str, verify: Any = "full"
) -> dict[str, tuple[str, int | None]]:
    """For each file of the victim: what is wrong with what comes back, and its step."""
    do, rank, step = HARMS[harm]
    victim = share(root, VICTIM, NEW)
    rows: dict[str, tuple[str, int | None]] = {}
    with candidates(root, tier) as found:
        for file in files_of(victim):
            before = file.read_bytes()
            do(file, counterpart(file, victim, share(root, rank, step)))
            try:
                rows[str(file.relative_to(victim))] = outcome(found(), verify)
            finally:
                file.write_bytes(before)
        assert restore(found()).step == NEW, "the harm was not undone"
    return rows


@pytest.mark.parametrize("tier", TIERS)
def test_a_share_in_the_place_of_another_is_no_help(saved: Path, tier: str) -> None:
    victim = share(saved, VICTIM, NEW)
    aside = victim.rename(victim.with_name("aside"))
    try:
        # The last two say that they are of an older step, as those do whose content is the same.
        for rank, step in ((0, NEW), (VICTIM, OLD), (0, OLD)):
            shutil.copytree(share(saved, rank, step), victim)
            with candidates(saved, tier) as found:
                assert outcome(found()) == ("", OLD), (rank, step)
            shutil.rmtree(victim)
    finally:
        shutil.rmtree(victim, ignore_errors=True)
        aside.rename(victim)
