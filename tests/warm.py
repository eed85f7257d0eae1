"""What most processes of the tests import: they are forked with it, see `preload`."""

from __future__ import annotations

from mtcheckpoint.testing import preload

MODULES = (
    *("jax", "optax", "pytest", "gcsfs", "aiohttp"),
    *("mtcheckpoint", "mtcheckpoint.manager", "mtcheckpoint.testing"),
)


def start_warm() -> None:
    """Call before the first group of processes, and after the environment is as it shall be."""
    preload(*MODULES)
