"""How the benchmarks measure, and the form of what they say."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any

__all__ = [
    "NotInstalledError",
    "Pair",
    "Result",
    "Settings",
    "compared",
    "machine",
    "memory_bytes",
    "times_of",
]

_PACKAGES = ("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy", "mtcheckpoint")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is measured.

    Attributes:
        size_mib: MiB of the whole state.
        pairs: alternating pairs of ours and the other's.
    """

    size_mib: int = 1024
    pairs: int = 5

    @property
    def size_bytes(self) -> int:
        return self.size_mib * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One case.

    Attributes:
        case: its name.
        ratio: the other's over ours: above 1, ours is faster or smaller. Of ``scale_*`` and
            ``memory_*`` how many times the other ours is: there, less is better.
        ours: median of ours, in `unit`.
        other: median of what it is compared with.
        unit: ``"s"``, ``"B"`` for bytes, or ``"steps"``.
        spread: lowest and highest ratio of a pair.
        notes: what was compared, and what else was seen.
        data: what a plot needs besides, if there is one.
    """

    case: str
    ratio: float
    ours: float
    other: float
    unit: str
    spread: tuple[float, float]
    notes: str
    data: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        return found if self.data is not None else {k: v for k, v in found.items() if k != "data"}


class NotInstalledError(Exception):
    """A case cannot run without a package that is not part of this library; says which."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Ours and the other's, measured one after the other."""

    ours: float
    other: float


def compared(case: str, pairs: Sequence[Pair], notes: str, *, unit: str = "s") -> Result:
    """The result of a case: the median of the pairs' ratios, and medians of both sides."""
    ratios = [pair.other / pair.ours for pair in pairs]
    return Result(
        case=case,
        ratio=statistics.median(ratios),
        ours=statistics.median(pair.ours for pair in pairs),
        other=statistics.median(pair.other for pair in pairs),
        unit=unit,
        spread=(min(ratios), max(ratios)),
        notes=notes,
    )


def times_of(case: str, pairs: Sequence[Pair], notes: str, *, unit: str = "s") -> Result:
    """The result of a case in which ours is some times the other, and should be few times."""
    turned = compared(case, [Pair(pair.other, pair.ours) for pair in pairs], notes, unit=unit)
    return dataclasses.replace(turned, ours=turned.other, other=turned.ours)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def memory_bytes(name: str) -> int:
    """Resident memory of this process: ``VmRSS`` now, ``VmHWM`` at its peak.

    Not by getrusage, whose peak is also that of the program that started this one.
    """
    with open("/proc/self/status", encoding="utf-8") as file:
        values = dict(line.split(":", 1) for line in file)
    return int(values[name].split()[0]) * 1024


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


Case = Callable[[Settings], Result]
