"""Reads the shares of volumes and backups against their seals, for `mtcheckpoint verify`."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import tensorstore as ts

from mtcheckpoint._reader import tensorstore_context
from mtcheckpoint._restore import Box, Chunk, box_shape
from mtcheckpoint._share_finder import FoundShare, shares_at
from mtcheckpoint._shares.contents import (
    ShareContents,
    is_unreadable,
    read_contents,
    read_seal,
    state_kvstore,
)
from mtcheckpoint._shares.identity import EXTRAS_FILE, IDENTITY_FILE, STATE_ITEM
from mtcheckpoint._shares.places import Place
from mtcheckpoint._shares.seal import SEAL_FILE, Seal
from mtcheckpoint.errors import ShareError, TierUnreadableError

__all__ = ["State", "Verdict", "verify_places"]

State = Literal["good", "bad", "unreadable", "no seal"]

# A share of thousands of bad chunks need not name each of them.
_MOST_FAULTS = 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What came of one share.

    Attributes:
        place: its folder.
        job: None when neither its name nor itself says.
        step: None when neither says.
        rank: None when neither says.
        bytes: that were read and compared.
        chunks: that were read and compared.
        state: ``"bad"`` when something differs from the seal or is missing, ``"unreadable"`` when
            that could not be told, ``"no seal"`` when there is nothing to compare with.
        faults: what is wrong; the first 20.
    """

    place: str
    job: str | None
    step: int | None
    rank: int | None
    bytes: int = 0
    chunks: int = 0
    state: State
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def verify_places(
    places: Sequence[str],
    *,
    timeout_secs: float,
    job: str | None = None,
    concurrent_bytes: int = 256 << 20,
    on_total: Callable[[int], None] = lambda size_bytes: None,
    on_bytes: Callable[[int], None] = lambda size_bytes: None,
) -> Iterator[Verdict]:
    """Reads all shares in volumes and backups and compares them with their seals. Only reads.

    Args:
        places: as for `_listing.list_places`.
        timeout_secs: limit of a single request, and of the wait for a single chunk.
        job: only this job; None for all. What does not say whose it is, is left out then.
        concurrent_bytes: bytes of chunks that are read at once; a larger chunk goes alone.
        on_total: gets the bytes that there are to read, about, before anything is read.
        on_bytes: gets the bytes of each chunk after it was compared.

    Yields:
        One verdict a share, and one for each place that could not be listed.
    """
    found: list[FoundShare] = []
    for place in places:
        try:
            found += shares_at(place, timeout_secs)
        except OSError as error:  # TierUnreadableError is one, too
            yield _nameless(place, "unreadable", str(error))
    wanted = [share for share in found if job is None or share.job in (job, None)]
    on_total(sum(share.size_bytes for share in wanted))
    for share in wanted:
        check = _Check(share, timeout_secs, concurrent_bytes, on_bytes)
        verdict = check.verdict()
        if verdict is not None and (job is None or verdict.job == job):
            yield verdict


def _nameless(place: str, state: State, fault: str) -> Verdict:
    return Verdict(place=place, job=None, step=None, rank=None, state=state, faults=(fault,))


# Reading one share.


class _Check:
    """Compares one share with its seal."""

    def __init__(
        self,
        found: FoundShare,
        timeout_secs: float,
        concurrent_bytes: int,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._found = found
        self._timeout_secs = timeout_secs
        self._concurrent_bytes = concurrent_bytes
        self._on_bytes = on_bytes
        self._labels: dict[str, Any] = {}
        self._faults: dict[str, None] = {}  # in order, each once
        self._bytes = 0
        self._chunks = 0

    def verdict(self) -> Verdict | None:
        """What is wrong with it; None when a replicator has moved or cleared it meanwhile."""
        state: State = "good"
        try:
            if self._found.fault is not None:
                self._faults[self._found.fault] = None
            elif not self._compare(self._found.open()):
                state = "no seal"
        except ShareError as error:
            self._faults[str(error)] = None
        except TierUnreadableError as error:
            state, self._faults = "unreadable", {str(error): None, **self._faults}
        if self._faults and state != "unreadable":
            state = "bad"
        if state != "good" and self._found.may_move and not os.path.lexists(self._found.where):
            return None
        return self._told(state)

    def _told(self, state: State) -> Verdict:
        faults = list(self._faults)
        if len(faults) > _MOST_FAULTS:
            more = len(faults) - _MOST_FAULTS
            faults[_MOST_FAULTS:] = [f"and {more} more"]
        known = {"job": self._found.job, "step": self._found.step, "rank": self._found.rank}
        labels = {
            name: known[name] if known[name] is not None else self._labels.get(name)
            for name in known
        }
        return Verdict(
            place=self._found.where,
            bytes=self._bytes,
            chunks=self._chunks,
            state=state,
            faults=tuple(faults),
            **labels,  # type: ignore[arg-type]
        )

    def _compare(self, place: Place) -> bool:
        """Whether there was a seal to compare with."""
        seal = read_seal(place)
        if seal is None:
            self._check_unsealed(place)
            return False
        self._labels["step"] = seal.step
        self._compare_files(place, seal)
        context = tensorstore_context()
        share = read_contents(place, context, timeout_secs=self._timeout_secs)
        self._check_labels(share)
        self._compare_chunks(share, seal, context)
        return True

    def _check_unsealed(self, place: Place) -> None:
        for file in (IDENTITY_FILE, EXTRAS_FILE):
            if place.read(file) is not None:
                raise ShareError(f"{SEAL_FILE} is gone, and {file} is there", place=place.name)
        if place.size(f"{STATE_ITEM}/manifest.ocdbt") is None:
            raise ShareError(f"{STATE_ITEM}/manifest.ocdbt is not there", place=place.name)

    def _compare_files(self, place: Place, seal: Seal) -> None:
        for file, (size, checksum) in seal.files.items():
            if checksum is None:
                found = place.size(file)
                fault = None if found == size else _size_fault(file, found, size)
            else:
                content = place.read(file)
                fault = seal.fault_of_file(file, content)
                self._bytes += len(content or b"")
            if fault is not None:
                self._faults[fault] = None

    def _check_labels(self, share: ShareContents) -> None:
        identity = share.identity
        assert identity is not None  # a sealed share without one was refused
        self._labels = {"job": identity.job, "step": identity.step, "rank": identity.node_rank}
        if self._found.job not in (None, identity.job):
            self._faults[f"it is of the job {identity.job!r}"] = None
        # An earlier step: the data did not change since. Another rank: a twin's data.
        if self._found.step is not None and identity.step > self._found.step:
            self._faults[f"it is of step {identity.step}"] = None

    def _compare_chunks(self, share: ShareContents, seal: Seal, context: ts.Context) -> None:
        # The arrays are not compressed, so no chunk is larger than all data together.
        limit_bytes = sum(size for size, _ in seal.files.values())
        waiting: collections.deque[_Reading] = collections.deque()
        in_flight = 0
        for reading in self._readings(share, seal, context, limit_bytes):
            waiting.append(reading)
            in_flight += reading.buffer.nbytes
            while in_flight > self._concurrent_bytes and len(waiting) > 1:
                in_flight -= self._finish(waiting.popleft(), share, seal)
        while waiting:
            self._finish(waiting.popleft(), share, seal)

    def _readings(
        self, share: ShareContents, seal: Seal, context: ts.Context, limit_bytes: int
    ) -> Iterator[_Reading]:
        for name, chunks in seal.chunks.items():
            held = share.chunks.get(name, {}).keys()
            store = None
            for chunk, (size, _) in chunks.items():
                if chunk not in held:
                    self._faults[f"chunk {chunk} of leaf {name!r} is not there"] = None
                elif size > limit_bytes:
                    self._faults[f"chunk {chunk} of leaf {name!r} cannot have {size} bytes"] = None
                else:
                    store = store if store is not None else self._opened(share, name, context)
                    yield _started(store, name, chunk, seal.leaves[name])

    def _opened(self, share: ShareContents, name: str, context: ts.Context) -> Any:
        spec = {
            "driver": "zarr3",
            "kvstore": state_kvstore(share.place, f"{name}/"),
            # Otherwise a chunk that is not there reads as zeros.
            "fill_missing_data_reads": False,
        }
        return self._result(ts.open(spec, context=context, read=True, open=True), share, name)

    def _finish(self, reading: _Reading, share: ShareContents, seal: Seal) -> int:
        """The bytes that are no longer on the way."""
        size: int = reading.buffer.nbytes
        try:
            self._result(reading.future, share, reading.name)
            fault = seal.fault_of_chunk(reading.name, reading.chunk, reading.buffer)
        except ShareError as error:
            fault = f"chunk {reading.chunk}: {error}"
        if fault is not None:
            self._faults[fault] = None
        self._chunks += 1
        self._bytes += size
        self._on_bytes(size)
        return size

    def _result(self, future: Any, share: ShareContents, name: str) -> Any:
        try:
            return future.result(timeout=self._timeout_secs)
        except TimeoutError as error:
            raise TierUnreadableError(
                f"{share.place.name} cannot be read: no answer in {self._timeout_secs:.0f} s for"
                f" leaf {name!r}",
                place=share.place.name,
            ) from error
        except ValueError as error:
            text = f"leaf {name!r} cannot be read: {error}"
            if is_unreadable(error):
                raise TierUnreadableError(text, place=share.place.name) from error
            raise ShareError(text, place=share.place.name) from error


def _size_fault(file: str, found: int | None, size: int) -> str:
    has = "is gone" if found is None else f"has {found} bytes"
    return f"{file} {has}, sealed were {size}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """A chunk on its way into a buffer."""

    name: str
    chunk: Chunk
    buffer: np.ndarray[Any, Any]
    future: Any


def _started(
    store: Any, name: str, chunk: Chunk, leaf: tuple[tuple[int, ...], str, tuple[int, ...]]
) -> _Reading:
    box = _box_of(chunk, *leaf[::2])
    part = store[tuple(slice(start, stop) for start, stop in box)] if box else store
    if box:
        part = part.translate_to[(0,) * len(box)]
    buffer: np.ndarray[Any, Any] = np.empty(box_shape(box), dtype=store.dtype.numpy_dtype)
    return _Reading(name=name, chunk=chunk, buffer=buffer, future=ts.array(buffer).write(part))


def _box_of(chunk: Chunk, shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> Box:
    """The elements of a chunk; the last one along a dimension may be cut by the array's end."""
    return tuple(
        (index * size, min((index + 1) * size, end))
        for index, size, end in zip(chunk, chunk_shape, shape, strict=True)
    )
