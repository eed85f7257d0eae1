"""How the leaves of a save lie on its meshes, each mesh told once.

Orbax tells the devices of the whole job again for every leaf: at 32,768 devices and 2,000 leaves
nearly a gigabyte in every share. So it is asked to tell them on small jobs only, for its own
manager's sake, and our shares have this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jax.sharding import NamedSharding

from mtcheckpoint._shares.identity import OWN_FOLDER
from mtcheckpoint._trees import flatten_named

__all__ = ["ORBAX_DEVICE_LIMIT", "SHARDINGS_FILE", "shardings_from_json", "shardings_to_json"]

SHARDINGS_FILE = f"{OWN_FOLDER}/shardings.json"

# Jobs of more devices are spared Orbax's own description.
ORBAX_DEVICE_LIMIT = 256


def shardings_to_json(tree: Any) -> str:
    """The text of the file, for a snapshot."""
    meshes: list[dict[str, Any]] = []
    positions: dict[Any, int] = {}
    leaves: dict[str, list[Any]] = {}
    for name, leaf in flatten_named(tree)[0].items():
        if not isinstance(getattr(leaf, "sharding", None), NamedSharding):
            continue
        mesh = leaf.sharding.mesh
        if mesh not in positions:
            positions[mesh] = len(meshes)
            meshes.append(
                {
                    "axis_names": list(mesh.axis_names),
                    "shape": list(mesh.devices.shape),
                    "device_ids": [int(device.id) for device in mesh.devices.flat],
                }
            )
        spec = [_axes(part) for part in leaf.sharding.spec]
        leaves[name] = [positions[mesh], spec]
    return json.dumps({"meshes": meshes, "leaves": leaves}, separators=(",", ":"))


def _axes(part: Any) -> list[str]:
    if part is None:
        return []
    return [part] if isinstance(part, str) else list(part)


def shardings_from_json(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The sharding of each leaf, in the words of Orbax's own description.

    Leaves that lie alike share one description.

    Raises:
        KeyError, TypeError, ValueError, IndexError: the content is not what we write.
    """
    described: dict[str, Mapping[str, Any]] = {}
    found: dict[str, Mapping[str, Any]] = {}
    for name, told in content["leaves"].items():
        key = repr(told)
        if key not in described:
            position, spec = told
            mesh = content["meshes"][position]
            described[key] = {
                "sharding_type": "NamedSharding",
                "axis_names": mesh["axis_names"],
                "shape": mesh["shape"],
                "partition_spec": [axes or None for axes in spec],
                "device_mesh": {"mesh": mesh["device_ids"]},
            }
        found[name] = described[key]
    return found
