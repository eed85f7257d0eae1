"""Extras of the run that saved, spread over the processes of the run that restored. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["spread_extras"]

Extra = Mapping[str, Any]


def spread_extras(
    extras: Sequence[Extra],
    processes: int,
    *,
    split: Callable[[Extra, int], Sequence[Extra]] | None = None,
    merge: Callable[[Sequence[Extra]], Extra] | None = None,
) -> tuple[Extra, ...]:
    """One mapping for each process of this run, made of those of the run that saved.

    For as many processes they stay as they are, and equal ones are for everybody. What lies between
    only the caller can tell: the position of a data iterator, say, is cut or joined by `split` or
    `merge`. Otherwise it is refused; nothing is dropped or invented.

    Args:
        extras: of every process of the run that saved, in rank order: `RestoredState.extras`.
        processes: the number of processes now.
        split: makes so many mappings of one, in rank order, when there are a multiple of the old
            processes now.
        merge: makes one mapping of several neighbours when the old ones are a multiple of those
            that there are now.

    Raises:
        ValueError: they cannot be spread: the message says over which counts they could be.

    Example:
        Two processes read a file in turns, and one goes on alone:

        >>> def slowest(several):
        ...     return {"offset": min(extra["offset"] for extra in several)}
        >>> spread_extras([{"offset": 7}, {"offset": 8}], 1, merge=slowest)
        ({'offset': 7},)
    """
    old = len(extras)
    if processes < 1:
        raise ValueError(f"processes should be at least 1, found {processes}")
    if not old:
        raise ValueError("there are no extras to spread: the save had none")
    if old == processes:
        return tuple(extras)
    if all(extra == extras[0] for extra in extras):
        return (extras[0],) * processes
    if processes % old == 0 and split is not None:
        return tuple(part for extra in extras for part in _split(extra, processes // old, split))
    if old % processes == 0 and merge is not None:
        size = old // processes
        return tuple(merge(tuple(extras[at : at + size])) for at in range(0, old, size))
    raise ValueError(
        f"the extras of {old} processes differ and cannot be spread over {processes}:"
        f" {_remedy(old, processes)}"
    )


def _split(
    extra: Extra, parts: int, split: Callable[[Extra, int], Sequence[Extra]]
) -> Sequence[Extra]:
    made = split(extra, parts)
    if len(made) != parts:
        raise ValueError(f"split should make {parts} mappings of one, and made {len(made)}")
    return made


def _remedy(old: int, processes: int) -> str:
    if processes % old == 0:
        return "give split= to cut each of them"
    if old % processes == 0:
        return "give merge= to join neighbours"
    return (
        "neither count is a multiple of the other. Use RestoredState.extras, which has all of them,"
        f" or a multiple or a divisor of {old} processes"
    )
