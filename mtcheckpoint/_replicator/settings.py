"""What a ``replicator.yaml`` asks for, read strictly. Pure."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from mtcheckpoint._handshake.files import job_name_fault
from mtcheckpoint.errors import ReplicatorConfigError

__all__ = ["RunSettings", "parse_settings"]

FRAMEWORKS = ("orbax", "pytorch.distributed")

_REQUIRED = ("job-name", "framework", "node-rank", "nodes")
_PEER_KEYS = ("peer-ranks", "peers-per-node")
_INTERVAL_KEYS = ("backup-interval-minutes", "backup-interval-steps")
# Addresses of a coordinator: there is none among nodes of one process.
_IGNORED = ("master-port", "master")
_OPTIONAL = ("assume-data-parallelism", "workers-per-node")
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)
_KNOWN = frozenset(_REQUIRED + _PEER_KEYS + _INTERVAL_KEYS + _OPTIONAL + _IGNORED)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """One node's part in a run.

    Attributes:
        job_name: prefix of the run's files, and its folder in the backup.
        framework: ``orbax`` or ``pytorch.distributed``; decides how a share is hashed.
        node_rank: this node, 0..nodes-1.
        nodes: how many nodes the run has.
        peer_ranks: the ranks that get a copy; None when `peers_per_node` decides.
        peers_per_node: how many peers the replicator chooses; None when `peer_ranks` decides.
        replicas: number of identical replicas of the state; None without data parallelism. Its
            presence, even as 1, means that only ``.meta`` is replicated.
        backup_interval_minutes: minutes between two backups; None when steps decide.
        backup_interval_steps: steps between two backups; None when minutes decide.
    """

    job_name: str
    framework: str
    node_rank: int
    nodes: int
    peer_ranks: tuple[int, ...] | None
    peers_per_node: int | None
    replicas: int | None
    backup_interval_minutes: int | None
    backup_interval_steps: int | None


def parse_settings(text: str, environment: Mapping[str, str] | None = None) -> RunSettings:
    """Reads the text of a ``replicator.yaml``.

    Strings are treated as the public replicator does: ``$NAME`` is expanded from `environment`
    (None: this process's), and what then looks like an integer becomes one.

    Raises:
        ReplicatorConfigError: a key is unknown, missing, of the wrong type, out of range, or
            contradicts another. The message names it.
    """
    try:
        values = _expand(_load(text), os.environ if environment is None else environment)
    except RecursionError as error:
        raise ReplicatorConfigError("replicator.yaml is nested too deeply") from error
    _check_keys(values)
    nodes = _integer(values, "nodes", low=1)
    rank = _integer(values, "node-rank", low=0, high=nodes - 1)
    if _integer(values, "workers-per-node", low=1, default=1) != 1:
        raise _refusal("workers-per-node", "only 1 is supported", values["workers-per-node"])
    return RunSettings(
        job_name=_job_name(values),
        framework=_framework(values),
        node_rank=rank,
        nodes=nodes,
        peer_ranks=_peer_ranks(values, rank, nodes),
        peers_per_node=_optional_integer(values, "peers-per-node", low=0, high=max(1, nodes - 1)),
        replicas=_replicas(values, nodes),
        backup_interval_minutes=_optional_integer(values, "backup-interval-minutes", low=1),
        backup_interval_steps=_optional_integer(values, "backup-interval-steps", low=1),
    )


def _load(text: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ReplicatorConfigError(f"replicator.yaml is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ReplicatorConfigError(
            f"replicator.yaml must be a mapping of keys, found {type(values).__name__}"
        )
    return values


def _expand(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, environment) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, environment) for item in value]
    if not isinstance(value, str):
        return value
    expanded = _expand_names(value, environment)
    try:
        return int(expanded)
    except ValueError:
        return expanded


def _expand_names(text: str, environment: Mapping[str, str]) -> str:
    """``$NAME`` and ``${NAME}``; names that are not set stay as they are."""
    return _VARIABLE.sub(lambda match: environment.get(match[1].strip("{}"), match[0]), text)


def _check_keys(values: Mapping[str, Any]) -> None:
    unknown = sorted(str(key) for key in values if key not in _KNOWN)
    if unknown:
        raise ReplicatorConfigError(
            f"replicator.yaml: unknown key {', '.join(unknown)};"
            f" known are {', '.join(sorted(_KNOWN))}",
            key=unknown[0],
        )
    for key in _REQUIRED:
        if key not in values:
            raise ReplicatorConfigError(f"replicator.yaml: {key} is missing", key=key)
    for pair in (_PEER_KEYS, _INTERVAL_KEYS):
        present = [key for key in pair if key in values]
        if len(present) != 1:
            found = "both" if present else "neither"
            raise ReplicatorConfigError(
                f"replicator.yaml: exactly one of {' and '.join(pair)} is wanted, found {found}",
                key=pair[0],
            )


def _refusal(key: str, expected: str, found: object) -> ReplicatorConfigError:
    return ReplicatorConfigError(f"replicator.yaml: {key}: {expected}, found {found!r}", key=key)


def _integer(
    values: Mapping[str, Any],
    key: str,
    *,
    low: int,
    high: int | None = None,
    default: int | None = None,
) -> int:
    value = values.get(key, default)
    limits = f"{low} or more" if high is None else f"{low} to {high}"
    # YAML's `true` is an int to Python.
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refusal(key, f"must be an integer, {limits}", value)
    if value < low or (high is not None and value > high):
        raise _refusal(key, f"must be {limits}", value)
    return value


def _optional_integer(
    values: Mapping[str, Any], key: str, *, low: int, high: int | None = None
) -> int | None:
    return _integer(values, key, low=low, high=high) if key in values else None


def _job_name(values: Mapping[str, Any]) -> str:
    name = values["job-name"]
    if fault := job_name_fault(name):
        raise _refusal("job-name", fault, name)
    return str(name)


def _framework(values: Mapping[str, Any]) -> str:
    framework = values["framework"]
    if framework == "pytorch":
        raise _refusal("framework", "one file per worker is not supported", framework)
    if framework not in FRAMEWORKS:
        raise _refusal("framework", f"must be one of {', '.join(FRAMEWORKS)}", framework)
    return str(framework)


def _peer_ranks(values: Mapping[str, Any], rank: int, nodes: int) -> tuple[int, ...] | None:
    if "peer-ranks" not in values:
        return None
    ranks = values["peer-ranks"]
    if not isinstance(ranks, list):
        raise _refusal("peer-ranks", "must be a list of ranks", ranks)
    checked = tuple(
        _integer({"peer-ranks": peer}, "peer-ranks", low=0, high=nodes - 1) for peer in ranks
    )
    if len(set(checked)) != len(checked):
        raise _refusal("peer-ranks", "each rank at most once", ranks)
    if rank in checked:
        raise _refusal("peer-ranks", f"must not hold the node's own rank {rank}", ranks)
    return checked


def _replicas(values: Mapping[str, Any], nodes: int) -> int | None:
    replicas = _optional_integer(values, "assume-data-parallelism", low=1, high=nodes)
    if replicas is not None and nodes % replicas:
        raise _refusal("assume-data-parallelism", f"must divide nodes ({nodes})", replicas)
    return replicas
