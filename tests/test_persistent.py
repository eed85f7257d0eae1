"""Checkpoints without the RAM disk: what the flags ask for, and the same answers everywhere."""

from __future__ import annotations

import dataclasses
import datetime
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest

import mtcheckpoint as mtc
import mtcheckpoint.testing as mtt
from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._jax import MemoryStore
from mtcheckpoint._orbax import operation_id
from mtcheckpoint._persistent import AgreedPolicy
from mtcheckpoint.errors import ConfigError, CoordinationError, TierUnreadableError

policies = ocp.checkpoint_managers


def flags(folder: Path | str, **changes: Any) -> mtc.CheckpointConfig:
    return mtc.CheckpointConfig(checkpoint_dir=str(folder), timeout_secs=60, **changes)


def save_steps(manager: Any, steps: Sequence[int], mesh: Any) -> list[int]:
    """The steps that the manager chose to save, each of them finished before the next."""
    saved = []
    for step in steps:
        args = ocp.args.StandardSave(mtt.case_state(mesh, step))
        if manager.save(step, args=args):
            saved.append(step)
        manager.wait_until_finished()
    return saved


def run(
    folder: Path, steps: Sequence[int], *, policy: Any = None, keep: Any = None, **f: Any
) -> Any:
    """(saved steps, steps that a new manager finds)."""
    mesh = mtt.case_mesh()
    config = flags(folder, **f)
    with mtc.create_checkpoint_manager(
        config, mesh, policy=policy, preservation_policy=keep
    ) as manager:
        saved = save_steps(manager, steps, mesh)
    with mtc.create_checkpoint_manager(config, mesh) as manager:
        found = list(manager.all_steps())
        target = mtt.abstract_state(mtt.case_state(mesh, 0))
        for step in found:
            mtt.assert_state(manager.restore(step, args=ocp.args.StandardRestore(target)), step)
    assert sorted(int(entry.name) for entry in folder.iterdir()) == found
    return saved, found


# Which manager.


def test_checkpointing_switched_off_gives_no_manager() -> None:
    config = mtc.CheckpointConfig(enable_checkpointing=False)
    assert mtc.create_checkpoint_manager(config, mtt.case_mesh()) is None


def test_multi_tier_checkpointing_gives_our_manager(volume_root: Path) -> None:
    config = mtc.CheckpointConfig(
        enable_multi_tier_checkpointing=True,
        enable_replicator=False,
        max_num_checkpoints_to_keep=1,
        local_checkpoint_directory=str(volume_root),
        local_checkpoint_period=1,
        run_name="train-a",
    )
    with mtc.create_checkpoint_manager(config, mtt.case_mesh()) as manager:
        assert type(manager) is mtc.ReplicatedCheckpointManager
    with pytest.raises(ConfigError, match="preservation_policy") as caught:
        mtc.create_checkpoint_manager(
            config, mtt.case_mesh(), preservation_policy=policies.LatestN(1)
        )
    assert caught.value.fields == ("preservation_policy", "enable_multi_tier_checkpointing")


def test_else_it_is_orbaxs_own_manager(volume_root: Path) -> None:
    with mtc.create_checkpoint_manager(flags(volume_root), mtt.case_mesh()) as manager:
        assert type(manager) is ocp.CheckpointManager


# What the flags say.


def test_a_period_saves_its_multiples_and_keeps_the_newest(volume_root: Path) -> None:
    result = run(volume_root, range(10), checkpoint_period=3, max_num_checkpoints_to_keep=2)
    assert result == ([0, 3, 6, 9], [6, 9])


def test_without_a_limit_all_are_kept_and_step_0_can_be_left_out(volume_root: Path) -> None:
    result = run(volume_root, range(7), checkpoint_period=3, save_checkpoint_on_start=False)
    assert result == ([3, 6], [3, 6])


def test_continuous_saves_follow_each_other_when_each_is_finished(volume_root: Path) -> None:
    result = run(
        volume_root,
        range(5),
        enable_continuous_checkpointing=True,
        max_num_checkpoints_to_keep=1,
    )
    assert result == ([0, 1, 2, 3, 4], [4])


def test_continuous_saves_keep_their_least_interval(volume_root: Path) -> None:
    result = run(
        volume_root,
        range(5),
        enable_continuous_checkpointing=True,
        minimum_interval_secs=3600,
    )
    assert result == ([0], [0])


def test_a_run_that_goes_on_does_not_save_again_what_is_there(volume_root: Path) -> None:
    assert run(volume_root, range(5), checkpoint_period=2)[0] == [0, 2, 4]
    assert run(volume_root, range(9), checkpoint_period=2)[0] == [6, 8]


def test_without_async_checkpointing_a_save_is_finished_when_it_returns(volume_root: Path) -> None:
    mesh = mtt.case_mesh()
    config = flags(volume_root, async_checkpointing=False)
    with mtc.create_checkpoint_manager(config, mesh) as manager:
        assert manager.save(0, args=ocp.args.PyTreeSave(mtt.case_state(mesh, 0)))
        assert not manager.is_saving_in_progress()
        assert (volume_root / "0" / "_CHECKPOINT_METADATA").exists()


def test_items_of_several_kinds_are_saved_as_orbax_does(volume_root: Path) -> None:
    mesh = mtt.case_mesh()
    with mtc.create_checkpoint_manager(
        flags(volume_root, checkpoint_storage_concurrent_gb=1), mesh
    ) as manager:
        state = ocp.args.PyTreeSave(mtt.case_state(mesh, 7))
        manager.save(
            7,
            args=ocp.args.Composite(state=state, data=ocp.args.JsonSave({"batch": 8})),
            force=True,
        )
        manager.wait_until_finished()
        target = mtt.abstract_state(mtt.case_state(mesh, 0))
        restored = manager.restore(
            7,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(
                    target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
                ),
                data=ocp.args.JsonRestore(),
            ),
        )
    mtt.assert_state(restored.state, 7)
    assert restored.data == {"batch": 8}


# Policies of the user.


@dataclasses.dataclass
class Chosen:
    """A policy of a user: any answer, from what Orbax tells it."""

    answer: Callable[[int, bool], bool]

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return self.answer(step.step, context.is_saving_in_progress)


@dataclasses.dataclass
class KeepEven:
    """A preservation policy of a user."""

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        return [info.step % 2 == 0 for info in checkpoints]


def test_a_policy_of_the_user_replaces_the_period(volume_root: Path) -> None:
    policy = Chosen(lambda step, saving: step in (1, 4))
    result = run(volume_root, range(6), policy=policy, checkpoint_period=2)
    assert result == ([0, 1, 4], [0, 1, 4])


def test_preservation_policies_of_orbax_and_of_the_user(volume_root: Path) -> None:
    every = {"checkpoint_period": 1}
    result = run(volume_root / "a", range(5), keep=policies.EveryNSeconds(3600), **every)
    assert result == ([0, 1, 2, 3, 4], [0])
    result = run(volume_root / "b", range(5), keep=KeepEven(), **every)
    assert result == ([0, 1, 2, 3, 4], [0, 2, 4])


@pytest.mark.parametrize("name", ["policy", "preservation_policy"])
def test_what_is_no_policy_is_refused(volume_root: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} should be .* found int") as caught:
        mtc.create_checkpoint_manager(flags(volume_root), mtt.case_mesh(), **{name: 3})
    assert caught.value.fields == (name,)


# The directory.


def test_a_missing_directory_is_made(volume_root: Path) -> None:
    folder = volume_root / "runs" / "a"
    with mtc.create_checkpoint_manager(flags(folder), mtt.case_mesh()):
        assert list(folder.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_refused(volume_root: Path) -> None:
    (volume_root / "file").write_text("")
    with pytest.raises(TierUnreadableError, match="cannot be written by process 0") as caught:
        mtc.create_checkpoint_manager(flags(volume_root / "file" / "a"), mtt.case_mesh())
    assert caught.value.place == str(volume_root / "file" / "a")


@pytest.mark.parametrize("directory", ["", "runs/a", "~/runs"])
def test_a_directory_that_is_no_place_is_refused(directory: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint_dir"):
        mtc.create_checkpoint_manager(flags(directory), mtt.case_mesh())


# Agreement, over threads.


@dataclasses.dataclass
class Info:
    step: int
    time: datetime.datetime = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    metrics: None = None


class CountingStore(MemoryStore):
    """A store that knows how often it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.most_keys = 0

    def set(self, key: str, value: bytes) -> None:
        self.calls += 1
        super().set(key, value)

    def set_once(self, key: str, value: bytes) -> bool:
        self.calls += 1
        self.most_keys = max(self.most_keys, len(self.list("job/lead")))
        return super().set_once(key, value)


def coordinators(store: MemoryStore, processes: int) -> list[Coordinator]:
    return [
        Coordinator(store, process=p, processes=processes, namespace="job", timeout_secs=20)
        for p in range(processes)
    ]


def context(*, saving: bool = False) -> Any:
    return policies.DecisionContext(
        is_saving_in_progress=saving,
        reached_preemption=False,
        multiprocessing_options=ocp.options.MultiprocessingOptions(primary_host=0),
    )


def ask_all(agreed: Sequence[AgreedPolicy], step: int, saving: Sequence[bool]) -> list[bool]:
    """Asks all processes, process 0 last: the others then wait for it."""
    answers: dict[int, bool] = {}

    def ask(process: int) -> None:
        answers[process] = agreed[process].should_save(
            Info(step), [], context=context(saving=saving[process])
        )

    threads = [threading.Thread(target=ask, args=[p]) for p in range(1, len(agreed))]
    for thread in threads:
        thread.start()
    told = agreed[0]._coordinator.announced
    wanted = dict(enumerate(saving[1:], start=1))
    while {p: r["saving"] for p, r in told("report").items() if p} != wanted:
        threads[0].join(0.001)
    ask(0)
    for thread in threads:
        thread.join(20)
    return [answers[process] for process in range(len(agreed))]


def test_one_host_that_still_saves_holds_up_the_save_on_all() -> None:
    free = Chosen(lambda step, saving: not saving)
    agreed = [AgreedPolicy(c, alike=[], asked=[free]) for c in coordinators(MemoryStore(), 3)]
    assert ask_all(agreed, 0, [False, False, False]) == [True] * 3
    assert ask_all(agreed, 1, [False, False, True]) == [False] * 3
    assert ask_all(agreed, 2, [True, False, False]) == [False] * 3
    assert ask_all(agreed, 3, [False, False, False]) == [True] * 3


def test_a_policy_that_looks_at_its_own_host_is_asked_on_one() -> None:
    asked: list[int] = []

    def own(process: int) -> Chosen:
        return Chosen(lambda step, saving: (asked.append(process), process == 0)[1])

    agreed = [
        AgreedPolicy(c, alike=[], asked=[own(c.process)]) for c in coordinators(MemoryStore(), 3)
    ]
    assert ask_all(agreed, 0, [False] * 3) == [True] * 3
    assert asked == [0]


def test_the_same_step_gets_the_same_answer() -> None:
    flips = iter([True, False, True])
    (alone,) = coordinators(MemoryStore(), 1)
    agreed = AgreedPolicy(alone, alike=[], asked=[Chosen(lambda step, saving: next(flips))])
    answers = [agreed.should_save(Info(step), [], context=context()) for step in (0, 0, 1, 1, 2)]
    assert answers == [True, True, False, False, True]


def test_a_policy_that_fails_fails_everywhere_and_only_then() -> None:
    def answer(step: int, saving: bool) -> bool:
        if step == 0:
            raise KeyError("metrics")
        return True

    agreed = [
        AgreedPolicy(c, alike=[], asked=[Chosen(answer)]) for c in coordinators(MemoryStore(), 2)
    ]
    with pytest.raises(KeyError):
        agreed[0].should_save(Info(0), [], context=context())
    with pytest.raises(CoordinationError, match=r"process 0 failed .* KeyError: 'metrics'"):
        agreed[1].should_save(Info(0), [], context=context())
    assert ask_all(agreed, 1, [False, False]) == [True, True]


def test_answers_that_all_have_read_are_deleted() -> None:
    store = CountingStore()
    (alone,) = coordinators(store, 1)
    agreed = AgreedPolicy(alone, alike=[], asked=[Chosen(lambda step, saving: False)])
    for step in range(1000):
        assert not agreed.should_save(Info(step), [], context=context())
    assert 0 < store.most_keys <= 2 * 64


@pytest.mark.parametrize(
    "policy",
    [
        policies.FixedIntervalPolicy(10),
        policies.SpecificStepsPolicy([20, 30]),
        policies.AnySavePolicy(
            [policies.PreemptionCheckpointingPolicy(), policies.FixedIntervalPolicy(10)]
        ),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_decisions_by_the_step_alone_say_nothing_to_others(
    volume_root: Path, monkeypatch: pytest.MonkeyPatch, policy: Any
) -> None:
    store = CountingStore()
    monkeypatch.setattr("mtcheckpoint._coordination.job_store", lambda: store)
    with mtc.create_checkpoint_manager(
        flags(volume_root, enable_autocheckpoint=True), mtt.case_mesh(), policy=policy
    ) as manager:
        before = store.calls
        assert [step for step in range(40) if manager.should_save(step)][-2:] == [20, 30]
        assert store.calls == before > 0


def test_a_period_says_nothing_to_others_and_continuous_saves_do(
    volume_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CountingStore()
    monkeypatch.setattr("mtcheckpoint._coordination.job_store", lambda: store)
    for continuous in (False, True):
        config = flags(
            volume_root, checkpoint_period=10, enable_continuous_checkpointing=continuous
        )
        with mtc.create_checkpoint_manager(config, mtt.case_mesh()) as manager:
            before = store.calls
            assert manager.should_save(10)
            assert (store.calls > before) == continuous


# In real processes.


def loop(folder: str, saves: int, kind: str = "flags", **changes: Any) -> dict[str, Any]:
    """A training loop with a host of its own pace; what it saved, and what a new manager finds."""
    rng = random.Random(jax.process_index())
    mesh = mtt.case_mesh(2, jax.device_count() // 2)
    kinds: dict[str, Any] = {
        "flags": None,
        "continuous": policies.ContinuousCheckpointingPolicy(minimum_interval_secs=None),
        # Orbax's continuous policy inside another one, where nobody can see it.
        "wrapped": Wrapped(policies.ContinuousCheckpointingPolicy(minimum_interval_secs=None)),
        "own-host": Chosen(lambda step, saving: not saving and rng.random() < 0.5),
        "seconds": Wrapped(EveryNSeconds(0.2)),
    }
    saved: list[int] = []
    config = flags(folder, max_num_checkpoints_to_keep=2, **changes)
    with mtc.create_checkpoint_manager(config, mesh, policy=kinds[kind]) as manager:
        for step in range(2000):
            time.sleep(rng.random() * 0.02)
            if manager.save(step, args=ocp.args.StandardSave(mtt.case_state(mesh, step))):
                saved.append(step)
            if len(saved) == saves:
                break
    with mtc.create_checkpoint_manager(config, mesh) as manager:
        found = list(manager.all_steps())
        target = mtt.abstract_state(mtt.case_state(mesh, 0))
        state = manager.restore(found[-1], args=ocp.args.StandardRestore(target))
        mtt.assert_state(state, found[-1])
    # Orbax counts its operations, and the processes meet under that number.
    return {"saved": saved, "found": found, "steps": step + 1, "operation": operation_id()}


@dataclasses.dataclass
class Wrapped:
    policy: Any

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return bool(self.policy.should_save(step, previous_steps, context=context))


@dataclasses.dataclass
class EveryNSeconds:
    seconds: float

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        saved = list(previous_steps)
        return not saved or (step.time - saved[-1].time).total_seconds() >= self.seconds


def continuous_loop(folder: str, saves: int) -> dict[str, Any]:
    return loop(folder, saves, enable_continuous_checkpointing=True)


def test_four_hosts_of_different_pace_save_the_same_steps(volume_root: Path) -> None:
    results = mtt.run_processes(continuous_loop, 4, args=[str(volume_root), 5])
    assert all(result == results[0] for result in results)
    saved, found = results[0]["saved"], results[0]["found"]
    assert saved[0] == 0
    assert len(saved) == 5 < results[0]["steps"]  # a save takes several steps of this loop
    assert found == saved[-2:]
    assert sorted(int(entry.name) for entry in volume_root.iterdir()) == found


def all_kinds(folder: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
    return [loop(f"{folder}/{kind}", 3, kind) for kind in kinds]


def test_policies_of_users_give_the_same_answers_on_two_hosts(volume_root: Path) -> None:
    kinds = ["continuous", "wrapped", "own-host", "seconds"]
    first, second = mtt.run_processes(all_kinds, 2, args=[str(volume_root), kinds])
    assert first == second
    for kind, result in zip(kinds, first, strict=True):
        assert result["saved"][0] == 0, kind
        assert len(result["saved"]) == 3, kind
        assert result["found"] == result["saved"][-2:], kind


def preempted_loop(folder: str, enabled: bool) -> list[int]:
    mesh = mtt.case_mesh(2, 2)
    config = flags(folder, enable_autocheckpoint=enabled)
    saved = []
    with mtc.create_checkpoint_manager(config, mesh) as manager:
        for step in range(1, 200):
            if step == 5 and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.save(step, args=ocp.args.StandardSave(mtt.case_state(mesh, step))):
                saved.append(step)
            if manager.reached_preemption(step):
                return [*saved, step]
            time.sleep(0.02)
    raise AssertionError("no preemption was noticed")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_preemption_saves_one_step_on_all_where_it_is_asked_for(
    volume_root: Path, enabled: bool
) -> None:
    first, second = mtt.run_processes(preempted_loop, 2, args=[str(volume_root), enabled])
    *saved, stopped = first
    assert first == second
    assert saved == ([stopped] if enabled else [])
    assert [entry.name for entry in volume_root.iterdir()] == [str(step) for step in saved]


def open_where_it_can(folder: str) -> str:
    # A path that is right on one host and leads through a file on the other.
    place = f"{folder}/{'file' if jax.process_index() else 'folder'}/a"
    try:
        mtc.create_checkpoint_manager(flags(place), mtt.case_mesh(2, 2))
    except TierUnreadableError as error:
        return str(error).split(" cannot be ")[1]
    return "opened"


def test_a_directory_that_one_host_cannot_write_is_refused_on_all(volume_root: Path) -> None:
    (volume_root / "file").write_text("")
    first, second = mtt.run_processes(open_where_it_can, 2, args=[str(volume_root)])
    assert first == second
    assert first.startswith("written by process 1 (")
    assert "NotADirectoryError" in first or "FileExistsError" in first
