"""What a job wants of its checkpoints: MaxText's flags and a few of ours, checked in one place."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from mtcheckpoint._config_rules import first_fault
from mtcheckpoint.errors import ConfigError

__all__ = ["CheckpointConfig"]

# Fields in which MaxText and Orbax take 0 and less for "not set", and what that becomes here.
_UNSET_AT_ZERO_OR_BELOW: Mapping[str, int | None] = {
    "local_checkpoint_period": 0,
    "mtc_data_parallelism": 0,
    "multi_tier_checkpointing_backup_interval_minutes": None,
    "multi_tier_checkpointing_backup_interval_steps": None,
    "num_slices": None,
}
_TRUE_WORDS = frozenset({"true", "t", "1", "yes", "y", "on"})
_FALSE_WORDS = frozenset({"false", "f", "0", "no", "n", "off"})
_NONE_WORDS = frozenset({"", "none", "null"})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CheckpointConfig:
    """What a job wants of its checkpoints.

    Names and defaults of the first block are MaxText's. `docs/configuration.md` has a table of all
    fields. Every contradiction is refused here, naming the fields at fault.

    Attributes:
        enable_checkpointing: master switch; when False, nothing else is looked at.
        async_checkpointing: write in the background.
        checkpoint_period: steps between saves to `checkpoint_dir`; ignored with continuous saves.
        max_num_checkpoints_to_keep: how many of the newest are kept; None keeps all.
        enable_continuous_checkpointing: the next save starts when the previous one is done.
        save_checkpoint_on_start: save step 0.
        save_checkpoint_on_completion: save the last step and wait for it.
        enable_multi_tier_checkpointing: save to the RAM disk, with a replicator.
        local_checkpoint_directory: the RAM disk, an absolute path.
        local_checkpoint_period: steps between saves to the RAM disk; 0 only with continuous saves
            or `local_checkpoint_steps`.
        multi_tier_checkpointing_backup_interval_minutes: minutes between backups; None, 0 and less
            mean not set.
        multi_tier_checkpointing_backup_interval_steps: steps between backups; None, 0 and less
            mean not set.
        mtc_data_parallelism: identical replicas of the state; 0 means the number of slices.
        enable_autocheckpoint: save at preemption.
        checkpoint_storage_concurrent_gb: limit on what a restore reads at once, in GB; in
            persistent mode Orbax's limit on concurrent I/O.
        checkpoint_storage_target_data_file_size_bytes: data files are split at this size.
        enable_single_replica_ckpt_restoring: one replica reads and broadcasts to the others.
        run_name: name of the run; with multi-tier checkpointing also the replicator's job name.
        base_output_directory: where `checkpoint_dir` is derived from.
        checkpoint_dir: persistent checkpoints; empty:
            ``<base_output_directory>/<run_name>/checkpoints`` when both are given.
        jax_distributed_initialization_timeout: limit for starting jax.distributed, in seconds.
        backup_root: URL (or absolute path) that holds ``<run_name>/<date>/`` as the replicator
            writes it; None: no backups are read.
        minimum_interval_secs: least seconds between two continuous saves; None: no limit.
        local_checkpoint_steps: further steps at which to save to the RAM disk.
        replication: "replicas" trusts data-parallel replicas to hold the same data, "copies" sends
            each share to another node, "auto" takes replicas where there are several.
        peers_per_node: copies of each share on other nodes; None: 1. Only where data is copied.
        num_slices: slices of the job; None, 0 and less: as the devices say.
        enable_replicator: False: no handshake; the manager itself keeps the newest
            `max_num_checkpoints_to_keep` steps in the RAM disk, and nothing is backed up.
        verify: how a restored share is compared with its seal.
        timeout_secs: limit of every single wait, in seconds.
        on_save_error: "raise" a failed save at the next call, or "warn" and go on.
        save_error_budget: consecutive failed saves that "warn" forgives.
    """

    enable_checkpointing: bool = True
    async_checkpointing: bool = True
    checkpoint_period: int = 10_000
    max_num_checkpoints_to_keep: int | None = None
    enable_continuous_checkpointing: bool = False
    save_checkpoint_on_start: bool = True
    save_checkpoint_on_completion: bool = True
    enable_multi_tier_checkpointing: bool = False
    local_checkpoint_directory: str = ""
    local_checkpoint_period: int = 0
    multi_tier_checkpointing_backup_interval_minutes: int | None = None
    multi_tier_checkpointing_backup_interval_steps: int | None = None
    mtc_data_parallelism: int = 0
    enable_autocheckpoint: bool = False
    checkpoint_storage_concurrent_gb: int = 96
    checkpoint_storage_target_data_file_size_bytes: int = 2 * 1024**3
    enable_single_replica_ckpt_restoring: bool = False
    run_name: str = ""
    base_output_directory: str = ""
    checkpoint_dir: str = ""
    jax_distributed_initialization_timeout: int = 300

    backup_root: str | None = None
    minimum_interval_secs: float | None = None
    local_checkpoint_steps: tuple[int, ...] = ()
    replication: Literal["auto", "replicas", "copies"] = "auto"
    peers_per_node: int | None = None
    num_slices: int | None = None
    enable_replicator: bool = True
    verify: Literal["full", "size", "off"] = "full"
    timeout_secs: float = 300.0
    on_save_error: Literal["raise", "warn"] = "raise"
    save_error_budget: int = 3

    def __post_init__(self) -> None:
        for name, hint in _field_types().items():
            value = _normalised(name, getattr(self, name))
            # Frozen for everyone else: what was written as "not set" gets its one spelling here.
            object.__setattr__(self, name, _checked(name, value, hint))
        if not self.checkpoint_dir and self.base_output_directory and self.run_name:
            derived = f"{self.base_output_directory.rstrip('/')}/{self.run_name}/checkpoints"
            object.__setattr__(self, "checkpoint_dir", derived)
        fault = first_fault(self)
        if fault is not None:
            raise fault

    def __repr__(self) -> str:
        return f"CheckpointConfig({self.describe()})"

    def describe(self) -> str:
        """The fields that differ from their defaults, as ``name=value, ...``."""
        pairs = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return ", ".join(f"{name}={value!r}" for name, value, default in pairs if value != default)

    @classmethod
    def from_flags(cls, flags: Any) -> CheckpointConfig:
        """A configuration from anything that has MaxText's flag names.

        Args:
            flags: a mapping, an `argparse.Namespace`, or any object with attributes (absl flags, a
                pydantic model, a whole MaxText config). Names that are not fields are ignored,
                fields that it does not have keep their defaults. Text is read as the field's type
                ("true", "12", "" for not set), as command lines deliver it.

        Raises:
            ConfigError: a value of the wrong type, or fields that contradict each other.
        """
        values = {
            name: _parsed(name, value, hint)
            for name, hint in _field_types().items()
            if (value := _flag(flags, name)) is not _MISSING
        }
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> CheckpointConfig:
        """A configuration from a YAML file: a mapping with the names of the fields.

        Other names are ignored, so a whole MaxText config can be given; ``None`` is read as not
        set, as MaxText does. Text is not turned into numbers here.

        Raises:
            ConfigError: the file is missing, empty, not YAML or not a mapping, or its values cannot
                work; the message has the path and the line.
        """
        node = _compose(path)
        lines = {key.value: key.start_mark.line + 1 for key, _ in node.value}
        values = yaml.SafeLoader.construct_document(yaml.SafeLoader(""), node)
        known: dict[str, Any] = {
            name: None if values[name] == "None" else values[name]
            for name in _field_types()
            if name in values
        }
        try:
            return cls(**known)
        except ConfigError as error:
            line = next((lines[name] for name in reversed(error.fields) if name in lines), 1)
            raise ConfigError(f"{path}:{line}: {error}", fields=error.fields) from None


_MISSING = object()


@functools.cache
def _field_types() -> dict[str, Any]:
    return get_type_hints(CheckpointConfig)


def _flag(flags: Any, name: str) -> Any:
    """The value of one flag; `_MISSING` when `flags` does not know the name.

    MaxText's config raises ValueError for unknown names, and offers its mapping as `get_keys()`.
    """
    get_keys = getattr(type(flags), "get_keys", None)
    if callable(get_keys) and isinstance(keys := get_keys(flags), Mapping):
        flags = keys
    try:
        return flags[name] if isinstance(flags, Mapping) else getattr(flags, name)
    except (AttributeError, KeyError):
        return _MISSING


def _normalised(name: str, value: Any) -> Any:
    """The one spelling of "not set", for the fields where MaxText has several."""
    if name in _UNSET_AT_ZERO_OR_BELOW:
        unset = _UNSET_AT_ZERO_OR_BELOW[name]
        return unset if value in (None, "") or (_is_int(value) and value <= 0) else value
    if value == "" and type(None) in _alternatives(_field_types()[name]):
        return None
    if value is None and _field_types()[name] is str:
        return ""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _is_int(value: Any) -> bool:
    """True for integers of Python and numpy, not for booleans."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type, or a ConfigError."""
    for kind in _alternatives(hint):
        if kind is type(None) and value is None:
            return None
        if get_origin(kind) is Literal and isinstance(value, str) and value in get_args(kind):
            return value
        if kind in (bool, str) and isinstance(value, kind):
            return value
        if kind is int and _is_int(value):
            return int(value)
        if kind is float and (_is_int(value) or isinstance(value, float)):
            return float(value)
        if get_origin(kind) is tuple and isinstance(value, list | tuple | range | set | frozenset):
            return _steps(name, value)
    raise ConfigError(
        f"{name}: expected {_spelled(hint)}, found {value!r} ({type(value).__name__})",
        fields=[name],
    )


def _steps(name: str, values: Any) -> tuple[int, ...]:
    for value in values:
        if not _is_int(value) or value < 0:
            raise ConfigError(
                f"{name}: expected steps of 0 or more, found {value!r}", fields=[name]
            )
    return tuple(sorted({int(value) for value in values}))


def _spelled(hint: Any) -> str:
    return " or ".join(_spelled_kind(kind) for kind in _alternatives(hint))


def _spelled_kind(kind: Any) -> str:
    if kind is type(None):
        return "None"
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of int"
    return str(kind.__name__)


def _parsed(name: str, value: Any, hint: Any) -> Any:
    """What a command line means by `value`; anything but text is returned as it is."""
    if not isinstance(value, str):
        return value
    kinds = _alternatives(hint)
    text = value.strip()
    if type(None) in kinds and text.lower() in _NONE_WORDS:
        return None
    for kind in kinds:
        parsed = _parsed_as(kind, text)
        if parsed is not _MISSING:
            return parsed
    # Left as it is: a string field, or a fault that the check reports.
    return value


def _parsed_as(kind: Any, text: str) -> Any:
    if kind is bool:
        return {**dict.fromkeys(_TRUE_WORDS, True), **dict.fromkeys(_FALSE_WORDS, False)}.get(
            text.lower(), _MISSING
        )
    try:
        if kind in (int, float):
            return kind(text)
        if get_origin(kind) is tuple:
            return tuple(int(part) for part in text.strip("[]()").split(",") if part.strip())
    except ValueError:
        pass
    return _MISSING


def _compose(path: str | os.PathLike[str]) -> yaml.MappingNode:
    """The YAML file as a tree that knows its lines."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}:1: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{path}:{line}: not valid YAML: {problem}") from error
    if not isinstance(node, yaml.MappingNode):
        found = "an empty file" if node is None else type(node).__name__
        raise ConfigError(f"{path}:1: expected a mapping of flag names to values, found {found}")
    return node
