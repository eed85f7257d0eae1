"""Puts off the garbage collector where many objects are made that all stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collection_put_off"]


@contextlib.contextmanager
def collection_put_off() -> Iterator[None]:
    """Collects nothing meanwhile, on any thread, and leaves the setting as it was.

    For code that makes some objects for every leaf. The collector looks through all objects, JAX's
    included, whenever there are a quarter more than at its last look: at 20,000 leaves a third of a
    restore, and nothing is ever found. What is freed by the count of its references is freed here
    too.

    Only where all waiting has a limit: nobody knows how much garbage other threads make meanwhile.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
