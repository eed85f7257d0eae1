"""What the cluster's memory holds, and what a replicator would make of it: over plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mtcheckpoint._choice import Choice, Save, VolumeSummary, choose

FIRST, SECOND, THIRD = ("a" * 32, "b" * 32, "c" * 32)


def digest(save_id: str, rank: int, step: int | None = None) -> str:
    """A hash: of one share of one save."""
    return "D" + f"{save_id[0]}{rank}{step if step is not None else ''}".ljust(64, "0")


def volume(
    node_rank: int,
    *taken: tuple[int, str, int, int],
    untaken: Sequence[tuple[int, str, int, int]] = (),
) -> VolumeSummary:
    """A volume that holds shares (step, save id, rank, nodes), taken by a replicator or not."""
    shares = [(*share, digest(share[1], share[2])) for share in taken]
    return VolumeSummary(
        node_rank=node_rank,
        shares=(*shares, *((*share, None) for share in untaken)),
        metas=tuple((step, rank, digest(save_id, rank)) for step, save_id, rank, _ in taken),
        digests=tuple(digest(save_id, rank) for _, save_id, rank, _ in taken),
    )


def steps(choice: Choice) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(save.step, save.save_id, save.gone) for save in choice.saves]


def test_nothing_lies_anywhere() -> None:
    found = choose([volume(0), volume(1)], nodes=2, replicas=None)
    assert found == Choice(saves=(), offered=None)


def test_on_the_same_topology_the_replicator_offers_what_is_there() -> None:
    both = [(40, FIRST, 0, 2), (40, FIRST, 1, 2)]
    found = choose([volume(0, *both), volume(1, *both)], nodes=2, replicas=None)
    assert steps(found) == [(40, FIRST, ())]
    assert found.offered == 0


def test_a_node_that_lost_its_memory_is_served_by_its_peer() -> None:
    both = [(40, FIRST, 0, 2), (40, FIRST, 1, 2)]
    found = choose([volume(0, *both), volume(1)], nodes=2, replicas=None)
    assert found.offered == 0


def test_what_the_clean_up_would_cost_is_read_before() -> None:
    """An older whole save, or a nameless copy, is needed if the newest one turns out to be bad."""
    newest = [(40, SECOND, 0, 2), (40, SECOND, 1, 2)]
    older = [(30, FIRST, 0, 2), (30, FIRST, 1, 2)]
    found = choose([volume(0, *newest, *older), volume(1, *newest)], nodes=2, replicas=None)
    assert (steps(found)[0], found.offered) == ((40, SECOND, ()), None)

    found = choose([volume(0, *newest, older[0]), volume(1, *newest)], nodes=2, replicas=None)
    assert found.offered == 0, "half of an older one is worth nothing"

    named = [volume(0, newest[0]), volume(1, *newest)]
    assert choose(named, nodes=2, replicas=None).offered == 0
    copy = (*newest[1], digest(SECOND, 1))
    named[0] = dataclasses.replace(named[0], shares=(*named[0].shares, copy))
    assert choose(named, nodes=2, replicas=None).offered is None


def test_the_newest_save_counts_by_its_own_topology() -> None:
    """2 processes to step 40, then 1 to step 60, then 4: they go on from 60."""
    found = choose(
        [
            volume(0, (60, SECOND, 0, 1)),
            volume(1, (40, FIRST, 0, 2), (40, FIRST, 1, 2)),
            volume(2),
            volume(3),
        ],
        nodes=4,
        replicas=None,
    )
    assert steps(found) == [(60, SECOND, ()), (40, FIRST, ())]
    assert found.offered is None, "the replicator would offer neither of them to four nodes"


def test_fewer_nodes_than_saved_are_offered_half_a_state_or_nothing() -> None:
    four = [volume(r, *[(8, FIRST, q, 4) for q in (r, (r + 2) % 4)]) for r in range(4)]
    found = choose(four[:2], nodes=2, replicas=None)
    assert steps(found) == [(8, FIRST, ())]
    assert found.offered is None, "ranks 0 and 1 of 4 are not a state of 2"


def test_two_saves_of_one_step_are_never_mixed() -> None:
    found = choose(
        [volume(0, (40, FIRST, 0, 2)), volume(1, (40, SECOND, 1, 2))], nodes=2, replicas=None
    )
    assert steps(found) == [(40, SECOND, (0,)), (40, FIRST, (1,))], "the later save first"
    assert found.offered is None, "each rank has a .meta of step 40, but of different saves"


def test_which_data_a_replicator_takes_when_nodes_differ_cannot_be_foreseen() -> None:
    """Node 1 holds a copy of rank 0 that is of another save of the step than rank 0 has."""
    volumes = [
        volume(0, (40, FIRST, 0, 2), (40, FIRST, 1, 2)),
        volume(1, (40, SECOND, 0, 1)),
    ]
    found = choose(volumes, nodes=2, replicas=None)
    assert steps(found) == [(40, SECOND, ()), (40, FIRST, ())]
    assert found.offered is None


def test_a_step_that_was_committed_and_never_taken_is_newer_than_what_is_offered() -> None:
    taken = [(40, FIRST, 0, 2), (40, FIRST, 1, 2)]
    found = choose(
        [
            volume(0, *taken, untaken=[(60, SECOND, 0, 2)]),
            volume(1, *taken, untaken=[(60, SECOND, 1, 2)]),
        ],
        nodes=2,
        replicas=None,
    )
    assert steps(found) == [(60, SECOND, ()), (40, FIRST, ())]
    assert found.offered == 1


def test_a_step_that_only_some_nodes_committed_is_listed_with_what_is_gone() -> None:
    taken = [(40, FIRST, 0, 2), (40, FIRST, 1, 2)]
    found = choose(
        [volume(0, *taken, untaken=[(60, SECOND, 0, 2)]), volume(1, *taken)],
        nodes=2,
        replicas=None,
    )
    assert steps(found) == [(60, SECOND, (1,)), (40, FIRST, ())]
    assert found.offered == 1


def test_replicas_stand_in_for_each_other() -> None:
    """Ranks 0 and 2 hold the same data; rank 2 has lost its memory, .meta and all."""
    share = (40, FIRST, 0, 4)
    twin = digest(FIRST, 0)
    volumes = [
        volume(0, share),
        volume(1, (40, FIRST, 1, 4)),
        volume(2),
        VolumeSummary(
            node_rank=3,
            shares=((40, FIRST, 3, 4, digest(FIRST, 1)),),
            metas=((40, 3, digest(FIRST, 1)),),
            digests=(digest(FIRST, 1),),
        ),
    ]
    assert twin in volumes[0].digests
    assert choose(volumes, nodes=4, replicas=2).offered == 0
    assert choose(volumes, nodes=4, replicas=None).offered is None


def test_content_that_did_not_change_since_an_earlier_step_counts_to_the_later_save() -> None:
    """The replicator points the new .meta to the old data, which names the old step inside."""
    old = digest(FIRST, 1)
    volumes = [
        volume(0, (50, SECOND, 0, 2)),
        VolumeSummary(
            node_rank=1, shares=((50, "", 1, 2, old),), metas=((50, 1, old),), digests=(old,)
        ),
    ]
    found = choose(volumes, nodes=2, replicas=None)
    assert steps(found) == [(50, SECOND, ())]
    assert found.offered == 0


def test_nothing_at_all_has_changed_on_any_node() -> None:
    volumes = [
        VolumeSummary(
            node_rank=rank,
            shares=((50, "", rank, 2, digest(FIRST, rank)),),
            metas=((50, rank, digest(FIRST, rank)),),
            digests=(digest(FIRST, rank),),
        )
        for rank in range(2)
    ]
    found = choose(volumes, nodes=2, replicas=None)
    assert [(save.step, save.gone) for save in found.saves] == [(50, ())]
    assert found.offered == 0


def test_without_a_replicator_nothing_is_offered() -> None:
    found = choose([volume(0, untaken=[(40, FIRST, 0, 1)])], nodes=1, replicas=None, offers=False)
    assert steps(found) == [(40, FIRST, ())]
    assert found.offered is None


def test_only_the_newest_saves_are_told_to_all() -> None:
    many = [(step, f"{step:032x}", 0, 1) for step in range(50)]
    found = choose([volume(0, untaken=many)], nodes=1, replicas=None)
    assert [save.step for save in found.saves] == list(range(49, 41, -1))


def test_what_goes_over_the_wire_comes_back() -> None:
    told = volume(3, (40, FIRST, 0, 2), untaken=[(60, SECOND, 0, 2)])
    assert VolumeSummary.from_json(told.to_json()) == told
    choice = Choice(
        saves=(Save(step=1, save_id=THIRD, nodes=3, held=(0, 2)),),
        offered=0,
    )
    assert Choice.from_json(choice.to_json()) == choice
    assert choice.saves[0].gone == (1,)
