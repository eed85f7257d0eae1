"""What a share says of itself: whose part of which save it is. Pure.

A share is one node's directory of one step. Its name is lost once a replicator took it, so all of
this lies inside, in a folder beside Orbax's items, and travels with the data through every tier.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from mtcheckpoint.errors import ShareError

__all__ = [
    "EXTRAS_FILE",
    "FORMAT_VERSION",
    "IDENTITY_FILE",
    "NODES_LIMIT",
    "OWN_FOLDER",
    "PROCESS_METADATA_ITEM",
    "STATE_ITEM",
    "Identity",
    "decode_extras",
    "encode_extras",
    "identity_from_json",
    "identity_to_json",
    "new_save_id",
]

STATE_ITEM = "state"
PROCESS_METADATA_ITEM = "process_metadata"
OWN_FOLDER = "mtcheckpoint"
IDENTITY_FILE = f"{OWN_FOLDER}/identity.json"
EXTRAS_FILE = f"{OWN_FOLDER}/extras.json"
FORMAT_VERSION = 1

# More than any job has.
NODES_LIMIT = 1 << 20
_LIMIT_STEP = 1 << 63

_BYTES_KEY = "__bytes__"
_JSON_TYPES = (str, int, float, bool, type(None))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """One share's place in one save.

    Attributes:
        job: name of the job.
        step: the step that was saved.
        save_id: the same on all shares of one save, and on no others; see `new_save_id`.
        node_rank: the rank that wrote it.
        nodes: of how many.
        kinds: what leaves were, where their arrays do not tell (`_snapshot.Snapshot.kinds`).
    """

    job: str
    step: int
    save_id: str
    node_rank: int
    nodes: int
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)


def new_save_id() -> str:
    """An id for a save. Of two saves, the id of the later one sorts after the other's."""
    return f"{time.time_ns() // 1_000_000:012x}{uuid.uuid4().hex[:20]}"


def identity_to_json(identity: Identity) -> str:
    """The text of the identity file."""
    return json.dumps({"format": FORMAT_VERSION, **dataclasses.asdict(identity)}, indent=1)


def identity_from_json(text: str | bytes, place: str) -> Identity:
    """Reads an identity file.

    Raises:
        ShareError: the text is not an identity of a format that this version reads.
    """
    fields = _json_object(text, place)
    if fields.get("format") != FORMAT_VERSION:
        raise ShareError(
            f"{place}/{IDENTITY_FILE}: format {fields.get('format')!r}, this version reads"
            f" {FORMAT_VERSION}",
            place=place,
        )
    expected = {
        "job": str,
        "step": int,
        "save_id": str,
        "node_rank": int,
        "nodes": int,
        "kinds": dict,
    }
    for name, kind in expected.items():
        if not isinstance(fields.get(name), kind):
            raise ShareError(
                f"{place}/{IDENTITY_FILE}: {name} should be {kind.__name__}, found"
                f" {fields.get(name)!r}",
                place=place,
            )
    identity = Identity(**{name: fields[name] for name in expected})
    if not _is_possible(identity):
        raise ShareError(
            f"{place}/{IDENTITY_FILE}: step {identity.step}, rank {identity.node_rank} of"
            f" {identity.nodes} cannot be",
            place=place,
        )
    return identity


def _is_possible(identity: Identity) -> bool:
    """False for numbers that no save has: what is counted up to them would never end."""
    numbers = (identity.step, identity.node_rank, identity.nodes)
    return (
        not any(isinstance(number, bool) for number in numbers)
        and 0 <= identity.step < _LIMIT_STEP
        and 0 <= identity.node_rank < identity.nodes <= NODES_LIMIT
        and all(isinstance(kind, str) for kind in identity.kinds.values())
    )


def _json_object(text: str | bytes, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShareError(f"{place}/{IDENTITY_FILE} is not JSON: {error}", place=place) from error
    if not isinstance(fields, dict):
        raise ShareError(f"{place}/{IDENTITY_FILE} is not a JSON object", place=place)
    return fields


def encode_extras(extras: Mapping[str, Any] | None) -> Any:
    """Extras as plain JSON values, bytes included.

    Raises:
        TypeError: a value is neither JSON nor bytes; the message has its path.
    """
    if extras is None:
        return {}
    if not isinstance(extras, Mapping):
        raise TypeError(f"extras should be a mapping, found {type(extras).__name__}")
    return _encode(extras, "extras")


def _encode(value: Any, path: str) -> Any:
    if isinstance(value, _JSON_TYPES):
        return value
    if isinstance(value, bytes):
        return {_BYTES_KEY: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value) or _BYTES_KEY in value:
            raise TypeError(f"{path}: keys should be strings other than {_BYTES_KEY!r}")
        return {key: _encode(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
    raise TypeError(
        f"{path} is of type {type(value).__name__}: extras hold numbers, strings, bytes, None,"
        " lists and mappings. Turn it into bytes or numbers first"
    )


def decode_extras(value: Any) -> Any:
    """The inverse of `encode_extras`; tuples come back as lists."""
    if isinstance(value, dict):
        if set(value) == {_BYTES_KEY}:
            return base64.b64decode(value[_BYTES_KEY], validate=True)
        return {key: decode_extras(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_extras(item) for item in value]
    return value
