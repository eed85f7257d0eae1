"""Saves of any topology, made without one: numpy arrays in shares laid out as Orbax does."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from mtcheckpoint._shares.identity import EXTRAS_FILE, IDENTITY_FILE, Identity, identity_to_json
from mtcheckpoint._shares.seal import SEAL_FILE, digest_of
from mtcheckpoint._shares.sealing import SealForm, sealed_files

Spec = tuple[tuple[str, ...], ...]  # mesh axes of each dimension


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticSave:
    """What was saved and where.

    Attributes:
        values: whole arrays by leaf name; dots separate dictionary keys.
        specs: how each is laid over the mesh.
        mesh: sizes of the mesh axes, in order.
        ranks: how many processes; the devices of the mesh are dealt out to them in order.
    """

    values: Mapping[str, np.ndarray]
    specs: Mapping[str, Spec]
    mesh: Mapping[str, int]
    ranks: int
    job: str = "train-a"
    step: int = 5
    save_id: str = "0" * 32

    @property
    def devices_of_rank(self) -> list[list[int]]:
        count = int(np.prod(list(self.mesh.values()))) // self.ranks
        return [list(range(rank * count, (rank + 1) * count)) for rank in range(self.ranks)]

    def chunk_shape(self, name: str) -> tuple[int, ...]:
        value, spec = self.values[name], self.specs[name]
        parts = [int(np.prod([self.mesh[axis] for axis in axes])) for axes in spec]
        return tuple(size // part for size, part in zip(value.shape, parts, strict=True))

    def holders(self, name: str) -> dict[tuple[int, ...], set[int]]:
        """The ranks that hold each chunk, by walking over all devices of the mesh."""
        found: dict[tuple[int, ...], set[int]] = {}
        per_rank = len(self.devices_of_rank[0])
        axes = list(self.mesh)
        places = itertools.product(*(range(size) for size in self.mesh.values()))
        for device, place in enumerate(places):
            at = dict(zip(axes, place, strict=True))
            chunk = tuple(self._position(dimension, at) for dimension in self.specs[name])
            found.setdefault(chunk, set()).add(device // per_rank)
        return found

    def _position(self, axes: Sequence[str], at: Mapping[str, int]) -> int:
        position = 0
        for axis in axes:
            position = position * self.mesh[axis] + at[axis]
        return position

    def write(self, folder: Path) -> list[Path]:
        """Writes one share for each rank; returns their folders in rank order."""
        shares = []
        for rank in range(self.ranks):
            share = folder / str(rank)
            (share / "state").mkdir(parents=True)
            (share / "mtcheckpoint").mkdir()
            (share / "process_metadata").mkdir()
            self._write_arrays(share, rank)
            self._write_metadata(share, rank)
            self._write_seal(share, rank)
            shares.append(share)
        return shares

    def _write_arrays(self, share: Path, rank: int) -> None:
        writes = []
        for name, value in self.values.items():
            store = ts.open(self._spec(share, name)).result()
            for chunk, ranks in self.holders(name).items():
                if rank in ranks:
                    box = tuple(
                        slice(index * size, (index + 1) * size)
                        for index, size in zip(chunk, self.chunk_shape(name), strict=True)
                    )
                    writes.append(store[box].write(value[box]) if box else store.write(value))
        for write in writes:
            write.result()

    def _spec(self, share: Path, name: str) -> dict[str, Any]:
        value, chunk = self.values[name], list(self.chunk_shape(name))
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        sharding = {
            "chunk_shape": chunk,
            "codecs": [little],
            "index_codecs": [little, {"name": "crc32c"}],
        }
        return {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                "base": f"file://{share / 'state'}/",
                "path": f"{name}/",
            },
            "create": True,
            "store_data_equal_to_fill_value": True,
            "metadata": {
                "shape": list(value.shape),
                "data_type": value.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
                "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            },
        }

    def _write_metadata(self, share: Path, rank: int) -> None:
        identity = Identity(
            job=self.job,
            step=self.step,
            save_id=self.save_id,
            node_rank=rank,
            nodes=self.ranks,
        )
        (share / IDENTITY_FILE).write_text(identity_to_json(identity))
        (share / EXTRAS_FILE).write_text(json.dumps([{"rank": r} for r in range(self.ranks)]))
        (share / "process_metadata" / "global_process_metadata.json").write_text(
            json.dumps(self.devices_of_rank)
        )
        (share / "state" / "_METADATA").write_text(json.dumps({"tree_metadata": self._tree()}))
        (share / "state" / "_sharding").write_text(json.dumps(dict(self._shardings())))

    def _write_seal(self, share: Path, rank: int) -> None:
        leaves = {
            name: (value.shape, value.dtype.name, self.chunk_shape(name))
            for name, value in self.values.items()
        }
        sealed = [(name, *one) for name in self.values for one in self._sealed(name, rank)]
        form = SealForm(leaves, [(name, chunk, size) for name, chunk, size, _ in sealed])
        seal = form.seal(
            [checksum for *_, checksum in sealed],
            step=self.step,
            save_id=self.save_id,
            files=sealed_files(share),
        )
        (share / SEAL_FILE).write_text(seal.text(()))

    def _sealed(self, name: str, rank: int) -> Iterator[tuple[tuple[int, ...], int, str]]:
        for chunk, ranks in self.holders(name).items():
            if rank in ranks:
                shape = self.chunk_shape(name)
                part = self.values[name][
                    tuple(slice(i * n, (i + 1) * n) for i, n in zip(chunk, shape, strict=True))
                ]
                yield chunk, part.nbytes, digest_of(part)

    def _tree(self) -> dict[str, Any]:
        return {
            str(tuple(name.split("."))): {
                "key_metadata": [{"key": key, "key_type": 2} for key in name.split(".")],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
            }
            for name in self.values
        }

    def _shardings(self) -> Iterator[tuple[str, str]]:
        shape = list(self.mesh.values())
        ids = np.arange(int(np.prod(shape))).reshape(shape)
        mesh = json.loads(json.dumps(ids.tolist()), parse_int=lambda text: {"id": int(text)})
        for name, spec in self.specs.items():
            described = {
                "sharding_type": "NamedSharding",
                "shape": shape,
                "axis_names": list(self.mesh),
                "partition_spec": [list(axes) or None for axes in spec],
                "device_mesh": {"mesh": mesh},
            }
            yield base64.b64encode(name.encode()).decode(), json.dumps(described)
