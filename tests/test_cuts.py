"""How buffers are filled with chunks, against numpy; and what waits for the end of a restore."""

from __future__ import annotations

import gc
import itertools
import random

import numpy as np
import pytest

from mtcheckpoint._garbage import collection_put_off
from mtcheckpoint._replicas import unequal_leaves
from mtcheckpoint._restore import Box, box_shape, chunk_at, chunks_touching, cut, plan_leaf
from mtcheckpoint._shares.seal import Seal

ARRAY = np.arange(7 * 6 * 5).reshape(7, 6, 5)


def part_of(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(*ends) for ends in box)]


@pytest.mark.parametrize("seed", range(40))
def test_chunks_fill_all_buffers(seed: int) -> None:
    rng = random.Random(seed)
    dimensions = rng.randrange(4)
    array = ARRAY[(0,) * (3 - dimensions)]
    chunk_shape = tuple(rng.randint(1, size) for size in array.shape)
    boxes: list[Box] = [
        tuple((start := rng.randrange(size), rng.randint(start, size)) for size in array.shape)
        for _ in range(rng.randint(1, 3))
    ]
    buffers = [np.full(box_shape(box), -1) for box in boxes]
    found = cut(boxes, array.shape, chunk_shape)
    assert found.boxes == tuple(boxes) and found.shapes == tuple(b.shape for b in buffers)
    assert {fill.chunk for fill in found.fills} == found.chunks
    assert found.chunks == {c for box in boxes for c in chunks_touching(box, chunk_shape)}
    for fill in found.fills:
        chunk = part_of(array, fill.box)
        views = [(buffers[box][(*part, ...)], within) for box, part, within in fill.targets]
        alone = len(views) == 1 and views[0][0].size == chunk.size
        assert fill.is_straight == (alone and views[0][0].flags.c_contiguous)
        for view, within in views:
            view[...] = chunk[within]
    for box, buffer in zip(boxes, buffers, strict=True):
        assert np.array_equal(buffer, part_of(array, box))


def test_a_chunk_comes_from_the_first_share_that_holds_it() -> None:
    one, two, three, four = [(i, 0) for i in range(4)]
    plan = plan_leaf({one, two, three, four}, [{two}, {one, two}, {three}])
    assert plan.sources == {one: 1, two: 0, three: 2} and plan.missing == (four,)
    assert plan_leaf({one}, [{one, two}, {one}]).sources == {one: 0}
    assert plan_leaf({one}, []).missing == (one,)
    assert plan_leaf(set(), []).missing == ()


def test_positions_of_chunks() -> None:
    assert [chunk_at(key) for key in ("", "/0", "0/12", "/3/4/5")] == [(), (0,), (0, 12), (3, 4, 5)]
    for key in ("/-1", "/x", "/1.0"):
        with pytest.raises(ValueError, match=r"no chunk|invalid literal"):
            chunk_at(key)


def test_ranks_that_differ_on_a_chunk_are_named() -> None:
    seals = {
        rank: Seal(step=1, save_id="a", leaves={}, chunks=chunks, files={})
        for rank, chunks in {
            0: {"a": {(0,): (4, "x")}, "b": {(): (1, "y")}},
            1: {"a": {(1,): (4, "z")}, "b": {(): (1, "y")}},
            2: {"a": {(0,): (4, "other")}},
            3: {"a": {(0,): (4, "x")}},
        }.items()
    }
    assert unequal_leaves(seals) == {("a", (0, 2, 3))}
    for one, other in itertools.combinations((0, 1, 3), 2):
        assert unequal_leaves({one: seals[one], other: seals[other]}) == set()
    assert unequal_leaves({0: seals[0]}) == set()


def test_the_collector_is_left_as_it_was() -> None:
    with collection_put_off():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collection_put_off():
        _ = 1 // 0
    assert gc.isenabled()
    gc.disable()
    try:
        with collection_put_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
