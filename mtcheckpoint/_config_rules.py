"""What contradicts what in a configuration: one table, looked through by `CheckpointConfig`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from mtcheckpoint._handshake.files import job_name_fault
from mtcheckpoint.errors import ConfigError

if TYPE_CHECKING:
    from mtcheckpoint.config import CheckpointConfig

__all__ = ["RULES", "Rule", "first_fault"]

_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+", re.IGNORECASE)

_MINUTES = "multi_tier_checkpointing_backup_interval_minutes"
_STEPS = "multi_tier_checkpointing_backup_interval_steps"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One way in which a configuration cannot work.

    Attributes:
        fields: the fields at fault.
        broken: True when the configuration breaks the rule.
        why: what is expected and what to do.
        multi_tier: only looked at with multi-tier checkpointing on.
    """

    fields: tuple[str, ...]
    broken: Callable[[CheckpointConfig], bool]
    why: str
    multi_tier: bool = False

    def applies(self, config: CheckpointConfig) -> bool:
        return config.enable_multi_tier_checkpointing or not self.multi_tier


def first_fault(config: CheckpointConfig) -> ConfigError | None:
    """The first rule that `config` breaks; None when it keeps them all.

    A configuration with checkpointing switched off is not looked at: the master switch must work
    whatever else is set.
    """
    if not config.enable_checkpointing:
        return None
    for rule in RULES:
        if rule.applies(config) and rule.broken(config):
            found = ", ".join(f"{name}={getattr(config, name)!r}" for name in rule.fields)
            why = rule.why.format(run_name_fault=job_name_fault(config.run_name))
            return ConfigError(f"{found}: {why}", fields=rule.fields)
    return None


def _at_least(name: str, least: int) -> Rule:
    def below(config: CheckpointConfig) -> bool:
        value = getattr(config, name)
        return value is not None and value < least

    return Rule(fields=(name,), broken=below, why=f"must be {least} or more")


def _above_zero(name: str) -> Rule:
    def not_above(config: CheckpointConfig) -> bool:
        value = getattr(config, name)
        # Written so that NaN is refused too.
        return value is not None and not 0 < value < float("inf")

    return Rule(fields=(name,), broken=not_above, why="must be a number of seconds above 0")


def _neither_url_nor_absolute(config: CheckpointConfig) -> bool:
    root = config.backup_root
    return root is not None and not _URL.fullmatch(root) and not root.startswith("/")


def _backup_in_ram_disk(config: CheckpointConfig) -> bool:
    root = (config.backup_root or "").removeprefix("file://")
    return root.startswith("/") and PurePosixPath(root).is_relative_to(
        config.local_checkpoint_directory
    )


def _steps_below_period(config: CheckpointConfig) -> bool:
    steps = config.multi_tier_checkpointing_backup_interval_steps
    return steps is not None and steps < config.local_checkpoint_period


def _never_saves(config: CheckpointConfig) -> bool:
    return not (
        config.local_checkpoint_period > 0
        or config.enable_continuous_checkpointing
        or config.local_checkpoint_steps
    )


def _replica_across_slices(config: CheckpointConfig) -> bool:
    slices, replicas = config.num_slices, config.mtc_data_parallelism
    return bool(slices and replicas and slices % replicas and replicas % slices)


RULES: tuple[Rule, ...] = (
    # Single values.
    _at_least("checkpoint_period", 0),
    _at_least("max_num_checkpoints_to_keep", 1),
    _at_least("checkpoint_storage_concurrent_gb", 1),
    _at_least("checkpoint_storage_target_data_file_size_bytes", 1),
    _at_least("jax_distributed_initialization_timeout", 1),
    _at_least("peers_per_node", 1),
    _at_least("save_error_budget", 0),
    _above_zero("timeout_secs"),
    _above_zero("minimum_interval_secs"),
    Rule(
        fields=("backup_root",),
        broken=_neither_url_nor_absolute,
        why="expected a URL such as gs://bucket, or an absolute path",
    ),
    Rule(
        fields=("local_checkpoint_directory",),
        broken=lambda c: c.local_checkpoint_directory[:1] not in ("", "/"),
        why="expected an absolute path: every process of the node must mean the same directory",
    ),
    # Pairs that contradict each other, in any mode.
    Rule(
        fields=("checkpoint_period", "enable_continuous_checkpointing"),
        broken=lambda c: (
            not c.enable_multi_tier_checkpointing
            and c.checkpoint_period == 0
            and not c.enable_continuous_checkpointing
        ),
        why="a period of 0 never saves: set a period, or enable_continuous_checkpointing",
    ),
    Rule(
        fields=("minimum_interval_secs", "enable_continuous_checkpointing"),
        broken=lambda c: (
            c.minimum_interval_secs is not None and not c.enable_continuous_checkpointing
        ),
        why="a least interval is for continuous saves: enable them, or leave it out",
    ),
    Rule(
        fields=("on_save_error", "save_error_budget"),
        broken=lambda c: c.on_save_error == "warn" and c.save_error_budget < 1,
        why="'warn' with no budget never warns: give a budget of 1 or more, or use 'raise'",
    ),
    # Multi-tier checkpointing.
    Rule(
        multi_tier=True,
        fields=("enable_multi_tier_checkpointing", "local_checkpoint_directory"),
        broken=lambda c: not c.local_checkpoint_directory,
        why="multi-tier checkpointing needs the RAM disk's directory",
    ),
    Rule(
        multi_tier=True,
        fields=("enable_multi_tier_checkpointing", "run_name"),
        broken=lambda c: job_name_fault(c.run_name) is not None,
        why="run_name is the replicator's job name and {run_name_fault}",
    ),
    Rule(
        multi_tier=True,
        fields=("local_checkpoint_period", "enable_continuous_checkpointing"),
        broken=_never_saves,
        why=(
            "enable_multi_tier_checkpointing would save nothing: set a period of 1 or more,"
            " continuous checkpointing, or local_checkpoint_steps"
        ),
    ),
    Rule(
        multi_tier=True,
        fields=(_MINUTES, _STEPS),
        broken=lambda c: c.enable_replicator and getattr(c, _MINUTES) is getattr(c, _STEPS) is None,
        why="the replicator needs one backup interval, in minutes (30 or more is advised) or steps",
    ),
    Rule(
        multi_tier=True,
        fields=(_MINUTES, _STEPS),
        broken=lambda c: getattr(c, _MINUTES) is not None and getattr(c, _STEPS) is not None,
        why="only one of the two backup intervals can hold",
    ),
    Rule(
        multi_tier=True,
        fields=(_STEPS, "local_checkpoint_period"),
        broken=_steps_below_period,
        why="backups cannot be closer together than the saves that they are made of",
    ),
    Rule(
        multi_tier=True,
        fields=("enable_replicator", "max_num_checkpoints_to_keep"),
        broken=lambda c: not c.enable_replicator and c.max_num_checkpoints_to_keep is None,
        why="without a replicator nobody else clears the RAM disk: say how many steps to keep",
    ),
    Rule(
        multi_tier=True,
        fields=("backup_root", "local_checkpoint_directory"),
        broken=_backup_in_ram_disk,
        why="the replicator clears the RAM disk at every start, backups in it would be lost",
    ),
    Rule(
        multi_tier=True,
        fields=("replication", "mtc_data_parallelism"),
        broken=lambda c: c.replication == "copies" and c.mtc_data_parallelism > 1,
        why="with replicas of the state no data are copied: leave one of the two out",
    ),
    Rule(
        multi_tier=True,
        fields=("replication", "mtc_data_parallelism"),
        broken=lambda c: c.replication == "replicas" and c.mtc_data_parallelism == 1,
        why="a single replica has no other to restore from: use 'copies'",
    ),
    Rule(
        multi_tier=True,
        fields=("replication", "num_slices"),
        broken=lambda c: (
            c.replication == "replicas" and c.num_slices == 1 and c.mtc_data_parallelism == 0
        ),
        why="one slice is one replica unless mtc_data_parallelism says otherwise: use 'copies'",
    ),
    Rule(
        multi_tier=True,
        fields=("replication", "peers_per_node"),
        broken=lambda c: c.replication == "replicas" and c.peers_per_node is not None,
        why="peers of a replica are its twins in all others: peers_per_node is for 'copies'",
    ),
    Rule(
        multi_tier=True,
        fields=("mtc_data_parallelism", "num_slices"),
        broken=_replica_across_slices,
        why="a replica is part of one slice, or several whole slices: one must divide the other",
    ),
)
