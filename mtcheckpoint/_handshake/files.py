"""Names and grammar of the files that training and the replicator exchange. Pure: no I/O.

The one module that the client and the embedded replicator share. Names and formats are those of
Google's multi-tier checkpointing (docs/protocol.md).
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping
from typing import Any

import yaml

__all__ = [
    "BACKUP_FOLDER",
    "DATA_NAME",
    "ERRORS_FILE",
    "FAILED_FILE",
    "FORCED_RESTORE_FILE",
    "JAX_INIT_INFO_FILE",
    "KEPT_PATTERNS",
    "PRERESTORE_FILE",
    "REPLICATOR_YAML",
    "STEP_NAME",
    "ShareName",
    "backup_folder_name",
    "data_name",
    "is_digest",
    "is_step_name",
    "job_name_fault",
    "parse_share_name",
    "typed_value",
    "yaml_text",
]

REPLICATOR_YAML = "replicator.yaml"
JAX_INIT_INFO_FILE = "jax-init-info.txt"
PRERESTORE_FILE = "replicator.prerestore"
ERRORS_FILE = "replicator.errors"
FAILED_FILE = "replicator.failed"
FORCED_RESTORE_FILE = "restore.version"

# What the replicator leaves in the volume when a run starts; all else goes.
KEPT_PATTERNS = ("*.meta", "*.data", JAX_INIT_INFO_FILE, REPLICATOR_YAML)

STEP_NAME = re.compile(r"[0-9]+")
DATA_NAME = re.compile(r"(D?[a-z0-9]{64})\.data")
BACKUP_FOLDER = re.compile(r"\d{4}-\d{2}-\d{2}_\d{2}-\d{2}")

_SHARE_NAME = re.compile(
    # Bounded: readers count up to ranks. No job has so many nodes, and no step so many digits.
    r"(?P<job>.+)-s(?P<step>[0-9]{1,18})-n(?P<rank>[0-9]{1,6})-w(?P<worker>[0-9]{1,6})"
    r"\.(?P<kind>[^/]+)",
    re.DOTALL,
)
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")

# Names are prefixes of file names (255 bytes) and keys of ConfigMaps (253).
_JOB_NAME_LIMIT = 200


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShareName:
    """``<job>-s<step>-n<rank>-w<worker>``: whose part of which step a file speaks of."""

    job: str
    step: int
    node_rank: int
    worker: int = 0

    @property
    def stem(self) -> str:
        return f"{self.job}-s{self.step}-n{self.node_rank}-w{self.worker}"

    @property
    def meta(self) -> str:
        """The file that holds the hash of the data."""
        return f"{self.stem}.meta"

    @property
    def save(self) -> str:
        """The directory while its hash is computed."""
        return f"{self.stem}.save"

    @property
    def restore(self) -> str:
        """The replicator's answer: a link to the data, or an empty file."""
        return f"{self.stem}.restore"


def parse_share_name(name: str, kind: str) -> ShareName | None:
    """Reads ``<job>-s<step>-n<rank>-w<worker>.<kind>``; None for any other name.

    The job's name may itself hold ``-s9-n1``: the last such part counts.
    """
    match = _SHARE_NAME.fullmatch(name)
    if match is None or match["kind"] != kind:
        return None
    return ShareName(
        job=match["job"],
        step=int(match["step"]),
        node_rank=int(match["rank"]),
        worker=int(match["worker"]),
    )


def is_step_name(name: str) -> bool:
    """True for a digits-only name: such a directory is taken by the replicator at once."""
    return STEP_NAME.fullmatch(name) is not None


def is_digest(text: str) -> bool:
    """True for what a ``.meta`` may hold: never a path."""
    return DATA_NAME.fullmatch(f"{text}.data") is not None


def data_name(digest: str) -> str:
    """The name of the data that a ``.meta`` with content `digest` points to."""
    return f"{digest}.data"


def backup_folder_name(moment: datetime.datetime) -> str:
    """``YYYY-MM-DD_HH-MM`` in UTC: one backup of a job."""
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%d_%H-%M")


def job_name_fault(name: object) -> str | None:
    """Why `name` cannot be a job's name; None when it can.

    It becomes a folder of the bucket, the name of a ConfigMap and a prefix of file names, and
    passes through a YAML reader that types bare words, expands ``$NAME`` and turns digits into
    integers. So: a DNS-1123 name that comes back from such a reader as the same string.
    """
    if not isinstance(name, str):
        return f"must be a string, found {type(name).__name__}"
    if not name:
        return "is empty"
    if len(name) > _JOB_NAME_LIMIT:
        return f"has {len(name)} characters, at most {_JOB_NAME_LIMIT} fit into file names"
    if not all(_DNS_LABEL.fullmatch(label) for label in name.split(".")):
        return (
            "must be lower-case letters, digits, '-' and '.', each part beginning and ending with"
            " a letter or digit (DNS-1123)"
        )
    typed = typed_value(name)
    if not isinstance(typed, str) or typed != name:
        return (
            f"is read by YAML as {typed!r} ({type(typed).__name__}), so it would never match again"
        )
    return None


def typed_value(text: str) -> Any:
    """What the replicator's YAML reader makes of the bare word `text`."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    if isinstance(value, str):
        if _YAML_1_2_FLOAT.fullmatch(value):
            return float(value)
        try:
            return int(value)
        except ValueError:
            return value
    return value


# YAML 1.2 readers take this for a number, PyYAML (1.1) does not: such a name is not portable.
_YAML_1_2_FLOAT = re.compile(r"[0-9]+(\.[0-9]*)?[eE][0-9]+")


def yaml_text(settings: Mapping[str, Any]) -> str:
    """The text of ``replicator.yaml`` for these settings, one key a line."""
    return str(yaml.safe_dump(dict(settings), sort_keys=False, default_flow_style=None))
