"""Times of several processes: taken in each of them, put together by the one that started them."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.results import Pair, Result, compared

__all__ = [
    "Told",
    "clocked",
    "cpu_seconds",
    "warm_bytes",
    "pairs_of",
    "result_of",
    "slowest",
    "warm_memory",
]

Told = Sequence[dict[str, list[dict[str, float]]]]
"""What each process tells: of each side that it took part in, the seconds of its rounds."""


def warm_bytes(size_bytes: int, processes: int = 2) -> int:
    """What one of these processes takes of a state, and a quarter more."""
    return size_bytes // processes * 5 // 4


def warm_memory(size_bytes: int) -> None:
    """Takes so much memory and gives it back, so that both sides of a pair find the same.

    A virtual machine takes from its host what it has not used for a while page by page, at several
    times the cost of clearing it: whoever came first after a pause would pay for both.
    """
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        # The pages of both sizes come out of the large ones that this frees.
        memory.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, size_bytes, mmap.PAGESIZE):
            memory[page] = 1


def clocked(action: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Seconds and CPU seconds of this process for `action`, and what that returns."""
    cpu, begun = time.process_time(), time.perf_counter()
    result = action()
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "cpu_seconds": time.process_time() - cpu}, result


def slowest(told: Told, side: str, what: str = "seconds") -> list[float]:
    """Of each round the slowest process: a job goes on when that does."""
    return [max(process[what] for process in found) for found in _rounds(told, side)]


def cpu_seconds(told: Told, side: str) -> float:
    """CPU seconds of all processes in a round: the median."""
    return statistics.median(
        sum(process["cpu_seconds"] for process in found) for found in _rounds(told, side)
    )


def _rounds(told: Told, side: str) -> list[tuple[dict[str, float], ...]]:
    """What the processes of one side tell, round by round."""
    return list(zip(*(process[side] for process in told if side in process), strict=True))


def pairs_of(told: Told, ours: str, other: str, what: str = "seconds") -> list[Pair]:
    """The rounds of two sides; the first one is left out: it warms up."""
    both = zip(slowest(told, ours, what), slowest(told, other, what), strict=True)
    return [Pair(*found) for found in both][1:]


def result_of(
    case: str, told: Told, other: str, notes: str, *, ours: str = "ours", what: str = "seconds"
) -> Result:
    """The result of a case, with the CPU seconds of both sides in its notes."""
    return compared(
        case,
        pairs_of(told, ours, other, what),
        f"{notes}; CPU seconds in all processes: ours {cpu_seconds(told, ours):.2f}, other"
        f" {cpu_seconds(told, other):.2f}",
    )
