"""The leaves of a snapshot, as Orbax is told of them: their types, but not their data.

Orbax's own handlers write each array for itself and let a merge follow, which takes most of the
time of a save to memory. So Orbax writes what tells the tree, and `_shares.writing` the arrays.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from orbax.checkpoint._src.metadata import sharding as sharding_metadata
from orbax.checkpoint._src.serialization import type_handler_registry, type_handlers

from mtcheckpoint._host_array import HostArray

__all__ = ["registry", "shardings_to_json"]


class _WrittenByUs:
    """Of a type handler: Orbax is told of the leaf, and asked to write nothing."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Sequence[Any]:
        return []


class _Array(_WrittenByUs, type_handlers.ArrayHandler):  # type: ignore[misc]
    pass


class _Numpy(_WrittenByUs, type_handlers.NumpyHandler):  # type: ignore[misc]
    pass


class _Scalar(_WrittenByUs, type_handlers.ScalarHandler):  # type: ignore[misc]
    pass


class _String(type_handlers.StringHandler):  # type: ignore[misc]
    """Writes strings on every process: Orbax's writes them on process 0 only."""

    async def _background_serialize(self, values: Sequence[str], infos: Sequence[Any]) -> None:
        transaction = ts.Transaction()
        for info, value in zip(infos, values, strict=True):
            await info.await_path_creation()
            store = await ts.open(self._get_json_tspec(info), open=True, context=self._ts_context)
            await store.with_transaction(transaction).write(value)
        await transaction.commit_async()


def registry() -> Any:
    """Orbax's registry of the types of leaves."""
    scalars = _Scalar()
    return type_handler_registry.create_type_handler_registry(
        (HostArray, _Array(primary_host=None, replica_id=None)),
        (np.ndarray, _Numpy()),
        (int, scalars),
        (float, scalars),
        (complex, scalars),
        (str, _String()),
    )


def shardings_to_json(shardings: dict[str, jax.sharding.Sharding]) -> str:
    """The text of Orbax's file of shardings, by leaf name."""
    told: dict[jax.sharding.Sharding, str] = {}
    found = {}
    for name, sharding in shardings.items():
        if sharding not in told:
            told[sharding] = sharding_metadata.from_jax_sharding(sharding).to_serialized_string()
        found[base64.b64encode(name.encode()).decode()] = told[sharding]
    return json.dumps(found, separators=(",", ":"))
