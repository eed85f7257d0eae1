"""Writes seals: from one save of a state to the next only the checksums in them are others.

So the rest of the text is made once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Self

from mtcheckpoint._restore import Chunk
from mtcheckpoint._shares.seal import ALGORITHM, FORMAT_VERSION, Summary, digest_of
from mtcheckpoint._shares.write_plan import DATA_FOLDER, WritePlan

__all__ = ["NO_SUMMARY", "OpenSeal", "SealForm", "sealed_files"]

_SUMMARY_DIGITS = 16  # there is one for each rank in every seal
NO_SUMMARY: Summary = ("0" * _SUMMARY_DIGITS, "0" * _SUMMARY_DIGITS)

# Below these folders lie the stored chunks; they are sealed one by one, and here by size.
# Orbax's own shares have one of the latter for each process.
_PROCESS_FOLDER = "ocdbt.process_"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpenSeal:
    """A seal, but for what the other ranks hold.

    Attributes:
        content: its text up to there.
        summary: which chunks this share holds, and what they are, in one short checksum each.
    """

    content: str
    summary: Summary

    def text(self, ranks: Sequence[Summary]) -> str:
        """The text of the seal file. It seals itself."""
        text = f'{self.content},"ranks":{_compact(ranks)}}}'
        return json.dumps({"seal": text, "checksum": digest_of(text.encode())})


class SealForm:
    """What the seals of all saves of a state have in common."""

    def __init__(
        self,
        leaves: Mapping[str, tuple[tuple[int, ...], str, tuple[int, ...]]],
        chunks: Sequence[tuple[str, Chunk, int]],
    ) -> None:
        """
        Args:
            leaves: as in a `Seal`.
            chunks: leaf name, position and bytes of each.
        """
        by_leaf: dict[str, list[int]] = {name: [] for name in leaves}
        for position, (name, _, _) in enumerate(chunks):
            by_leaf[name].append(position)
        told = ",".join(
            f"{_literal(name)}:{{{','.join(_told(*chunks[p][1:]) for p in positions)}}}"
            for name, positions in by_leaf.items()
        )
        self._order = [position for positions in by_leaf.values() for position in positions]
        self._chunks = f'"leaves":{_literal(leaves)},"chunks":{{{told}}}'
        ordered = sorted(range(len(chunks)), key=lambda position: chunks[position][:2])
        self._sorted = ordered
        which = json.dumps([chunks[position][:2] for position in ordered])
        self._which = _short(which)
        self._what = ",".join(f"{_literal(chunks[p][:2])}%s" for p in ordered)

    @classmethod
    def of(cls, plan: WritePlan) -> Self:
        """For what is written by a plan."""
        return cls(plan.leaves, [(c.name, c.chunk, c.sealed_bytes) for c in plan.chunks])

    def seal(
        self,
        checksums: Sequence[str],
        *,
        step: int,
        save_id: str,
        files: Mapping[str, tuple[int, str | None]],
    ) -> OpenSeal:
        """The seal of a share that was just written.

        Args:
            checksums: of the chunks, in their order.
            step: the step.
            save_id: of the save.
            files: as in a `Seal`; see `sealed_files`.
        """
        head = {"format": FORMAT_VERSION, "algorithm": ALGORITHM, "step": step, "save_id": save_id}
        chunks = self._chunks % tuple([checksums[position] for position in self._order])
        what = self._what % tuple([checksums[position] for position in self._sorted])
        return OpenSeal(
            content=f'{_compact(head)[:-1]},{chunks},"files":{_compact(files)}',
            summary=(self._which, _short(what)),
        )


def sealed_files(share: Path) -> dict[str, tuple[int, str | None]]:
    """Bytes of every file of a share, and the checksum of those that are not data; by path."""
    return {name: _sealed_file(share, name) for name in sorted(_files(share))}


def _files(share: Path) -> Iterator[str]:
    for path in share.rglob("*"):
        if path.is_file():
            yield path.relative_to(share).as_posix()


def _sealed_file(share: Path, name: str) -> tuple[int, str | None]:
    folders = PurePosixPath(name).parts[:-1]
    if any(part == DATA_FOLDER or part.startswith(_PROCESS_FOLDER) for part in folders):
        return (share / name).stat().st_size, None
    content = (share / name).read_bytes()
    return len(content), digest_of(content)


def _told(chunk: Chunk, size_bytes: int) -> str:
    return f'"{"/".join(map(str, chunk))}":[{size_bytes},"%s"]'


def _short(text: str) -> str:
    return digest_of(text.encode())[:_SUMMARY_DIGITS]


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _literal(value: Any) -> str:
    """JSON that is part of a text which checksums are put into."""
    return _compact(value).replace("%", "%%")
