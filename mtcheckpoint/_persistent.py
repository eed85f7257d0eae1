"""Checkpoints without the RAM disk: Orbax's plain manager, with save decisions that are agreed on.

Orbax asks a save policy on every process, and a policy looks at its own process' clock and at
whether that process is saving. So the policies are wrapped in one that asks them on process 0 only.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

from mtcheckpoint import _orbax
from mtcheckpoint._coordination import Coordinator, job_coordinator
from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.errors import ConfigError, TierUnreadableError
from mtcheckpoint.manager import ReplicatedCheckpointManager

__all__ = ["AgreedPolicy", "create_checkpoint_manager"]

# Answers of process 0 are deleted a folder at a time, when all processes are past it.
_ANSWERS_IN_FOLDER = 64


def create_checkpoint_manager(
    config: CheckpointConfig,
    mesh: jax.sharding.Mesh,
    *,
    policy: Any = None,
    preservation_policy: Any = None,
) -> Any:
    """The manager that the flags ask for. Call on every process.

    Args:
        config: the flags.
        mesh: the mesh of the job.
        policy: when to save, instead of what the flags say: any of Orbax's `SaveDecisionPolicy`
            objects. It is asked on process 0 only, unless it looks at nothing but the step.
            ``save_checkpoint_on_start`` and ``enable_autocheckpoint`` hold beside it.
        preservation_policy: which checkpoints in ``checkpoint_dir`` are kept, instead of the newest
            ``max_num_checkpoints_to_keep``: any of Orbax's `PreservationPolicy` objects.

    Returns:
        With ``enable_multi_tier_checkpointing`` a `ReplicatedCheckpointManager`, else an
        `orbax.checkpoint.CheckpointManager` on ``checkpoint_dir``, which is made if it is missing.
        None without ``enable_checkpointing``.

    Raises:
        ConfigError: no usable ``checkpoint_dir``, or a policy that is none.
        TierUnreadableError: ``checkpoint_dir`` cannot be written on a process; the same error on
            all.
        TopologyError: with multi-tier checkpointing: nodes, slices and replicas do not fit.
    """
    if not config.enable_checkpointing:
        return None
    _check_policies(config, policy, preservation_policy)
    if config.enable_multi_tier_checkpointing:
        return ReplicatedCheckpointManager(config, mesh=mesh, policy=policy)
    _check_directory(config)
    coordinator = job_coordinator("persistent", timeout_secs=config.timeout_secs)
    _try_to_write(config.checkpoint_dir, coordinator)
    return _orbax.open_persistent_manager(
        config.checkpoint_dir,
        save_policy=_agreed(config, policy, coordinator),
        preservation_policy=preservation_policy,
        max_to_keep=config.max_num_checkpoints_to_keep,
        asynchronous=config.async_checkpointing,
        concurrent_gb=config.checkpoint_storage_concurrent_gb,
    )


class AgreedPolicy:
    """One of Orbax's `SaveDecisionPolicy` objects, with the same answer on all processes.

    Call it on all processes, for the same steps. Asked again for the same step, it gives the same
    answer.

    Args:
        coordinator: agreement with the other processes.
        alike: policies that answer alike on all processes by themselves. Nothing is said to other
            processes about them.
        asked: policies to ask on process 0 only. They are told that a save is in progress when it
            is so on any process.
    """

    def __init__(
        self, coordinator: Coordinator, *, alike: Sequence[Any], asked: Sequence[Any]
    ) -> None:
        self._coordinator = coordinator
        self._alike = tuple(alike)
        self._asked = tuple(asked)
        self._answered: tuple[int, bool] | None = None
        self._questions = 0
        self._report: dict[str, Any] | None = None
        self._first_folder = 0

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Whether to save; the arguments are Orbax's."""
        if _any(self._alike, step, previous_steps, context):
            return True
        if not self._asked:
            return False
        if self._answered is None or self._answered[0] != step.step:
            self._answered = (step.step, self._ask(step, previous_steps, context))
        return self._answered[1]

    def _ask(self, step: Any, previous_steps: Sequence[Any], context: Any) -> bool:
        folder, question = divmod(self._questions, _ANSWERS_IN_FOLDER)
        self._questions += 1
        self._tell(folder, saving=context.is_saving_in_progress)
        answer = self._coordinator.lead(
            f"decision/{folder}/{question}",
            lambda: self._judge(step, previous_steps, context),
        )
        _orbax.catch_up_operation_id(answer["operation_id"])
        return bool(answer["save"])

    def _tell(self, folder: int, *, saving: bool) -> None:
        report = {"saving": saving, "folder": folder}
        if report != self._report:
            self._coordinator.announce("report", report)
            self._report = report

    def _judge(self, step: Any, previous_steps: Sequence[Any], context: Any) -> dict[str, Any]:
        """Process 0: asks the policies."""
        reports = list(self._coordinator.announced("report").values())
        if len(reports) == self._coordinator.processes:
            self._forget_before(min(report["folder"] for report in reports))
        saving = any(report["saving"] for report in reports)
        everywhere = dataclasses.replace(context, is_saving_in_progress=saving)
        save = _any(self._asked, step, previous_steps, everywhere)
        return {"save": save, "operation_id": _orbax.operation_id()}

    def _forget_before(self, folder: int) -> None:
        for passed in range(self._first_folder, folder):
            self._coordinator.forget(f"decision/{passed}")
        self._first_folder = max(self._first_folder, folder)


def _any(policies: Sequence[Any], step: Any, previous_steps: Sequence[Any], context: Any) -> bool:
    return any(p.should_save(step, previous_steps, context=context) for p in policies)


# What the flags ask for.


@dataclasses.dataclass(frozen=True, slots=True)
class _OnStart:
    """Step 0."""

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        return bool(step.step == 0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Every:
    """The steps that `period` divides, from `period` on: step 0 is the matter of `_OnStart`."""

    period: int

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        return bool(step.step > 0 and step.step % self.period == 0)


@dataclasses.dataclass(frozen=True, slots=True)
class _OnPreemption:
    """The step at which all processes stop for a preemption; Orbax agrees on it."""

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        return bool(context.reached_preemption)


@dataclasses.dataclass(frozen=True, slots=True)
class _WhenFree:
    """Every step while no save is in progress, at least `seconds` after the last one's start."""

    seconds: float

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        if context.is_saving_in_progress:
            return False
        saved = list(previous_steps)
        return not saved or step.time - saved[-1].time >= datetime.timedelta(seconds=self.seconds)


def _agreed(config: CheckpointConfig, policy: Any, coordinator: Coordinator) -> AgreedPolicy:
    alike: list[Any] = []
    asked: list[Any] = []
    if policy is not None:
        alike, asked = _orbax.split_policy(policy)
    elif config.enable_continuous_checkpointing:
        asked.append(_WhenFree(config.minimum_interval_secs or 0.0))
    else:
        alike.append(_Every(config.checkpoint_period))
    if config.save_checkpoint_on_start:
        alike.append(_OnStart())
    if config.enable_autocheckpoint:
        alike.append(_OnPreemption())
    return AgreedPolicy(coordinator, alike=alike, asked=asked)


# Guards.


def _check_policies(config: CheckpointConfig, policy: Any, preservation_policy: Any) -> None:
    if policy is not None and not _orbax.is_save_decision_policy(policy):
        raise ConfigError(
            "policy should be one of Orbax's SaveDecisionPolicy objects, found"
            f" {type(policy).__name__}",
            fields=["policy"],
        )
    if preservation_policy is None:
        return
    if not _orbax.is_preservation_policy(preservation_policy):
        raise ConfigError(
            "preservation_policy should be one of Orbax's PreservationPolicy objects, found"
            f" {type(preservation_policy).__name__}",
            fields=["preservation_policy"],
        )
    if config.enable_multi_tier_checkpointing:
        raise ConfigError(
            "preservation_policy and enable_multi_tier_checkpointing: what is kept in the RAM disk"
            " is the replicator's choice; leave the policy out",
            fields=["preservation_policy", "enable_multi_tier_checkpointing"],
        )


def _check_directory(config: CheckpointConfig) -> None:
    directory = config.checkpoint_dir
    if not directory:
        raise ConfigError(
            "checkpoint_dir is empty: give it, or base_output_directory and run_name, or set"
            " enable_checkpointing=False",
            fields=["checkpoint_dir", "base_output_directory"],
        )
    if not re.match(r"/|[a-z][a-z0-9+.-]*://", directory, re.IGNORECASE):
        raise ConfigError(
            f"checkpoint_dir={directory!r}: expected an absolute path or a URL such as"
            " gs://bucket/run: every process must mean the same place",
            fields=["checkpoint_dir"],
        )


def _try_to_write(directory: str, coordinator: Coordinator) -> None:
    """Makes `directory`, and a file in it that is removed again, on every process."""
    faults = coordinator.gather("checkpoint_dir", _write_fault(directory, coordinator.process))
    failed = [process for process, fault in enumerate(faults) if fault is not None]
    if failed:
        names = coordinator.names(failed)
        listed = "; ".join(f"{n}: {faults[p]}" for n, p in zip(names, failed, strict=True))
        raise TierUnreadableError(
            f"checkpoint_dir {directory} cannot be written by {listed}. Nothing could be saved"
            " there: check that the place exists and that the job may write to it",
            place=directory,
        )


def _write_fault(directory: str, process: int) -> str | None:
    """Why this process cannot write to `directory`."""
    trial = epath.Path(directory) / f".mtcheckpoint-write-check-{process}"
    try:
        trial.parent.mkdir(parents=True, exist_ok=True)
        trial.write_text("")
        trial.unlink()
    except Exception as error:  # each kind of storage has errors of its own
        return f"{type(error).__name__}: {error}"
    return None
