"""Which ranks' shares hold a chunk, and which of them to open, against the shardings of JAX."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtcheckpoint._shares.layout import Layout, ranks_to_open

# Eight devices of four ranks, which have two each.
DEVICES = [[0, 1], [2, 3], [4, 5], [6, 7]]
NAMES = ("data", "fsdp", "tensor")
SHAPE = (8, 8)


def described(order: np.ndarray, spec: tuple[Any, ...]) -> dict[str, Any]:
    """A sharding in Orbax's words."""

    def named(part: Any) -> Any:
        return {"id": int(part)} if np.ndim(part) == 0 else [named(p) for p in part]

    return {
        "sharding_type": "NamedSharding",
        "shape": list(order.shape),
        "axis_names": list(NAMES),
        "partition_spec": [list(part) if isinstance(part, tuple) else part for part in spec],
        "device_mesh": {"mesh": named(order)},
    }


@pytest.mark.parametrize(
    "spec",
    [
        (),
        ("data",),
        (None, "tensor"),
        ("fsdp", "data"),
        (("data", "fsdp"), "tensor"),
        (("tensor", "data"), None),
        (("tensor", "fsdp", "data"),),
    ],
)
@pytest.mark.parametrize("permuted", [False, True])
def test_ranks_are_those_whose_devices_have_the_chunk(
    spec: tuple[Any, ...], permuted: bool
) -> None:
    order = np.arange(8)
    if permuted:
        order = np.random.default_rng(1).permutation(order)
    order = order.reshape(2, 2, 2)
    devices = np.array(jax.devices())[order]
    sharding = NamedSharding(Mesh(devices, NAMES), PartitionSpec(*spec))
    chunk_shape = sharding.shard_shape(SHAPE)
    expected: dict[tuple[int, ...], set[int]] = {}
    for device, index in sharding.devices_indices_map(SHAPE).items():
        starts = [part.indices(size)[0] for part, size in zip(index, SHAPE, strict=True)]
        chunk = tuple(at // size for at, size in zip(starts, chunk_shape, strict=True))
        expected.setdefault(chunk, set()).add(device.id // 2)

    layout = Layout(DEVICES, ranks=range(4))
    saved = described(order, spec)

    assert {chunk: set(layout.ranks_of(saved, chunk)) for chunk in expected} == expected


@pytest.mark.parametrize("sharding", [None, {"sharding_type": "SingleDeviceSharding"}])
def test_what_is_not_described_may_be_anywhere(sharding: Any) -> None:
    layout = Layout(DEVICES, ranks=range(4))
    assert layout.ranks_of(sharding, (0,)) == frozenset(range(4))


def test_few_shares_are_opened_and_only_closed_ones() -> None:
    layout = Layout(DEVICES, ranks=range(4))
    by_rows = described(np.arange(8).reshape(2, 2, 2), (("data", "fsdp"), None))
    everywhere = described(np.arange(8).reshape(2, 2, 2), ())

    def opened(missing: Any, closed: set[int], turn: int = 0) -> set[int]:
        return ranks_to_open(missing, layout, closed=frozenset(closed), turn=turn)

    assert opened([(by_rows, [(1, 0), (3, 0)]), (everywhere, [(0, 0)])], {0, 1, 2, 3}) == {1, 3}
    assert opened([(by_rows, [(1, 0), (3, 0)])], {0, 1, 2}) == {1}
    assert opened([(by_rows, [(1, 0)])], {0, 2}) == set()
    assert opened([], {0, 1}) == set()
    # Equal ones in turns.
    assert [opened([(everywhere, [(0, 0)])], {1, 2, 3}, t) for t in range(3)] == [{1}, {2}, {3}]
