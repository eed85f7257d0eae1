"""The index of a share's arrays: an OCDBT database over data files that are written already.

TensorStore describes the format and reads it; it writes such a database only together with the
data. Sources: https://google.github.io/tensorstore/kvstore/ocdbt/index.html, storage format, which
says that a database may refer to data that exist already. Nothing here touches a disk.
"""

from __future__ import annotations

import dataclasses
import itertools
import os.path
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import google_crc32c
import tensorstore as ts

from mtcheckpoint._ocdbt_index import Stored

__all__ = ["MANIFEST_FILE", "Index", "Node", "index_of"]

MANIFEST_FILE = "manifest.ocdbt"

_NODE_MAGIC = 0x0CDB20DE
_FORMAT_VERSION = 0
_UNCOMPRESSED = 0
_INLINE, _OUT_OF_LINE = 0, 1

# Of a value that lies in the index itself: descriptions of arrays do, so that one read finds all.
_MAX_INLINE_BYTES = 1 << 14
# A node is read whole. What is estimated of a key here is what TensorStore counts, or more.
_MAX_NODE_BYTES = 8 << 20
_TARGET_NODE_BYTES = 4 << 20
_ENTRY_BYTES = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node of the tree, and what its parent says of it."""

    first_key: bytes
    content: bytes
    keys: int
    value_bytes: int
    tree_bytes: int
    place: Stored | None = None


_NOTHING = Node(first_key=b"", content=b"", keys=0, value_bytes=0, tree_bytes=0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """What makes a database of data files.

    Attributes:
        node_file: the data file for the index itself.
        nodes: its content.
        root: the node that all others are found from.
        height: levels below the root.
        database_id: 32 hexadecimal digits.
    """

    node_file: str
    nodes: bytes
    root: Node
    height: int
    database_id: str

    def manifest(self, commit_time_ns: int) -> bytes:
        """The content of the manifest, with which the database is there.

        Args:
            commit_time_ns: since the Unix epoch.
        """
        return _manifest(self.root, self.height, self.database_id, commit_time_ns)


def index_of(values: Mapping[str, bytes | Stored], *, node_file: str, database_id: str) -> Index:
    """The index of a database of these values.

    Args:
        values: by key: the value itself, for small ones, or where it lies.
        node_file: the data file for the index, which must not be there yet.
        database_id: 32 hexadecimal digits.
    """
    keyed = sorted((key.encode(), value) for key, value in values.items())
    leaves = [_leaf_node(entries) for entries in _split(keyed)]
    children = _placed(leaves, node_file)
    if len(children) <= 1:
        (root,), height = children or [_NOTHING], 0
        nodes = leaves
    else:
        top = _interior_node(children)
        (root,) = _placed([top], node_file, after=sum(len(leaf.content) for leaf in leaves))
        root = dataclasses.replace(root, tree_bytes=sum(c.tree_bytes for c in [root, *children]))
        height, nodes = 1, [*leaves, top]
    return Index(
        node_file=node_file,
        nodes=b"".join(node.content for node in nodes),
        root=root,
        height=height,
        database_id=database_id,
    )


def _split(keyed: Sequence[tuple[bytes, bytes | Stored]]) -> Iterator[list[Any]]:
    """Entries of one leaf node after the other."""
    entries: list[Any] = []
    size = 0
    for key, value in keyed:
        size += _ENTRY_BYTES + len(key) + (len(value) if isinstance(value, bytes) else 0)
        if entries and size > _TARGET_NODE_BYTES:
            yield entries
            entries, size = [], 0
        entries.append((key, value))
    if entries:
        yield entries


def _placed(nodes: Sequence[Node], file: str, after: int = 0) -> list[Node]:
    """Nodes, one behind the other in a file."""
    ends = list(itertools.accumulate((len(node.content) for node in nodes), initial=after))
    return [
        dataclasses.replace(node, place=Stored(file=file, offset=at, length=len(node.content)))
        for node, at in zip(nodes, ends, strict=False)
    ]


def _leaf_node(entries: Sequence[tuple[bytes, bytes | Stored]]) -> Node:
    keys = [key for key, _ in entries]
    values = [value for _, value in entries]
    inline = [value for value in values if isinstance(value, bytes)]
    outside = [value for value in values if isinstance(value, Stored)]
    files = sorted({value.file for value in outside})
    content = _framed(
        bytes([0]),
        _file_table(files),
        _varints([len(entries)]),
        _key_columns(keys),
        b"".join(_suffixes(keys)),
        _varints(v.length if isinstance(v, Stored) else len(v) for v in values),
        bytes(_OUT_OF_LINE if isinstance(v, Stored) else _INLINE for v in values),
        _varints(files.index(value.file) for value in outside),
        _varints(value.offset for value in outside),
        *inline,
    )
    return Node(
        first_key=keys[0],
        content=content,
        keys=len(keys),
        value_bytes=sum(value.length for value in outside),
        tree_bytes=len(content),
    )


def _interior_node(children: Sequence[Node]) -> Node:
    keys = [child.first_key for child in children]
    places = [child.place for child in children if child.place is not None]
    files = sorted({place.file for place in places})
    content = _framed(
        bytes([1]),
        _file_table(files),
        _varints([len(children)]),
        _key_columns(keys),
        # No prefix is left out below.
        _varints(0 for _ in children),
        b"".join(_suffixes(keys)),
        _varints(files.index(place.file) for place in places),
        _varints(place.offset for place in places),
        _varints(place.length for place in places),
        _varints(child.keys for child in children),
        _varints(child.tree_bytes for child in children),
        _varints(child.value_bytes for child in children),
    )
    return Node(
        first_key=keys[0],
        content=content,
        keys=sum(child.keys for child in children),
        value_bytes=sum(child.value_bytes for child in children),
        tree_bytes=len(content),
    )


def _manifest(root: Node, height: int, database_id: str, commit_time_ns: int) -> bytes:
    manifest: bytes = ts.ocdbt.undump_manifest(
        {
            "config": {
                "uuid": database_id,
                "compression": None,
                "max_decoded_node_bytes": _MAX_NODE_BYTES,
                "max_inline_value_bytes": _MAX_INLINE_BYTES,
                "version_tree_arity_log2": 4,
            },
            "version_tree_nodes": [],
            "versions": [
                {
                    "generation_number": 1,
                    "commit_time": commit_time_ns,
                    "root_height": height,
                    "root": _location(root.place)
                    | {
                        "statistics": {
                            "num_keys": root.keys,
                            "num_tree_bytes": root.tree_bytes,
                            "num_indirect_value_bytes": root.value_bytes,
                        },
                    },
                }
            ],
        }
    )
    return manifest


def _location(place: Stored | None) -> dict[str, str]:
    if place is None:  # of a database without keys
        return {}
    return {"location": f"btreenode::{place.file}:{place.offset}:{place.length}"}


# The encoding.


def _framed(*parts: bytes) -> bytes:
    body = b"".join(parts)
    header = _varints([_FORMAT_VERSION, _UNCOMPRESSED])
    length = 4 + 8 + len(header) + len(body) + 4
    framed = struct.pack(">I", _NODE_MAGIC) + struct.pack("<Q", length) + header + body
    return framed + struct.pack("<I", google_crc32c.value(framed))


def _file_table(files: Sequence[str]) -> bytes:
    """Paths of data files; none has a base path."""
    paths = [file.encode() for file in files]
    return b"".join(
        [_varints([len(paths)]), _key_columns(paths), _varints(0 for _ in paths), *_suffixes(paths)]
    )


def _key_columns(keys: Sequence[bytes]) -> bytes:
    """How much each key shares with the one before it, and how much it adds to that."""
    shared = _shared(keys)
    lengths = (len(key) - common for key, common in zip(keys, shared, strict=True))
    return _varints(shared[1:]) + _varints(lengths)


def _suffixes(keys: Sequence[bytes]) -> list[bytes]:
    return [key[common:] for key, common in zip(keys, _shared(keys), strict=True)]


def _shared(keys: Sequence[bytes]) -> list[int]:
    # Byte by byte, which is what is wanted here.
    common = (len(os.path.commonprefix(pair)) for pair in itertools.pairwise(keys))  # noqa: RUF071
    return [0, *common][: len(keys)]


def _varints(values: Iterable[int]) -> bytes:
    """Numbers of seven bits a byte, the lowest first; all but the last of a number have bit 7."""
    encoded = bytearray()
    for value in values:
        while value > 0x7F:
            encoded.append(value & 0x7F | 0x80)
            value >>= 7
        encoded.append(value)
    return bytes(encoded)
