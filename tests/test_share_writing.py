"""What a save writes is read by TensorStore as it was in memory, for every shape and type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import xxhash

from mtcheckpoint._host_array import ArrayForm, HostArray
from mtcheckpoint._ocdbt_index import Stored
from mtcheckpoint._shares import ocdbt, write_plan, writing
from mtcheckpoint._shares.ocdbt import MANIFEST_FILE, index_of
from mtcheckpoint._shares.write_plan import plan_writes
from mtcheckpoint._shares.writing import WrittenArrays, write_arrays
from mtcheckpoint._snapshot import _is_storable

TYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16"),
    *("float32", "float64", "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "int4", "int2", "float8_e3m4"),
    *("float4_e2m1fn", "float8_e8m0fnu"),
]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def written(folder: Path, arrays: dict[str, HostArray], **options: Any) -> WrittenArrays:
    folder.mkdir()
    forms = {name: array.form for name, array in arrays.items()}
    plan = plan_writes(forms, **{"threads": 1, "file_bytes": 1 << 30, **options})
    return write_arrays(folder, plan, arrays)


def array_in(folder: Path, name: str) -> np.ndarray:
    kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
    return np.asarray(ts.open(spec).result().read().result())


def cut(whole: np.ndarray, parts: tuple[int, ...]) -> HostArray:
    """An array of which this process holds every piece, as many along each axis as told."""
    sizes = [-(-extent // count) for extent, count in zip(whole.shape, parts, strict=True)]
    pieces = {}
    for position in np.ndindex(*parts):
        box = tuple(
            (at * size, min((at + 1) * size, extent))
            for at, size, extent in zip(position, sizes, whole.shape, strict=True)
        )
        pieces[box] = whole[tuple(slice(*ends) for ends in box)]
    form = ArrayForm(shape=whole.shape, dtype=whole.dtype, sharding=None, boxes=tuple(pieces))
    return HostArray(form, list(pieces.values()))


@pytest.mark.parametrize("name", TYPES)
def test_every_element_type_is_stored_as_tensorstore_does(name: str, volume_root: Path) -> None:
    assert _is_storable(dtype_of(name))
    values = np.random.default_rng(1).integers(0, 2, (6, 4)).astype(dtype_of(name))
    found = written(volume_root / "a", {"x": cut(values, (2, 1))})
    read = array_in(volume_root / "a", "x")
    assert (read.dtype, read.tobytes()) == (values.dtype, values.tobytes())
    assert found.chunks["x"][1, 0][1] == xxhash.xxh3_128_hexdigest(values[3:].tobytes())


@hypothesis.given(
    shape=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    data=st.data(),
    limit=st.sampled_from([1, 8, 24, 64, 1 << 20]),
    threads=st.integers(1, 3),
)
@hypothesis.settings(max_examples=150, deadline=None)
def test_any_shape_in_any_pieces(shape: Any, data: Any, limit: int, threads: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_plan, "_CHUNK_BYTES", limit)
        patch.setattr(writing, "_BLOCK_BYTES", 16)
        patch.setattr(write_plan, "_BYTES_PER_THREAD", 16)
        # Pieces of one size, but for the last: XLA has them so.
        parts = tuple(data.draw(st.sampled_from(_ways(extent))) for extent in shape)
        values = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
        from mtcheckpoint.testing import ram_disk

        with ram_disk("mtcheckpoint-writing-") as root:
            arrays = {"b/c": cut(values, parts), "a": HostArray.of(np.float64(3))}
            found = written(root / "x", arrays, threads=threads, file_bytes=50)
            assert np.array_equal(array_in(root / "x", "b/c"), values)
            assert array_in(root / "x", "a") == 3
            _, _, chunk_shape = found.plan.leaves["b/c"]
            for chunk, (size, checksum) in found.chunks["b/c"].items():
                part = values[
                    tuple(
                        slice(i * n, (i + 1) * n) for i, n in zip(chunk, chunk_shape, strict=True)
                    )
                ]
                assert (size, checksum) == (part.nbytes, xxhash.xxh3_128_hexdigest(part.tobytes()))
            assert sum(size for size, _ in found.chunks["b/c"].values()) == values.nbytes


def _ways(extent: int) -> list[int]:
    """In how many pieces an axis can be cut so that none is empty."""
    return [n for n in range(1, extent + 1) if -(-extent // n) * (n - 1) < extent]


def test_chunks_lie_in_one_stretch_and_within_the_limit() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        piece = tuple(int(n) for n in rng.integers(1, 40, rng.integers(0, 5)))
        limit = int(rng.integers(1, 2000))
        shape = write_plan._chunk_shape(piece, 4, limit)
        assert all(size % part == 0 for size, part in zip(piece, shape, strict=True))
        assert np.prod(shape, dtype=int) * 4 <= max(limit, 4)
        view = np.zeros(piece, np.int32)[tuple(slice(n) for n in shape)]
        assert view.flags.c_contiguous


def test_numpy_arrays_of_the_other_byte_order(volume_root: Path) -> None:
    values = np.arange(5, dtype=">f8")
    written(volume_root / "a", {"x": HostArray.of(values)})
    assert np.array_equal(array_in(volume_root / "a", "x"), values)


def test_an_index_of_several_nodes(volume_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocdbt, "_TARGET_NODE_BYTES", 5000)
    (volume_root / "d").mkdir()
    (volume_root / "d" / "data").write_bytes(bytes(range(256)))
    values: dict[str, Any] = {f"leaf{i}/zarr.json": b"%d" % i for i in range(300)}
    values |= {
        f"leaf{i}/c/0": Stored(file="d/data", offset=i % 200, length=i % 50) for i in range(300)
    }
    made = index_of(values, node_file="d/index", database_id="0f" * 16)
    (volume_root / made.node_file).write_bytes(made.nodes)
    (volume_root / MANIFEST_FILE).write_bytes(made.manifest(10**18))
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{volume_root}/"}).result()
    assert sorted(store.list().result()) == sorted(key.encode() for key in values)
    for key, value in values.items():
        expected = (
            value
            if isinstance(value, bytes)
            else bytes(range(256))[value.offset : value.offset + value.length]
        )
        assert store.read(key).result().value == expected
    version = ts.ocdbt.dump(store.base).result()["versions"][0]
    assert version["root_height"] == 1
    assert version["root"]["statistics"] == {
        "num_keys": 600,
        "num_tree_bytes": len(made.nodes),
        "num_indirect_value_bytes": sum(v.length for v in values.values() if isinstance(v, Stored)),
    }


def test_a_folder_that_is_gone_is_an_error_and_is_not_made(volume_root: Path) -> None:
    gone = volume_root / "gone"
    with pytest.raises(FileNotFoundError):
        write_arrays(gone, plan_writes({}, threads=1, file_bytes=1 << 30), {})
    assert not gone.exists()


def test_a_database_without_arrays_is_read_as_empty(volume_root: Path) -> None:
    written(volume_root / "a", {})
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{volume_root / 'a'}/"}).result()
    assert store.list().result() == []
