"""What a caller wants back, leaf by leaf, checked against what was saved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mtcheckpoint._jax import key_implementation
from mtcheckpoint._restore import Box, box_of
from mtcheckpoint._shares.contents import Leaf, ShareContents
from mtcheckpoint._trees import flatten_named
from mtcheckpoint.errors import StructureMismatchError

__all__ = ["Cast", "Target", "TargetLeaf", "resolve_target"]

# Which changes of element types a caller allows: none, those that lose nothing, all.
Cast = Literal["never", "safe", "lossy"]

_LISTED = 20  # paths in one message


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TargetLeaf:
    """One leaf to bring back.

    Attributes:
        leaf: the saved leaf.
        make: what to make of it.
        dtype: element type in memory; for keys, of the key data.
        sharding: for arrays and keys; of the key data for keys.
        key_implementation: for keys.
        cast_to: the element type asked for, when it is another than the saved one.
    """

    leaf: Leaf
    make: Literal["array", "key", "numpy", "numpy_scalar", "scalar", "string"]
    dtype: np.dtype[Any] | None = None
    sharding: Sharding | None = None
    key_implementation: str | None = None
    cast_to: np.dtype[Any] | None = None

    def boxes(self) -> tuple[Box, ...]:
        """The distinct parts that the devices of this process need; host values need all of it."""
        shape = self.leaf.shape
        if self.make == "string":
            return ()
        if self.sharding is None:
            return (tuple((0, size) for size in shape),)
        placed = self.sharding.addressable_devices_indices_map(shape)
        return tuple(dict.fromkeys(box_of(index, shape) for index in placed.values()))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A whole state to bring back: leaves in order, and how to build the tree of them."""

    leaves: tuple[TargetLeaf, ...]
    structure: Any  # a treedef; None: nested dictionaries and lists, as saved
    empty: Mapping[tuple[str | int, ...], str]

    def build(self, values: list[Any]) -> Any:
        """The tree of these leaves."""
        if self.structure is not None:
            return jax.tree_util.tree_unflatten(self.structure, values)
        paths = {leaf.leaf.path: value for leaf, value in zip(self.leaves, values, strict=True)} | {
            path: _empty(kind) for path, kind in self.empty.items()
        }
        return _nest(paths)


def resolve_target(
    request: Any,
    saved: ShareContents,
    mesh: jax.sharding.Mesh,
    *,
    partial: bool = False,
    cast: Cast = "never",
) -> Target:
    """Matches what is asked for with what was saved.

    Args:
        request: a tree of `jax.ShapeDtypeStruct`, arrays, plain values or `_orbax.LeafRequest`;
            None for everything as it was saved.
        saved: any share of the save.
        mesh: the mesh of the job, for leaves whose sharding is not given.
        partial: saved leaves that the request does not name are not read.
        cast: which changes of element types are allowed.

    Raises:
        StructureMismatchError: paths, shapes or types differ; lists them with both sides.
    """
    if request is None:
        leaves = list(saved.leaves.values())
        wanted: dict[str, Any] = dict.fromkeys(saved.leaves)
        structure = None
    else:
        wanted, structure = flatten_named(request)
        _check_paths(wanted, saved, partial)
        leaves = [saved.leaves[name] for name in wanted]
    faults = {
        leaf.name: fault for leaf in leaves if (fault := _fault(leaf, wanted[leaf.name], cast))
    }
    if faults:
        raise StructureMismatchError(
            "the state asked for differs from the saved one:\n  " + _listed(faults.values()),
            paths=list(faults),
        )
    return Target(
        leaves=tuple(_target_leaf(leaf, wanted[leaf.name], mesh) for leaf in leaves),
        structure=structure,
        empty=saved.empty,
    )


def _check_paths(wanted: Mapping[str, Any], saved: ShareContents, partial: bool) -> None:
    absent = sorted(wanted.keys() - saved.leaves.keys())
    unasked = [] if partial else sorted(saved.leaves.keys() - wanted.keys())
    if not absent and not unasked:
        return
    lines = [f"{name}: asked for {_described(wanted[name])}, not saved" for name in absent]
    lines += [f"{name}: saved as {_saved(saved.leaves[name])}, not asked for" for name in unasked]
    raise StructureMismatchError(
        "the tree asked for differs from the saved one:\n  " + _listed(lines),
        paths=[*absent, *unasked],
    )


def _listed(lines: Any) -> str:
    lines = list(lines)
    more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "\n  ".join([*lines[:_LISTED], *more])


def _saved(leaf: Leaf) -> str:
    if leaf.value_type == "string":
        return "string"
    implementation = _saved_key(leaf)
    if implementation:
        return f"key<{implementation}>{list(leaf.shape[:-1])}"
    return f"{leaf.dtype}{list(leaf.shape)}"


def _saved_key(leaf: Leaf) -> str:
    """The implementation of a typed key; empty for other leaves, and where Orbax does not say."""
    kind = leaf.kind or ""
    return kind.removeprefix("key:") if kind.startswith("key:") else ""


def _described(wanted: Any) -> str:
    shape, dtype = getattr(wanted, "shape", None), getattr(wanted, "dtype", None)
    if shape is None and dtype is None:
        return type(wanted).__name__
    if _is_key_dtype(dtype):
        dtype = f"key<{key_implementation(dtype)}>"
    return f"{dtype}{list(shape) if shape is not None else ''}"


def _is_key_dtype(dtype: Any) -> bool:
    if dtype is None or isinstance(dtype, np.dtype):  # most are
        return False
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _fault(leaf: Leaf, wanted: Any, cast: Cast) -> str | None:
    """Why a leaf cannot be what is asked for."""
    if wanted is None:
        return None
    hint = _difference(leaf, wanted, cast)
    if hint is None:
        return None
    return f"{leaf.name}: asked for {_described(wanted)}, saved as {_saved(leaf)}{hint}"


def _difference(leaf: Leaf, wanted: Any, cast: Cast) -> str | None:
    """What to add to the message about a leaf that differs; None when it does not."""
    is_string = leaf.value_type == "string"
    if is_string or isinstance(wanted, str):
        return None if is_string and isinstance(wanted, str) else ""
    shape, dtype = getattr(wanted, "shape", None), getattr(wanted, "dtype", None)
    is_key = _is_key_dtype(dtype)
    saved_shape = leaf.shape[:-1] if is_key else leaf.shape
    if shape is not None and tuple(shape) != saved_shape:
        return ""
    if leaf.shape and isinstance(wanted, bool | int | float | complex):
        return ""
    if dtype is not None and not _same_dtype(leaf, dtype, is_key):
        return _cast_fault(leaf, dtype, is_key, cast)
    return None


def _cast_fault(leaf: Leaf, dtype: Any, is_key: bool, cast: Cast) -> str | None:
    """What to add to the message about another element type; None when it is allowed."""
    if is_key or _saved_key(leaf):
        return ""
    lossless = bool(jnp.promote_types(_dtype(leaf), dtype) == np.dtype(dtype))
    if cast == "lossy" or (cast == "safe" and lossless):
        return None
    return " (cast='safe' allows it)" if lossless else " (loses precision; cast='lossy' allows it)"


def _same_dtype(leaf: Leaf, dtype: Any, is_key: bool) -> bool:
    saved = _saved_key(leaf)
    if not is_key:
        return not saved and np.dtype(dtype) == _dtype(leaf)
    # Orbax's own shares do not say which kind of key it was.
    return leaf.dtype == "uint32" and saved in ("", key_implementation(dtype))


def _dtype(leaf: Leaf) -> np.dtype[Any]:
    return _dtype_named(leaf.dtype)


@functools.lru_cache(maxsize=64)
def _dtype_named(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(jnp, name, name))


def _target_leaf(leaf: Leaf, wanted: Any, mesh: jax.sharding.Mesh) -> TargetLeaf:
    if leaf.value_type == "string":
        return TargetLeaf(leaf=leaf, make="string")
    dtype = getattr(wanted, "dtype", None)
    if wanted is None and _saved_key(leaf):
        return _key_leaf(leaf, _saved_key(leaf), None, mesh)
    if _is_key_dtype(dtype):
        return _key_leaf(leaf, key_implementation(dtype), getattr(wanted, "sharding", None), mesh)
    if _is_host_value(leaf, wanted):
        make = _host_make(leaf, wanted)
        return TargetLeaf(leaf=leaf, make=make, dtype=_dtype(leaf), cast_to=_cast_to(leaf, dtype))
    sharding = getattr(wanted, "sharding", None) or _saved_sharding(leaf, mesh)
    return TargetLeaf(
        leaf=leaf,
        make="array",
        dtype=_dtype(leaf),
        sharding=sharding,
        cast_to=_cast_to(leaf, dtype),
    )


def _cast_to(leaf: Leaf, dtype: Any) -> np.dtype[Any] | None:
    return None if dtype is None or np.dtype(dtype) == _dtype(leaf) else np.dtype(dtype)


def _is_host_value(leaf: Leaf, wanted: Any) -> bool:
    if wanted is None or (
        getattr(wanted, "sharding", None) is None and hasattr(wanted, "sharding")
    ):
        # As saved; an abstract leaf without a sharding does not say which.
        return leaf.value_type != "jax.Array"
    return isinstance(wanted, np.ndarray | np.generic | bool | int | float | complex)


def _host_make(leaf: Leaf, wanted: Any) -> Literal["numpy", "numpy_scalar", "scalar"]:
    if isinstance(wanted, np.generic) or (wanted is None and leaf.kind == "numpy_scalar"):
        return "numpy_scalar"
    if isinstance(wanted, np.ndarray) or leaf.value_type == "np.ndarray":
        return "numpy"
    return "scalar"


def _key_leaf(
    leaf: Leaf, implementation: str, sharding: Sharding | None, mesh: jax.sharding.Mesh
) -> TargetLeaf:
    if isinstance(sharding, NamedSharding):
        rank = len(leaf.shape) - 1
        spec = [*sharding.spec, *[None] * (rank - len(sharding.spec)), None]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return TargetLeaf(
        leaf=leaf,
        make="key",
        dtype=_dtype(leaf),
        sharding=sharding or NamedSharding(mesh, PartitionSpec()),
        key_implementation=implementation,
    )


def _saved_sharding(leaf: Leaf, mesh: jax.sharding.Mesh) -> Sharding:
    """The saved partition spec on the present mesh.

    Raises:
        StructureMismatchError: the mesh lacks an axis of it.
    """
    spec = [_axes(part) for part in (leaf.sharding or {}).get("partition_spec", [])]
    lacking = {axis for part in spec for axis in (part or ())} - set(mesh.axis_names)
    if lacking:
        raise StructureMismatchError(
            f"{leaf.name}: saved over the mesh axes {sorted(lacking)}, and the present mesh has"
            f" {list(mesh.axis_names)}. Say which sharding to use: in a ShapeDtypeStruct",
            paths=[leaf.name],
        )
    return NamedSharding(mesh, PartitionSpec(*spec))


def _axes(part: Any) -> tuple[str, ...] | None:
    if part is None:
        return None
    return (part,) if isinstance(part, str) else tuple(part)


_EMPTY: dict[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": ()}


def _empty(kind: str) -> Any:
    value = _EMPTY.get(kind)
    return type(value)() if value is not None else None


def saved_tree(leaves: Iterable[Leaf], empty: Mapping[tuple[str | int, ...], str]) -> Any:
    """The tree of a save as it comes back without a request, with `Leaf` in place of values."""
    return _nest({leaf.path: leaf for leaf in leaves} | {p: _empty(k) for p, k in empty.items()})


def _nest(paths: Mapping[tuple[str | int, ...], Any]) -> Any:
    if set(paths) == {()}:
        return paths[()]
    heads: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for path, value in paths.items():
        heads.setdefault(path[0], {})[path[1:]] = value
    parts = {head: _nest(rest) for head, rest in heads.items()}
    if parts and all(isinstance(head, int) for head in parts):
        return [parts[head] for head in sorted(parts)]
    return parts
