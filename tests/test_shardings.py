"""How leaves lie on a mesh: told once per mesh, and read back as Orbax tells it."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtcheckpoint._shares.layout import Layout
from mtcheckpoint._shares.shardings import shardings_from_json, shardings_to_json


def test_a_description_comes_back() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))

    def placed(*spec: object) -> jax.Array:
        return jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, PartitionSpec(*spec)))

    tree = {
        "both": placed(("data", "model")),
        "same": placed(("data", "model")),
        "second": placed(None, "model"),
        "host": np.zeros(3),
        "number": 1,
    }
    found = shardings_from_json(json.loads(shardings_to_json(tree)))
    assert sorted(found) == ["both", "same", "second"]
    assert found["both"]["partition_spec"] == [["data", "model"]]
    assert found["second"]["partition_spec"] == [None, ["model"]]
    assert found["both"] is found["same"], "leaves that lie alike share one description"
    layout = Layout([[d.id for d in jax.devices()[:4]], [d.id for d in jax.devices()[4:]]], [0, 1])
    assert layout.ranks_of(found["both"], (3, 0)) == {0}
    assert layout.ranks_of(found["both"], (4, 0)) == {1}
    assert layout.ranks_of(found["second"], (0, 2)) == {0, 1}


def test_devices_are_told_once_however_many_leaves_there_are() -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    one = jax.device_put(jnp.zeros(8), NamedSharding(mesh, PartitionSpec("x")))
    few = len(shardings_to_json({"0": one}))
    many = len(shardings_to_json({str(i): one for i in range(1000)}))
    assert many < few + 1000 * 20


@pytest.mark.parametrize(
    "content",
    [{"leaves": {"a": [0, []]}, "meshes": []}, {"leaves": {"a": 1}, "meshes": []}, {"leaves": []}],
)
def test_nonsense_is_refused(content: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, IndexError, AttributeError)):
        shardings_from_json(content)
