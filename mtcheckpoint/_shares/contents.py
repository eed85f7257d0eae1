"""What a share holds: leaves, and which chunks of each lie in it.

Read from Orbax's files, so that shares written by Orbax itself are read alike.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import tensorstore as ts

from mtcheckpoint._clock import Deadline
from mtcheckpoint._ocdbt_index import Stored
from mtcheckpoint._restore import Chunk
from mtcheckpoint._shares.array_index import ArrayIndex, read_index
from mtcheckpoint._shares.identity import (
    EXTRAS_FILE,
    IDENTITY_FILE,
    PROCESS_METADATA_ITEM,
    STATE_ITEM,
    Identity,
    decode_extras,
    identity_from_json,
)
from mtcheckpoint._shares.places import Place
from mtcheckpoint._shares.read_ahead import ReadAhead
from mtcheckpoint._shares.seal import SEAL_FILE, Seal, Verify, seal_from_json
from mtcheckpoint._shares.shardings import SHARDINGS_FILE, shardings_from_json
from mtcheckpoint.errors import ShareError, TierUnreadableError

__all__ = [
    "Leaf",
    "ShareContents",
    "is_unreadable",
    "read_contents",
    "read_extras",
    "read_seal",
    "state_kvstore",
]

_OPEN_SECONDS = 120.0

_TREE_FILE = f"{STATE_ITEM}/_METADATA"
_MANIFEST_FILE = f"{STATE_ITEM}/manifest.ocdbt"
_STRINGS_FILE = f"{STATE_ITEM}/_strings.json"
_PROCESS_FILE = f"{PROCESS_METADATA_ITEM}/global_process_metadata.json"
# What every share is asked for; what Orbax's alone have is asked for when ours is not there.
_SMALL_FILES = (
    SEAL_FILE,
    IDENTITY_FILE,
    SHARDINGS_FILE,
    _TREE_FILE,
    _MANIFEST_FILE,
    _STRINGS_FILE,
    _PROCESS_FILE,
)


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
        is_plain: chunks are stored as they lie in memory, all of one size.
    """

    name: str
    path: tuple[str | int, ...]
    value_type: str
    kind: str | None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    chunk_shape: tuple[int, ...] = ()
    sharding: Mapping[str, Any] | None = None
    is_plain: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShareContents:
    """A share that was looked into.

    Attributes:
        place: where it lies.
        identity: None when Orbax wrote it.
        leaves: by name.
        chunks: the chunks that lie here, by leaf name, and where, or what they are.
        strings: values of the leaves that are strings.
        empty: paths of empty parts of the tree and what they were.
        process_devices: device ids of each process of the save, in rank order.
        seal: what its chunks should be; None when they are not to be checked, or cannot be.
    """

    place: Place
    identity: Identity | None
    leaves: Mapping[str, Leaf]
    chunks: Mapping[str, Mapping[Chunk, Stored | bytes]]
    strings: Mapping[str, str]
    empty: Mapping[tuple[str | int, ...], str]
    process_devices: tuple[tuple[int, ...], ...]
    seal: Seal | None = None


def state_kvstore(place: Place, path: str = "") -> dict[str, Any]:
    """TensorStore's spec of the arrays of a share, or of what lies under `path` there."""
    return {"driver": "ocdbt", "base": place.kvstore(STATE_ITEM), "path": path}


def read_contents(
    place: Place,
    context: ts.Context,
    *,
    verify: Verify = "full",
    timeout_secs: float = _OPEN_SECONDS,
) -> ShareContents:
    """Looks into a share.

    Args:
        place: where it lies.
        context: TensorStore's pools and limits.
        verify: ``"full"``: its small files are compared with its seal now, and its chunks when they
            are read. ``"size"``: all its files have the sealed sizes. ``"off"``: neither.
        timeout_secs: limit for what is looked up among its arrays.

    Raises:
        ShareError: it is damaged, or no share at all.
        TierUnreadableError: its place cannot be read.
    """
    deadline = Deadline.after(timeout_secs)
    find_index = functools.partial(_read_index, place, context, deadline)
    if place.tier == "local":
        return _contents(place, place, find_index, verify)
    ahead = ReadAhead(place, deadline)
    found_index = ahead.begin(find_index)  # takes longest
    ahead.ask_for(_SMALL_FILES)
    return _contents(place, ahead, found_index, verify)


def _contents(
    place: Place, files: Place, find_index: Callable[[], ArrayIndex], verify: Verify
) -> ShareContents:
    seal = read_seal(files) if verify != "off" else None
    if seal is not None and verify == "size":
        _check_sizes(place, seal)
    read = _SealedFiles(files, seal if verify == "full" else None)
    identity_text = read(IDENTITY_FILE)
    identity = identity_from_json(identity_text, place.name) if identity_text is not None else None
    if verify != "off":
        _check_seal(place, identity, seal)
    tree = _json(read, _TREE_FILE, dict)
    if read(_MANIFEST_FILE) is None:
        # Without this look, a listing of the arrays would just be empty.
        raise ShareError(f"{place.name}/{_MANIFEST_FILE} is not there", place=place.name)
    index = find_index()
    kinds = dict(identity.kinds) if identity else {}
    leaves, empty = _read_tree(read, tree, index.metadata, kinds)
    if seal is not None and verify == "full":
        _check_leaves(place, leaves, seal)
    return ShareContents(
        place=place,
        identity=identity,
        leaves=leaves,
        chunks=index.chunks,
        strings=_strings(read),
        empty=empty,
        process_devices=_process_devices(read),
        seal=seal if verify == "full" else None,
    )


def read_extras(share: ShareContents) -> list[Any]:
    """The encoded extras of all processes of the save, in rank order; [] when there are none."""
    extras = _json(_SealedFiles(share.place, share.seal), EXTRAS_FILE, list, default=[])
    try:
        for own in extras:
            if not isinstance(decode_extras(own), dict):
                raise ValueError("the extras of a process should be a JSON object")
    except (ValueError, TypeError, RecursionError) as error:
        raise ShareError(
            f"{share.place.name}/{EXTRAS_FILE} cannot be read: {error}", place=share.place.name
        ) from error
    return list(extras)


@dataclasses.dataclass(frozen=True, slots=True)
class _SealedFiles:
    """Reads small files of a share and compares them with its seal."""

    place: Place
    seal: Seal | None

    def __call__(self, file: str) -> bytes | None:
        content = self.place.read(file)
        fault = self.seal.fault_of_file(file, content) if self.seal is not None else None
        if fault is not None:
            raise ShareError(f"{self.place.name}: {fault}", place=self.place.name)
        return content


def read_seal(place: Place) -> Seal | None:
    """The seal of a share; None when it has none.

    Raises:
        ShareError: it is damaged.
        TierUnreadableError: its place cannot be read.
    """
    text = place.read(SEAL_FILE)
    return seal_from_json(text, place.name) if text is not None else None


def _check_seal(place: Place, identity: Identity | None, seal: Seal | None) -> None:
    """Our own shares have an identity and a seal of one save; Orbax's have neither."""
    if identity is None and seal is None:
        return
    if identity is None or seal is None:
        gone = IDENTITY_FILE if identity is None else SEAL_FILE
        raise ShareError(f"{place.name}: {gone} is gone", place=place.name)
    if (identity.step, identity.save_id) != (seal.step, seal.save_id):
        raise ShareError(
            f"{place.name}: its seal is of step {seal.step}, save {seal.save_id}; it is of step"
            f" {identity.step}, save {identity.save_id}",
            place=place.name,
        )


def _check_sizes(place: Place, seal: Seal) -> None:
    for file, (size, _) in seal.files.items():
        found = place.size(file)
        if found != size:
            has = "is gone" if found is None else f"has {found} bytes"
            raise ShareError(f"{place.name}/{file} {has}, sealed were {size}", place=place.name)


def _check_leaves(place: Place, leaves: Mapping[str, Leaf], seal: Seal) -> None:
    for name, sealed in seal.leaves.items():
        leaf = leaves.get(name)
        found = (leaf.shape, leaf.dtype, leaf.chunk_shape) if leaf is not None else None
        if found != sealed:
            raise ShareError(
                f"{place.name}: leaf {name!r} is stored as {found}, sealed as {sealed}",
                place=place.name,
            )


def _json(read: _SealedFiles, file: str, kind: type, default: Any = None) -> Any:
    """The value of a JSON file, of the Python type that it should have."""
    name = read.place.name
    text = read(file)
    if text is None:
        if default is None:
            raise ShareError(f"{name}/{file} is not there", place=name)
        return default
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShareError(f"{name}/{file} is not JSON: {error}", place=name) from error
    if not isinstance(value, kind):
        raise ShareError(
            f"{name}/{file}: expected JSON of type {kind.__name__}, found {type(value).__name__}",
            place=name,
        )
    return value


def _strings(read: _SealedFiles) -> dict[str, str]:
    found = _json(read, _STRINGS_FILE, dict, default={})
    return {name: str(value) for name, value in found.items()}


def _process_devices(read: _SealedFiles) -> tuple[tuple[int, ...], ...]:
    try:
        found = _json(read, _PROCESS_FILE, list, default=[])
        return tuple(tuple(int(device) for device in ids) for ids in found)
    except (TypeError, OverflowError) as error:
        name = read.place.name
        raise ShareError(f"{name}/{_PROCESS_FILE}: {error}", place=name) from error


def _read_index(place: Place, context: ts.Context, deadline: Deadline) -> ArrayIndex:
    try:
        return read_index(place, context, deadline)
    except TimeoutError as error:
        raise TierUnreadableError(
            f"{place.name} cannot be read: no answer in {deadline.seconds:.0f} s", place=place.name
        ) from error
    except ValueError as error:
        raise _translated(error, place) from error
    except (RecursionError, LookupError, TypeError) as error:
        raise ShareError(
            f"{place.name} is damaged: {type(error).__name__}: {error}", place=place.name
        ) from error


def is_unreadable(error: ValueError) -> bool:
    """Whether TensorStore could not read a place, so that nothing is known of what is there.

    It raises ValueError for everything; its text begins with the status code.
    """
    codes = ("PERMISSION_DENIED", "UNAVAILABLE", "ABORTED", "DEADLINE_EXCEEDED")
    return str(error).startswith(codes)


def _translated(error: ValueError, place: Place) -> Exception:
    if is_unreadable(error):
        return TierUnreadableError(f"{place.name} cannot be read: {error}", place=place.name)
    return ShareError(f"{place.name} is damaged: {error}", place=place.name)


def _read_tree(
    read: _SealedFiles,
    tree: Any,
    arrays: Mapping[str, bytes],
    kinds: Mapping[str, str],
) -> tuple[dict[str, Leaf], dict[tuple[str | int, ...], str]]:
    leaves, empty = {}, {}
    try:
        shardings = _shardings(read)
        for entry in tree["tree_metadata"].values():
            path = tuple([_key(part) for part in entry["key_metadata"]])
            name = ".".join(map(str, path))
            value = entry["value_metadata"]
            if value.get("skip_deserialize"):
                empty[path] = value["value_type"]
                continue
            leaves[name] = _leaf(
                name, path, value["value_type"], kinds.get(name), arrays, shardings.get(name)
            )
    except _NONSENSE as error:
        raise ShareError(
            f"{read.place.name}: its tree metadata cannot be read: {type(error).__name__}: {error}",
            place=read.place.name,
        ) from error
    return leaves, empty


# What a description raises that is none.
_NONSENSE = (
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    ValueError,
    RecursionError,
)

# Orbax's key types: 1 is an index of a sequence, 2 a key of a mapping (or an attribute).
_SEQUENCE = 1


def _key(part: Mapping[str, Any]) -> str | int:
    return int(part["key"]) if part["key_type"] == _SEQUENCE else str(part["key"])


def _shardings(read: _SealedFiles) -> dict[str, Mapping[str, Any]]:
    """How each leaf lay on the mesh: from our own file, or from Orbax's."""
    own = _json(read, SHARDINGS_FILE, dict, default={})
    if own:
        return shardings_from_json(own)
    by_orbax = _json(read, f"{STATE_ITEM}/_sharding", dict, default={})
    return {
        base64.b64decode(name).decode(): _parsed(sharding) for name, sharding in by_orbax.items()
    }


@functools.lru_cache(maxsize=256)
def _parsed(sharding: str) -> Mapping[str, Any]:
    """Leaves with the same sharding share one description: it lists every device of the job."""
    try:
        found: Mapping[str, Any] = json.loads(sharding)
    except RecursionError as error:
        raise ValueError(f"a sharding is not JSON: {error}") from error
    return found


def _leaf(
    name: str,
    path: tuple[str | int, ...],
    value_type: str,
    kind: str | None,
    arrays: Mapping[str, bytes],
    sharding: Mapping[str, Any] | None,
) -> Leaf:
    if value_type == "string":
        return Leaf(name=name, path=path, value_type=value_type, kind=kind)
    shape, dtype, chunk_shape, is_plain = _stored_as(arrays[name])
    return Leaf(
        name=name,
        path=path,
        value_type=value_type,
        kind=kind,
        shape=shape,
        dtype=dtype,
        chunk_shape=chunk_shape,
        sharding=sharding,
        is_plain=is_plain,
    )


@functools.lru_cache(maxsize=1024)
def _stored_as(text: bytes) -> tuple[tuple[int, ...], str, tuple[int, ...], bool]:
    """Shape, element type, chunk shape, and whether it is plain, of an array with this description.

    Many arrays have the same one.
    """
    array = json.loads(text)
    return (
        _sizes(array["shape"]),
        _word(array["data_type"]),
        _sizes(array["chunk_grid"]["configuration"]["chunk_shape"], least=1),
        _is_plain(array),
    )


def _is_plain(array: Mapping[str, Any]) -> bool:
    (codec, *more) = array["codecs"]
    chunk_shape = array["chunk_grid"]["configuration"]["chunk_shape"]
    return (
        not more
        and codec["name"] == "bytes"
        and codec.get("configuration", {}).get("endian", "little") == "little"
        and array["chunk_key_encoding"] == {"name": "default"}
        and all(size % part == 0 for size, part in zip(array["shape"], chunk_shape, strict=True))
    )


def _sizes(values: Any, *, least: int = 0) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"expected sizes of an array, found {values!r:.200}")
    if any(value < least for value in values):
        raise ValueError(f"expected sizes of {least} or more, found {values!r:.200}")
    return tuple(values)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected an element type, found {value!r:.200}")
    return value
