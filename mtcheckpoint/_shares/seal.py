"""The seal of a share: a checksum of each stored chunk, taken from what training handed over.

It lies inside the share, is written before the share is committed, and travels with it through
every tier. The arrays are hashed in host memory, as the snapshot holds them, in the same pass that
writes them. What comes back is hashed in host memory again, before it goes to a device. So a byte
that changes anywhere between is found: on the RAM disk, on the network, in the bucket.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np
import xxhash

from mtcheckpoint._restore import Chunk, chunk_at
from mtcheckpoint._shares.identity import OWN_FOLDER
from mtcheckpoint.errors import ShareError

__all__ = [
    "ALGORITHM",
    "FORMAT_VERSION",
    "SEAL_FILE",
    "Seal",
    "Summary",
    "Verify",
    "digest_of",
    "seal_from_json",
]

# How much of a share is compared with its seal.
Verify = Literal["full", "size", "off"]

SEAL_FILE = f"{OWN_FOLDER}/seal.json"
FORMAT_VERSION = 1
ALGORITHM = "xxh3_128"

# What a hostile or damaged seal may claim at most; a share of 20,000 leaves has 3 MiB of seal.
_LIMIT_BYTES = 1 << 28

_TOO_MUCH = (RecursionError, OverflowError)

# A checksum of which parts a rank holds, and one of what these are. Twins, which hold the same part
# of a model, have the first in common, and should have the second.
Summary = tuple[str, str]

# Shape, zarr's name of the element type, chunk shape.
SealedLeaf = tuple[tuple[int, ...], str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Seal:
    """What a share should hold.

    Attributes:
        step: the step it was written for. Data that did not change since an earlier step lie in
            the share of that step, whose seal names it: not a fault.
        save_id: of the save.
        leaves: shape, element type and chunk shape of each array, by leaf name.
        chunks: bytes and checksum of each chunk, by leaf name.
        files: bytes of every file, and the checksum of those that are not data; by path.
        ranks: what each rank of the save held, in short; () when not known.
    """

    step: int
    save_id: str
    leaves: Mapping[str, SealedLeaf]
    chunks: Mapping[str, Mapping[Chunk, tuple[int, str]]]
    files: Mapping[str, tuple[int, str | None]]
    ranks: tuple[Summary, ...] = ()

    def fault_of_chunk(self, name: str, chunk: Chunk, data: np.ndarray[Any, Any]) -> str | None:
        """Why `data` is not what was sealed; None when it is."""
        return self.fault_of_checksum(name, chunk, data.nbytes, digest_of(data))

    def fault_of_checksum(
        self, name: str, chunk: Chunk, size_bytes: int, checksum: str
    ) -> str | None:
        """Why data of this size and checksum are not what was sealed; None when they are."""
        sealed = self.chunks.get(name, {}).get(chunk)
        if sealed is None:
            return f"chunk {chunk} of leaf {name!r} is not in its seal"
        if (size_bytes, checksum) != sealed:
            return (
                f"chunk {chunk} of leaf {name!r} is not what was saved: its checksum is"
                f" {checksum}, sealed was {sealed[1]}"
            )
        return None

    def fault_of_file(self, file: str, content: bytes | None) -> str | None:
        """Why a small file is not what was sealed; None when it is."""
        if file not in self.files:
            return None if content is None else f"{file} is not in the seal"
        size, checksum = self.files[file]
        if content is None:
            return f"{file} is gone"
        if len(content) != size:
            return f"{file} has {len(content)} bytes, sealed were {size}"
        if checksum is not None and digest_of(content) != checksum:
            return f"{file} is not what was saved: its checksum differs"
        return None


def digest_of(data: np.ndarray[Any, Any] | bytes) -> str:
    """The checksum of some bytes, or of an array's elements in C order."""
    if isinstance(data, bytes):
        return xxhash.xxh3_128_hexdigest(data)
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return xxhash.xxh3_128_hexdigest(flat.data)


def seal_from_json(text: bytes, place: str) -> Seal:
    """Reads a seal file.

    Raises:
        ShareError: it is damaged, or of a format that this version does not read.
    """
    if len(text) > _LIMIT_BYTES:
        raise ShareError(f"{place}/{SEAL_FILE} has {len(text)} bytes: no seal", place=place)
    try:
        outer = json.loads(text)
        content = outer["seal"]
        if digest_of(content.encode()) != outer["checksum"]:
            raise ValueError("its own checksum differs")
        return _read(json.loads(content))
    except (ValueError, LookupError, TypeError, AttributeError, *_TOO_MUCH) as error:
        raise ShareError(
            f"{place}/{SEAL_FILE} is damaged: {type(error).__name__}: {error}", place=place
        ) from error


# A seal is not believed: no share has paths out of it, chunks of no leaf, impossible numbers.


def _read(content: Mapping[str, Any]) -> Seal:
    if (content["format"], content["algorithm"]) != (FORMAT_VERSION, ALGORITHM):
        raise ValueError(f"format {content['format']!r} with {content['algorithm']!r}")
    leaves = _leaves(content["leaves"])
    return Seal(
        step=int(content["step"]),
        save_id=str(content["save_id"]),
        leaves=leaves,
        chunks={
            name: _chunks(name, chunks, dimensions=len(leaves[name][0]))
            for name, chunks in content["chunks"].items()
        },
        files={name: _file(name, *told) for name, told in content["files"].items()},
        ranks=tuple((str(which), str(what)) for which, what in content.get("ranks", ())),
    )


def _leaves(content: Mapping[str, Any]) -> dict[str, SealedLeaf]:
    """Leaves that are stored alike share one description."""
    leaves: dict[str, SealedLeaf] = {}
    known: dict[SealedLeaf, SealedLeaf] = {}
    for name, (shape, dtype, chunk_shape) in content.items():
        told = (tuple(shape), str(dtype), tuple(chunk_shape))
        leaves[name] = known.setdefault(told, told)
    for shape, _, chunk_shape in known:
        whole = all(type(size) is int for size in (*shape, *chunk_shape))
        if not whole or len(shape) != len(chunk_shape):
            raise ValueError(f"a leaf has shape {shape} in chunks of {chunk_shape}")
        if min(shape, default=0) < 0 or min(chunk_shape, default=1) < 1:
            raise ValueError(f"a leaf has shape {shape} in chunks of {chunk_shape}")
    return leaves


def _chunks(
    name: str, content: Mapping[str, Any], *, dimensions: int
) -> dict[Chunk, tuple[int, str]]:
    chunks: dict[Chunk, tuple[int, str]] = {}
    for key, (told_size, checksum) in content.items():
        chunk, size = chunk_at(key), int(told_size)
        if len(chunk) != dimensions or size < 0:
            raise ValueError(f"leaf {name[:200]!r} has a chunk {chunk} of {size} bytes")
        chunks[chunk] = (size, str(checksum))
    return chunks


def _file(name: str, told_size: Any, checksum: Any) -> tuple[int, str | None]:
    path, size = PurePosixPath(name), int(told_size)
    if path.is_absolute() or ".." in path.parts or "\0" in name or size < 0:
        raise ValueError(f"it seals {name[:200]!r} of {size} bytes")
    return size, None if checksum is None else str(checksum)
