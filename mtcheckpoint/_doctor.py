"""All checks of `mtcheckpoint doctor`: those of the preflight, and the backup root's."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mtcheckpoint import _preflight
from mtcheckpoint._clock import Deadline, run_within
from mtcheckpoint._preflight import Finding
from mtcheckpoint._shares.backups import BackupRoot, open_filesystem
from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.errors import ConfigError, TierUnreadableError

__all__ = ["examine"]

_TOLD_VERSIONS = ("jax", "orbax-checkpoint", "tensorstore")


def examine(
    file: str | None,
    flags: Mapping[str, str],
    *,
    state_bytes: int | None = None,
    nodes: int | None = None,
    write_test: bool = False,
    timeout_secs: float = 60.0,
) -> list[Finding]:
    """Looks at everything that a run needs. Writes nothing, except for `write_test`.

    Args:
        file: a YAML file of flags, or None.
        flags: further flags, over those of the file.
        state_bytes: of the whole state; None when it is not known.
        nodes: of the job; None when that is not known.
        write_test: make an object in the backup root and remove it again.
        timeout_secs: limit of a single request to the backup root.
    """
    findings = _versions()
    config, configuration = _configuration(file, flags)
    findings += configuration
    if config is None:
        return findings
    if config.local_checkpoint_directory:
        findings += _preflight.check_ram_disk(Path(config.local_checkpoint_directory))
        findings += _preflight.check_room(config, state_bytes=state_bytes, nodes=nodes)
        findings += _preflight.check_set_aside(Path(config.local_checkpoint_directory))
        findings += _preflight.check_protocol_files(config)
    if config.backup_root:
        findings += check_backup(config, write_test=write_test, timeout_secs=timeout_secs)
    return findings


def _versions() -> list[Finding]:
    python = Finding(level="OK", what="version of python", found=platform.python_version())
    try:
        requirements = importlib.metadata.requires("mtcheckpoint") or []
    except importlib.metadata.PackageNotFoundError:  # run from a folder
        requirements = []
    least = dict.fromkeys(_TOLD_VERSIONS, "0")
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9._-]+)>=([0-9.]+)", requirement)
        if match is not None and match[1] in least:
            least[match[1]] = match[2]
    return [python, *_preflight.check_versions(least, _version_of)]


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _configuration(
    file: str | None, flags: Mapping[str, str]
) -> tuple[CheckpointConfig | None, list[Finding]]:
    """The configuration; None when nothing of it can be used."""
    what = "configuration"
    if file is None and not flags:
        found = "none was given, so neither RAM disk nor backups are looked at"
        remedy = "give --config FILE, or NAME=VALUE"
        return None, [Finding(level="WARN", what=what, found=found, remedy=remedy)]
    values: dict[str, Any] = {"enable_multi_tier_checkpointing": True}
    try:
        if file is not None:
            values |= _read(file)
        values |= flags
        config = CheckpointConfig.from_flags(values)
    except ConfigError as error:
        finding = Finding(level="FAIL", what=what, found=str(error))
        return _without_rules(values), [finding]
    return config, [Finding(level="OK", what=what, found=config.describe())]


def _read(file: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a mapping of flag names to values")
    return {str(name): value for name, value in found.items()}


def _without_rules(values: Mapping[str, Any]) -> CheckpointConfig | None:
    """The same flags, whatever contradicts what: their places can be looked at all the same."""
    try:
        return CheckpointConfig.from_flags({**values, "enable_checkpointing": False})
    except ConfigError:
        return None


# The backup root.


def check_backup(
    config: CheckpointConfig, *, write_test: bool, timeout_secs: float
) -> list[Finding]:
    """Whether the backup root is reachable, can be listed and read, and is what is needed."""
    url = config.backup_root
    assert url is not None
    what = f"backup root {url}"
    try:
        root = BackupRoot(url, timeout_secs=timeout_secs)
        findings = _readable(root, config.run_name, what)
    except TierUnreadableError as error:
        remedy = "check the name, the network, and the role storage.objectUser of the job's account"
        return [Finding(level="FAIL", what=what, found=str(error), remedy=remedy)]
    if url.startswith(("gs://", "gcs://")):
        findings.append(_namespace(url, what, timeout_secs))
    if write_test:
        findings.append(_writable(url, what, timeout_secs))
    return findings


def _readable(root: BackupRoot, job: str, what: str) -> list[Finding]:
    names = root.names(job) if job else []
    if not job:
        root.entries()
        return [Finding(level="OK", what=what, found="can be listed; no run_name was given")]
    if not names:
        found = f"can be listed, and has no backup of {job}"
        return [Finding(level="OK", what=what, found=found)]
    newest = root.backup(job, names[0])
    listed = Finding(level="OK", what=what, found=f"has {len(names)} backups of {job}")
    if not newest.ranks:
        found = f"{names[0]} is empty: nothing there to read"
        return [listed, Finding(level="WARN", what=what, found=found)]
    step = max(newest.ranks)
    root.claims(job, newest, step)
    found = f"can be read: the newest is {names[0]}, step {step}"
    return [listed, Finding(level="OK", what=what, found=found)]


def _namespace(url: str, what: str, timeout_secs: float) -> Finding:
    """Whether the bucket has a hierarchical namespace, which Google's replicator needs."""
    filesystem, path = open_filesystem(url, timeout_secs)
    bucket = path.partition("/")[0]
    remedy = "Google's replicator backs up only to buckets with one: make the bucket with it"
    try:
        layout = run_within(
            lambda: filesystem.call("GET", "b/{}/storageLayout", bucket, json_out=True),
            Deadline.after(timeout_secs),
            f"the layout of {bucket}",
        )
        enabled = layout.get("hierarchicalNamespace", {}).get("enabled", False)
    except Exception as error:  # no permission, an older server, a gcsfs without `call`
        found = f"hierarchical namespace: unknown ({type(error).__name__})"
        return Finding(level="WARN", what=what, found=found, remedy=remedy)
    if enabled:
        return Finding(level="OK", what=what, found="hierarchical namespace: on")
    return Finding(level="WARN", what=what, found="hierarchical namespace: off", remedy=remedy)


def _writable(url: str, what: str, timeout_secs: float) -> Finding:
    """Makes an object under a name that nobody else has, and removes it again."""
    try:
        filesystem, path = open_filesystem(url, timeout_secs)
        trial = f"{path}/.mtcheckpoint-doctor-{uuid.uuid4().hex}"
        deadline = Deadline.after(timeout_secs)
        content = b"mtcheckpoint doctor --write-test"
        run_within(lambda: filesystem.pipe_file(trial, content), deadline, trial)
        run_within(lambda: filesystem.rm_file(trial), deadline, trial)
    except Exception as error:  # each file system raises its own
        found = f"cannot be written: {type(error).__name__}: {error}"
        remedy = "the replicator needs the role storage.objectUser on the bucket"
        return Finding(level="FAIL", what=what, found=found, remedy=remedy)
    return Finding(level="OK", what=what, found="can be written; the test object is gone again")
