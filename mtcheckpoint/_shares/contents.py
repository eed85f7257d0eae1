"""What a share holds: leaves, and which chunks of each lie in it.

Read from Orbax's files, so that shares written by Orbax itself are read alike.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import tensorstore as ts

from mtcheckpoint._shares.identity import (
    EXTRAS_FILE,
    IDENTITY_FILE,
    PROCESS_METADATA_ITEM,
    STATE_ITEM,
    Identity,
    identity_from_json,
)
from mtcheckpoint._shares.places import Place
from mtcheckpoint.errors import ShareError, TierUnreadableError

__all__ = ["Chunk", "Leaf", "ShareContents", "read_contents", "read_extras", "state_kvstore"]

Chunk = tuple[int, ...]

_ARRAY_METADATA = "/zarr.json"
_OPEN_SECONDS = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One leaf of the saved state.

    Attributes:
        name: its path, joined by dots.
        path: the keys of the path; an int is an index of a sequence.
        value_type: Orbax's word for it: ``jax.Array``, ``np.ndarray``, ``scalar``, ``string``.
        kind: what our own saves know beyond that (`_snapshot.Snapshot.kinds`).
        shape: of the whole array.
        dtype: zarr's name of the element type.
        chunk_shape: of one stored chunk.
        sharding: Orbax's description of the saved sharding, if there is one.
    """

    name: str
    path: tuple[str | int, ...]
    value_type: str
    kind: str | None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    chunk_shape: tuple[int, ...] = ()
    sharding: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShareContents:
    """A share that was looked into.

    Attributes:
        place: where it lies.
        identity: None when Orbax wrote it.
        leaves: by name.
        chunks: the chunks that lie here, by leaf name.
        strings: values of the leaves that are strings.
        empty: paths of empty parts of the tree and what they were.
        process_devices: device ids of each process of the save, in rank order.
    """

    place: Place
    identity: Identity | None
    leaves: Mapping[str, Leaf]
    chunks: Mapping[str, frozenset[Chunk]]
    strings: Mapping[str, str]
    empty: Mapping[tuple[str | int, ...], str]
    process_devices: tuple[tuple[int, ...], ...]


def state_kvstore(place: Place, path: str = "") -> dict[str, Any]:
    """TensorStore's spec of the arrays of a share, or of what lies under `path` there."""
    return {"driver": "ocdbt", "base": place.kvstore(STATE_ITEM), "path": path}


def read_contents(place: Place, context: ts.Context) -> ShareContents:
    """Looks into a share.

    Raises:
        ShareError: it is damaged, or no share at all.
        TierUnreadableError: its place cannot be read.
    """
    identity_text = place.read(IDENTITY_FILE)
    identity = identity_from_json(identity_text, place.name) if identity_text is not None else None
    tree = _json(place, f"{STATE_ITEM}/_METADATA")
    if place.read(f"{STATE_ITEM}/manifest.ocdbt") is None:
        # Without this look, a listing of the arrays would just be empty.
        raise ShareError(f"{place.name}/{STATE_ITEM}/manifest.ocdbt is not there", place=place.name)
    arrays, chunks = _read_arrays(place, context)
    leaves, empty = _read_tree(place, tree, arrays, dict(identity.kinds) if identity else {})
    return ShareContents(
        place=place,
        identity=identity,
        leaves=leaves,
        chunks=chunks,
        strings=_json(place, f"{STATE_ITEM}/_strings.json", default={}),
        empty=empty,
        process_devices=tuple(
            tuple(ids)
            for ids in _json(
                place, f"{PROCESS_METADATA_ITEM}/global_process_metadata.json", default=[]
            )
        ),
    )


def read_extras(place: Place) -> list[Any]:
    """The encoded extras of all processes of the save, in rank order; [] when there are none."""
    return list(_json(place, EXTRAS_FILE, default=[]))


def _json(place: Place, file: str, default: Any = None) -> Any:
    text = place.read(file)
    if text is None:
        if default is None:
            raise ShareError(f"{place.name}/{file} is not there", place=place.name)
        return default
    try:
        return json.loads(text)
    except ValueError as error:
        raise ShareError(f"{place.name}/{file} is not JSON: {error}", place=place.name) from error


def _read_arrays(
    place: Place, context: ts.Context
) -> tuple[dict[str, dict[str, Any]], dict[str, frozenset[Chunk]]]:
    try:
        store = ts.KvStore.open(state_kvstore(place), context=context).result(_OPEN_SECONDS)
        keys = [key.decode() for key in store.list().result(_OPEN_SECONDS)]
        names = [key.removesuffix(_ARRAY_METADATA) for key in keys if key.endswith(_ARRAY_METADATA)]
        reads = [store.read(name + _ARRAY_METADATA) for name in names]
        arrays = {
            name: json.loads(read.result(_OPEN_SECONDS).value)
            for name, read in zip(names, reads, strict=True)
        }
    except (ValueError, TimeoutError, UnicodeDecodeError) as error:
        raise _translated(error, place) from error
    chunks: dict[str, set[Chunk]] = {name: set() for name in names}
    for key in keys:
        name, separator, position = key.rpartition("/c")
        if separator and name in chunks:
            chunks[name].add(tuple(int(part) for part in position.split("/") if part))
    return arrays, {name: frozenset(found) for name, found in chunks.items()}


def _translated(error: Exception, place: Place) -> Exception:
    """TensorStore raises ValueError for everything; its text begins with the status code."""
    text = str(error)
    unreadable = ("PERMISSION_DENIED", "UNAVAILABLE", "ABORTED", "DEADLINE_EXCEEDED")
    if isinstance(error, TimeoutError) or text.startswith(unreadable):
        return TierUnreadableError(f"{place.name} cannot be read: {text}", place=place.name)
    return ShareError(f"{place.name} is damaged: {text}", place=place.name)


def _read_tree(
    place: Place,
    tree: Any,
    arrays: Mapping[str, Mapping[str, Any]],
    kinds: Mapping[str, str],
) -> tuple[dict[str, Leaf], dict[tuple[str | int, ...], str]]:
    shardings = _json(place, f"{STATE_ITEM}/_sharding", default={})
    leaves, empty = {}, {}
    try:
        for entry in tree["tree_metadata"].values():
            path = tuple(_key(part) for part in entry["key_metadata"])
            name = ".".join(str(part) for part in path)
            value = entry["value_metadata"]
            if value.get("skip_deserialize"):
                empty[path] = value["value_type"]
                continue
            leaves[name] = _leaf(
                name, path, value["value_type"], kinds.get(name), arrays, shardings
            )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ShareError(
            f"{place.name}: its tree metadata cannot be read: {type(error).__name__}: {error}",
            place=place.name,
        ) from error
    return leaves, empty


# Orbax's key types: 1 is an index of a sequence, 2 a key of a mapping (or an attribute).
_SEQUENCE = 1


def _key(part: Mapping[str, Any]) -> str | int:
    return int(part["key"]) if part["key_type"] == _SEQUENCE else str(part["key"])


@functools.lru_cache(maxsize=256)
def _parsed(sharding: str) -> Mapping[str, Any]:
    """Leaves with the same sharding share one description: it lists every device of the job."""
    found: Mapping[str, Any] = json.loads(sharding)
    return found


def _leaf(
    name: str,
    path: tuple[str | int, ...],
    value_type: str,
    kind: str | None,
    arrays: Mapping[str, Mapping[str, Any]],
    shardings: Mapping[str, str],
) -> Leaf:
    if value_type == "string":
        return Leaf(name=name, path=path, value_type=value_type, kind=kind)
    array = arrays[name]
    sharding = shardings.get(base64.b64encode(name.encode()).decode())
    return Leaf(
        name=name,
        path=path,
        value_type=value_type,
        kind=kind,
        shape=tuple(array["shape"]),
        dtype=array["data_type"],
        chunk_shape=tuple(array["chunk_grid"]["configuration"]["chunk_shape"]),
        sharding=_parsed(sharding) if sharding else None,
    )
