"""An array as a snapshot holds it: the parts that this process has, in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mtcheckpoint._restore import Box, box_shape

__all__ = ["HostArray"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HostArray:
    """This process's part of a global array.

    Attributes:
        shape: of the whole array, in elements.
        dtype: of its elements.
        sharding: how the whole array lay on the devices; None when it was in host memory.
        pieces: each distinct part that this process holds, once: a view of host memory that
            nobody writes to, or an array on its way there.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: jax.sharding.Sharding | None
    pieces: Mapping[Box, np.ndarray[Any, Any] | jax.Array]

    @classmethod
    def of(cls, value: Any) -> HostArray:
        """A numpy array or a number, which this process holds whole."""
        whole = np.asarray(value)
        whole = whole.astype(whole.dtype.newbyteorder("="), copy=False)
        box = tuple((0, size) for size in whole.shape)
        return cls(shape=whole.shape, dtype=whole.dtype, sharding=None, pieces={box: whole})

    @property
    def nbytes(self) -> int:
        """Bytes that this process holds."""
        return sum(piece.nbytes for piece in self.pieces.values())

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The extent of one piece; all have the same."""
        return box_shape(next(iter(self.pieces)))

    def parts(self) -> dict[Box, np.ndarray[Any, Any]]:
        """The pieces as numpy arrays; waits until they have arrived."""
        return {box: np.asarray(piece) for box, piece in self.pieces.items()}
