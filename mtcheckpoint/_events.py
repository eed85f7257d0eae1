"""What happened: one line in the log, and a duration for whoever listens to `jax.monitoring`."""

from __future__ import annotations

import logging
from typing import Any

import jax.monitoring

__all__ = ["happened"]

_LOG = logging.getLogger("mtcheckpoint")


def happened(
    event: str, *, level: int = logging.INFO, seconds: float | None = None, **fields: Any
) -> None:
    """Says that `event` happened.

    Args:
        event: a name with slashes, such as ``"save/committed"``. Monitoring gets it below
            ``/mtcheckpoint/``.
        level: of the log line.
        seconds: how long it took; recorded with `jax.monitoring` when given.
        fields: what else there is to say. Never a token, nor a spec that may hold one.
    """
    if seconds is not None:
        fields["seconds"] = round(seconds, 4)
        jax.monitoring.record_event_duration_secs(f"/mtcheckpoint/{event}", seconds)
    _LOG.log(level, "%s%s", event, "".join(f" {name}={value}" for name, value in fields.items()))
