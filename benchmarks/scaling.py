"""How time grows with leaves, bytes and processes. The larger of what a save and a restore take."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks import scaling_jobs as jobs
from benchmarks import timing
from benchmarks.results import Case, Pair, Result, Settings, times_of
from mtcheckpoint.testing import ProcessGroup, ram_disk, run_processes

__all__ = ["CASES"]

_DEVICES = 8
_LIMIT_SECONDS = 1800.0
_LEAVES = 20_000
_LEAST_LEAF_BYTES = 12_800


def scale_leaves(settings: Settings) -> Result:
    """Ten times as many leaves, of as many bytes in all."""
    leaves = max(min(_LEAVES, settings.size_bytes // _LEAST_LEAF_BYTES), 10)
    told = _both(settings, [[settings.size_bytes, leaves // 10], [settings.size_bytes, leaves]])
    return _result(
        "scale_leaves",
        told,
        f"{leaves} leaves against {leaves // 10}, both {settings.size_mib} MiB",
    )


def scale_bytes(settings: Settings) -> Result:
    """Ten times as many bytes, in as many leaves."""
    told = _both(settings, [[settings.size_bytes // 10, 0], [settings.size_bytes, 0]])
    return _result(
        "scale_bytes", told, f"{settings.size_mib} MiB against a tenth of that, both 193 leaves"
    )


def scale_processes(settings: Settings) -> Result:
    """Four times as many processes, on as many devices and for as many bytes in all."""
    counts = [2, 8]
    with ram_disk("mtcheckpoint-bench-") as root:
        groups = [
            ProcessGroup(
                jobs.one_size,
                count,
                devices=_DEVICES // count,
                args=[str(root), name, settings.size_bytes, settings.pairs, group, counts],
            )
            for group, (name, count) in enumerate(zip(("small", "large"), counts, strict=True))
        ]
        with groups[0], groups[1]:
            small, large = (group.wait(_LIMIT_SECONDS) for group in groups)
    return _result(
        "scale_processes",
        [*small, *large],
        f"8 processes of 1 device against 2 of 4, {settings.size_mib} MiB in all of either",
    )


CASES: dict[str, Case] = {
    "scale_leaves": scale_leaves,
    "scale_bytes": scale_bytes,
    "scale_processes": scale_processes,
}


def _both(settings: Settings, sizes: Sequence[Sequence[int]]) -> timing.Told:
    """Both sizes in turns, in the same processes."""
    with ram_disk("mtcheckpoint-bench-") as root:
        return run_processes(
            jobs.two_sizes,
            2,
            devices=_DEVICES // 4,
            args=[str(root), list(sizes), settings.pairs],
            timeout_secs=_LIMIT_SECONDS,
        )


def _result(case: str, told: timing.Told, notes: str) -> Result:
    grown = {what: timing.pairs_of(told, f"large {what}", f"small {what}") for what in jobs.ACTIONS}
    worst = max(grown, key=lambda what: _times(grown[what]))
    each = ", ".join(
        f"{what} {_times(pairs):.2f} (CPU seconds in all processes"
        f" {timing.cpu_seconds(told, f'large {what}'):.2f} and"
        f" {timing.cpu_seconds(told, f'small {what}'):.2f})"
        for what, pairs in grown.items()
    )
    return times_of(
        case, grown[worst], f"{notes}; ours, other: of the {worst}, large and small; times: {each}"
    )


def _times(pairs: Sequence[Pair]) -> float:
    return statistics.median(pair.ours / pair.other for pair in pairs)
