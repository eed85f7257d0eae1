"""An array as a snapshot holds it: the parts that this process has, in host memory."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mtcheckpoint._restore import Box, box_shape

__all__ = ["ArrayForm", "HostArray"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArrayForm:
    """What stays the same of an array from one save to the next.

    Attributes:
        shape: of the whole array, in elements.
        dtype: of its elements.
        sharding: how the whole array lies on the devices; None when it is in host memory.
        boxes: each distinct part that this process holds, once.
        nbytes: bytes that this process holds.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: jax.sharding.Sharding | None
    boxes: tuple[Box, ...]
    nbytes: int = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        elements = sum(math.prod(box_shape(box)) for box in self.boxes)
        object.__setattr__(self, "nbytes", elements * self.dtype.itemsize)

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The extent of one part; all have the same."""
        return box_shape(self.boxes[0])


@functools.lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayForm:
    """Of an array that this process holds whole."""
    box = tuple((0, size) for size in shape)
    return ArrayForm(shape=shape, dtype=dtype, sharding=None, boxes=(box,))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HostArray:
    """This process's part of a global array.

    Attributes:
        form: of the array.
        pieces: for each box of the form a view of host memory that nobody writes to, or an array
            on its way there.
    """

    form: ArrayForm
    pieces: Sequence[np.ndarray[Any, Any] | jax.Array]

    @classmethod
    def of(cls, value: Any) -> HostArray:
        """A numpy array or a number, which this process holds whole."""
        whole = np.asarray(value)
        whole = whole.astype(whole.dtype.newbyteorder("="), copy=False)
        return cls(_whole(whole.shape, whole.dtype), (whole,))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array, in elements."""
        return self.form.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its elements."""
        return self.form.dtype

    @property
    def sharding(self) -> jax.sharding.Sharding | None:
        """How the whole array lay on the devices."""
        return self.form.sharding

    @property
    def nbytes(self) -> int:
        """Bytes that this process holds."""
        return self.form.nbytes

    def parts(self) -> list[np.ndarray[Any, Any]]:
        """The pieces as numpy arrays; waits until they have arrived."""
        return [np.asarray(piece) for piece in self.pieces]
