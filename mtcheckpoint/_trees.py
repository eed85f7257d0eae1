"""Trees and the names of their leaves, as Orbax writes them.

A leaf's name is its path joined by dots: dictionary keys, attribute names and indices. An integer
dictionary key and a sequence index give the same name, as in Orbax's files.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax

from mtcheckpoint.errors import StructureMismatchError

__all__ = ["flatten_named", "leaf_name"]


def leaf_name(path: Iterable[Any]) -> str:
    """The name of the leaf at a path that JAX's `tree_flatten_with_path` gave."""
    return ".".join(_part(key) for key in path)


def _part(key: Any) -> str:
    for attribute in ("key", "name", "idx"):  # DictKey, FlattenedIndexKey; GetAttrKey; SequenceKey
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"unknown kind of tree key: {type(key).__name__}")


def flatten_named(tree: Any) -> tuple[dict[str, Any], Any]:
    """Leaves by name, in the tree's order, and the tree's structure.

    Raises:
        StructureMismatchError: two leaves have the same name, as in ``{"a.b": 1, "a": {"b": 2}}``.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    try:
        names = _names_of(structure)
    except TypeError:  # a node of it cannot be hashed
        names = _names_of.__wrapped__(structure)
    return dict(zip(names, leaves, strict=True)), structure


@functools.lru_cache(maxsize=16)
def _names_of(structure: Any) -> tuple[str, ...]:
    """The names of a tree's leaves: those of a state are the same at each save."""
    placeholders = jax.tree_util.tree_unflatten(structure, range(structure.num_leaves))
    leaves, _ = jax.tree_util.tree_flatten_with_path(placeholders)
    names = tuple(leaf_name(path) for path, _ in leaves)
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise StructureMismatchError(
            f"leaves with the same name: {', '.join(twice)}. Files are named by the path joined by"
            " dots; rename one of the keys",
            paths=twice,
        )
    return names
