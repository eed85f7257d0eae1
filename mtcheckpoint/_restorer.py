"""Restores one candidate after another until one is whole, the same one on all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from mtcheckpoint._attempt import Attempt, Means, bad_copy
from mtcheckpoint._garbage import collection_put_off
from mtcheckpoint._restored import Candidate, PassedOver, Request, RestoredState
from mtcheckpoint._shares.places import LocalPlace
from mtcheckpoint.errors import RestoreError

__all__ = ["Restorer"]


class Restorer:
    """Reads candidates. Every method is called on all processes with the same candidate."""

    def __init__(self, means: Means) -> None:
        self._means = means

    def take_bad_paths(self) -> list[Path]:
        """The shares of this node that were found bad since the last call."""
        places = self._means.bad_places
        bad = [p.path for p in places if isinstance(p, LocalPlace) and p.tier == "local"]
        places[:] = [place for place in places if place.tier == "backup"]
        return list(dict.fromkeys(bad))

    def restore(
        self,
        candidates: Iterator[Candidate | PassedOver],
        request: Request,
        seconds: Mapping[str, float],
        what_is_left: Callable[[], str] = lambda: "Nothing was deleted",
    ) -> RestoredState | None:
        """Restores the first candidate that is whole; None when there is no candidate at all.

        Args:
            candidates: in the order in which they are tried.
            request: what is wanted.
            seconds: of the phases before.
            what_is_left: after all were tried in vain, a sentence for the error.

        Raises:
            RestoreError: there were candidates, and none of them is whole; or a copy is bad, and
                the request is strict.
            StructureMismatchError: the request does not fit what was saved.
            TierUnreadableError: a place could not be read, so it is not known what it holds.
        """
        passed_over: list[PassedOver] = []
        for candidate in candidates:
            if isinstance(candidate, PassedOver):
                if request.strict and candidate.damaged:
                    raise bad_copy(candidate.step, candidate.source, candidate.reason)
                passed_over.append(candidate)
                continue
            attempt = Attempt(self._means, candidate, request, dict(seconds))
            with collection_put_off():
                restored = attempt.run(tuple(passed_over))
            if restored is not None:
                return restored
            passed_over.append(attempt.passed_over())
        if passed_over:
            listed = "\n  ".join(f"step {p.step} ({p.source}): {p.reason}" for p in passed_over)
            raise RestoreError(
                f"none of {len(passed_over)} candidates could be restored:\n  {listed}\n"
                f"{what_is_left()}. To start anew, use another run_name or an empty backup_root"
            )
        return None
