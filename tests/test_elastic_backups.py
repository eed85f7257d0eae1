"""Backups of four nodes restored by two and by one, from a folder and a bucket that may fail."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import elastic_jobs
import fsspec
import gcs_server
import pytest
from elastic_jobs import JOB, Run, digest_for, lay_out, restore_alone
from gcs_proxy import LIST, READ, Fault, FaultyProxy
from restoring_clusters import run_job, same
from restoring_jobs import environment_of, together

from mtcheckpoint._handshake import files
from mtcheckpoint.testing import ram_disk

pytestmark = pytest.mark.extended

NODES = 4
STEP, OLDER_STEP = 4, 3
DAMAGED, HALF, GOOD, OLDER = (f"2031-01-0{day}_00-00" for day in (4, 3, 2, 1))
SAVED = Run(hosts=[0, 1, 2, 3], mesh=[4, 2], steps=[OLDER_STEP, STEP])
LIMIT_SECONDS = 20.0

RESHAPED = {
    "two by two": Run(hosts=[0, 1], mesh=[2, 2]),
    "rows only": Run(hosts=[0, 1], mesh=[8, 1]),
    "columns only, as saved": Run(hosts=[0, 1], mesh=[1, 8], given=False),
    "swapped": Run(hosts=[0, 1], mesh=[4, 2], swapped=True),
    "swapped, as saved": Run(hosts=[0, 1], mesh=[2, 4], swapped=True, given=False),
}
ALONE = {
    "one device": Run(hosts=[0], mesh=[1, 1]),
    "one device, as saved": Run(hosts=[0], mesh=[1, 1], given=False),
    "one process": Run(hosts=[0], mesh=[2, 4]),
}

# What fails, how often, and on which of the two hosts.
FAULTS: dict[str, tuple[Fault, list[int]]] = {
    "503 twice": (Fault(path="", status=503, times=2), [0, 1]),
    "503 twice on a reading host": (Fault(path="", status=503, times=2), [1]),
    "429 twice": (Fault(path="", status=429, times=2), [0, 1]),
    "a slow list": (Fault(path=LIST, delay_secs=1.0), [0, 1]),
    "503 for ever": (Fault(path="", status=503), [0, 1]),
    "503 for ever on one host": (Fault(path=READ, status=503), [1]),
    "403 on list": (Fault(path=LIST, status=403), [0, 1]),
    "403 on list on the host that lists": (Fault(path=LIST, status=403), [0]),
    "403 on read": (Fault(path=READ, status=403), [0, 1]),
    "403 on read on one host": (Fault(path=READ, status=403), [1]),
}
MENDED = ["503 twice", "503 twice on a reading host", "429 twice", "a slow list"]


# Damage in memory, where two nodes hold all four shares: the node, the rank, and what is bad.
DAMAGE: dict[str, list[tuple[int, int, str]]] = {
    "no damage": [],
    "a manifest here, a byte there": [(0, 1, "manifest"), (1, 2, "byte")],
    "a byte in both copies": [(0, 1, "byte"), (1, 1, "byte")],
    "an own share gone, a peer's damaged": [(0, 0, "gone"), (1, 3, "manifest")],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What the jobs found, by place and scenario, and the bucket before and after."""

    two: dict[str, list[dict[str, Any]]]
    one: dict[str, list[dict[str, Any]]]
    before: dict[str, list[str]]
    after: dict[str, list[str]]
    methods: set[str]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Outcomes]:
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(ram_disk())
        server = stack.enter_context(gcs_server.running_server())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in gcs_server.environment(server).items():
            patch.setenv(name, value)
        run_job(elastic_jobs.save_alone, NODES, str(root), dataclasses.asdict(SAVED))
        places = {"folder": f"{root}/backups", "bucket": f"gs://{gcs_server.make_bucket(server)}"}
        for place in places.values():
            make_backups(root, place)
        before = {name: listing(place) for name, place in places.items()}
        proxies = {
            name: stack.enter_context(FaultyProxy(server, fault))
            for name, (fault, _) in FAULTS.items()
        }
        urls = {name: proxy.url for name, proxy in proxies.items()}
        environment = environment_of(server)
        for name, damage in DAMAGE.items():
            keep_in_memory(root, root / "two" / name, damage)
        two = run_job(restore_by_two, 2, str(root / "two"), places, server, urls, env=environment)
        one = run_job(restore_by_one, 1, str(root / "one"), places, env=environment)
        yield Outcomes(
            two=by_scenario(two),
            one=by_scenario(one),
            before=before,
            after={name: listing(place) for name, place in places.items()},
            methods=set().union(*(proxy.methods for proxy in proxies.values())),
        )


def by_scenario(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [process[name] for process in found] for name in found[0]}


def make_backups(root: Path, place: str) -> None:
    """A good backup of step 4 and an older one; newer ones that are of no use; others' things."""
    for name, step in ((GOOD, STEP), (OLDER, OLDER_STEP), (HALF, STEP), (DAMAGED, STEP)):
        for rank in range(NODES):
            share = root / f"node{rank}" / str(step)
            lay_out(share, f"{place}/{JOB}/{name}", step=step, node_rank=rank)
            if name == GOOD:
                lay_out(share, f"{place}/job-b/{DAMAGED}", step=step, node_rank=rank, job="job-b")
    filesystem, path = fsspec.core.url_to_fs(f"{place}/{JOB}")
    half = files.ShareName(job=JOB, step=STEP, node_rank=2).meta
    filesystem.rm_file(f"{path}/{HALF}/{half}")
    manifest = f"{path}/{DAMAGED}/{files.data_name(digest_for(STEP, 1))}/state/manifest.ocdbt"
    filesystem.pipe_file(manifest, filesystem.cat_file(manifest)[:20])
    filesystem.pipe_file(f"{path}/notes.txt", b"not a backup")
    filesystem.makedirs(f"{path}/unfinished", exist_ok=True)
    filesystem.pipe_file(f"{path}/unfinished/{half}", b"neither")


def keep_in_memory(root: Path, place: Path, damage: list[tuple[int, int, str]]) -> None:
    """Both nodes hold all shares of the newest step, some of them damaged."""
    for node in range(2):
        for rank in range(NODES):
            share = root / f"node{rank}" / str(STEP)
            lay_out(share, f"{place}/node{node}", step=STEP, node_rank=rank)
    for node, rank, kind in damage:
        share = place / f"node{node}" / files.data_name(digest_for(STEP, rank))
        if kind == "gone":
            shutil.rmtree(share)
        elif kind == "manifest":
            manifest = share / "state" / "manifest.ocdbt"
            manifest.write_bytes(manifest.read_bytes()[:20])
        else:
            flip_a_byte(share / "state")


def flip_a_byte(state: Path) -> None:
    """In the largest file of arrays."""
    file = max(state.rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def listing(url: str) -> list[str]:
    filesystem, path = fsspec.core.url_to_fs(url)
    found = filesystem.find(path, detail=True)
    return sorted(
        f"{name} {entry['size']} {entry.get('generation')}" for name, entry in found.items()
    )


@pytest.mark.parametrize("place", ["folder", "bucket"])
@pytest.mark.parametrize("shape", RESHAPED)
def test_two_restore_what_four_saved(outcomes: Outcomes, place: str, shape: str) -> None:
    assert_restored(outcomes.two[f"{place}: {shape}"])


@pytest.mark.parametrize("place", ["folder", "bucket"])
@pytest.mark.parametrize("shape", ALONE)
def test_one_restores_what_four_saved(outcomes: Outcomes, place: str, shape: str) -> None:
    assert_restored(outcomes.one[f"{place}: {shape}"])


def assert_restored(found: list[dict[str, Any]]) -> None:
    """The newest whole backup, and why newer ones were passed over."""
    assert same(found, "step", "tier") == [STEP, "backup"]
    assert same(found, "extras") == [[rank, STEP] for rank in range(NODES)]
    passed_over = {source.rpartition("/")[2]: why for _, source, why in found[0]["passed_over"]}
    assert list(passed_over) == [DAMAGED, HALF]
    assert "no .meta of rank 2" in passed_over[HALF]
    assert digest_for(STEP, 1) in passed_over[DAMAGED]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_copy_in_memory_is_replaced_by_a_good_one(outcomes: Outcomes, damage: str) -> None:
    found = outcomes.two[damage]
    if damage == "a byte in both copies":
        assert same(found, "step", "tier") == [STEP, "backup"]
        assert (STEP, "the cluster's memory") in [(s, w) for s, w, _ in found[0]["passed_over"]]
        return
    assert same(found, "step", "passed_over") == [STEP, []]
    left_out = "".join(text for process in found for text in process["left_out"])
    for _, rank, kind in DAMAGE[damage]:
        assert (digest_for(STEP, rank) in left_out) == (kind != "gone"), left_out


@pytest.mark.parametrize("fault", MENDED)
def test_a_fault_that_passes(outcomes: Outcomes, fault: str) -> None:
    assert_restored(outcomes.two[fault])


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - set(MENDED)))
def test_a_fault_that_stays_is_the_same_error_on_all_hosts(outcomes: Outcomes, fault: str) -> None:
    """Never a fresh start, and never an older backup: what is there is not known."""
    found = outcomes.two[fault]
    assert same(found, "error") == "TierUnreadableError", found
    for process in found:
        assert ("403" in process["message"] or "orbidden" in process["message"]) == ("403" in fault)
        assert process["took_seconds"] < LIMIT_SECONDS


def test_nothing_is_written_or_deleted_there(outcomes: Outcomes) -> None:
    assert outcomes.before == outcomes.after
    assert outcomes.methods == {"GET"}


def restore_by_two(
    root: str, places: dict[str, str], server: str, urls: dict[str, str]
) -> dict[str, Any]:
    Path(root).mkdir(exist_ok=True)
    together("begun")
    found = restore_reshaped(root, places, RESHAPED)
    for name in DAMAGE:
        run = dataclasses.replace(RESHAPED["two by two"], flags={"backup_root": places["folder"]})
        found[name] = restore_alone(f"{root}/{name}", run)
    wait_less()
    for name, (_, hosts) in FAULTS.items():
        url = urls[name] if elastic_jobs.rank() in hosts else server
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in gcs_server.environment(url).items():
                patch.setenv(variable, value)
            run = dataclasses.replace(
                RESHAPED["two by two"], flags={"backup_root": places["bucket"]}
            )
            found[name] = restore_alone(root, run)
        together(name)
    return found


def restore_by_one(root: str, places: dict[str, str]) -> dict[str, Any]:
    Path(root).mkdir(exist_ok=True)
    return restore_reshaped(root, places, ALONE)


def restore_reshaped(
    root: str, places: dict[str, str], shapes: dict[str, Run]
) -> dict[str, dict[str, Any]]:
    return {
        f"{place}: {name}": restore_alone(
            root, dataclasses.replace(run, flags={"backup_root": url})
        )
        for place, url in places.items()
        for name, run in shapes.items()
    }


def wait_less() -> None:
    """gcsfs waits for half a minute between its six tries; here for a twentieth of that."""
    import gcsfs.retry

    shortened = types.SimpleNamespace(**vars(asyncio))
    shortened.sleep = lambda seconds: asyncio.sleep(seconds / 20)
    gcsfs.retry.asyncio = shortened
