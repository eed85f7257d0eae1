"""What a restore is asked for, what it tries, and what it says about how it went."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mtcheckpoint._shares.places import LocalPlace, Place, Tier
from mtcheckpoint._target import Cast

__all__ = ["Candidate", "PassedOver", "Request", "RestoreReport", "RestoredState"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PassedOver:
    """A candidate that was not restored.

    Attributes:
        step: its step; None when that is not known.
        source: where it lies.
        reason: what is wrong with it, by process.
        damaged: whether a copy was bad; False for one that is only incomplete.
    """

    step: int | None
    source: str
    reason: str
    damaged: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestoreReport:
    """How a restore went.

    Attributes:
        seconds: by phase, on this process.
        bytes_by_tier: bytes that this process read, by tier.
        passed_over: newer candidates that could not be restored, and why.
        left_out: copies of what was restored that could not be used on this process, and why.
        unverified: shares that were read and have no seal, for Orbax itself wrote them, or because
            ``verify`` is not ``"full"``.
        unequal_replicas: leaves of which several ranks had saved the same part, and not the same
            content, with those ranks; as far as the shares that were read tell, and, for
            data-parallel replicas that hold the same parts, of all.
    """

    seconds: Mapping[str, float]
    bytes_by_tier: Mapping[Tier, int]
    passed_over: tuple[PassedOver, ...]
    left_out: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    unequal_replicas: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestoredState:
    """A state that came back.

    Attributes:
        step: the step it is of.
        state: the tree that was asked for.
        tier: the farthest place that a part of it came from on any process: ``"local"`` memory,
            a ``"peer"``'s, or the ``"backup"``.
        extras: the extras of every process of the run that saved it, in rank order.
        report: how it went.
    """

    step: int
    state: Any
    tier: Tier
    extras: tuple[Mapping[str, Any], ...]
    report: RestoreReport


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A save that may be whole somewhere.

    Attributes:
        step: its step.
        source: where it lies, for people.
        arrived_from: the tier that this process's shares came from before this restore.
        own_rank: the rank whose share this process needs if nothing has changed.
        own: finds the shares in this process's volume, by the rank that wrote them, and holds them
            fast.
        served: whether the processes serve their own shares to each other.
        gone: ranks whose shares are known to be nowhere.
        backup: finds the places of all shares in a backup, by rank; None in memory.
        fault: why this process's share is known to be bad.
    """

    step: int
    source: str
    arrived_from: Tier
    own_rank: int
    own: Callable[[], Mapping[int, LocalPlace]] = dict
    served: bool = False
    gone: tuple[int, ...] = ()
    backup: Callable[[], Mapping[int, Place]] | None = None
    fault: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is wanted.

    Attributes:
        tree: see `_target.resolve_target`.
        partial: leaves of the save that `tree` does not name are left where they are.
        cast: which changes of element types are allowed.
        strict: a bad copy is an error, though there may be others.
    """

    tree: Any
    partial: bool = False
    cast: Cast = "never"
    strict: bool = False
