"""What `mtcheckpoint ls` says of what it found: rows, and whether a step is whole. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from mtcheckpoint._choice import Save, VolumeSummary, saves_of

__all__ = [
    "BackupLook",
    "Row",
    "ShareLook",
    "VolumeLook",
    "foreign_row",
    "judge_backup",
    "judge_volumes",
    "spelled_ranks",
]

State = Literal["complete", "incomplete", "damaged", "foreign"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the listing, mostly one save.

    Attributes:
        place: the volumes or the backup it lies in.
        tier: ``"memory"`` or ``"backup"``.
        job: None when it does not say.
        step: None when it is no step.
        save_id: of the save; None when it does not say.
        written_by: ``"mtcheckpoint"`` or ``"orbax"``; None when that cannot be told.
        ranks: ranks whose shares are there.
        nodes: ranks of the save; None when it does not say.
        missing_ranks: ranks whose shares are not there.
        size_bytes: of one copy of everything that is there.
        age_secs: since it was taken or backed up; None when that cannot be told.
        state: ``"complete"`` when the shares of all ranks of the save are there.
        note: what is missing, damaged or foreign.
    """

    place: str
    tier: Literal["memory", "backup"]
    job: str | None
    step: int | None
    save_id: str | None
    written_by: Literal["mtcheckpoint", "orbax"] | None
    ranks: tuple[int, ...]
    nodes: int | None
    missing_ranks: tuple[int, ...]
    size_bytes: int
    age_secs: float | None
    state: State
    note: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShareLook:
    """A share that lies in a volume, as `_shares.inventory.HeldShare`, and what it weighs."""

    step: int
    save_id: str
    node_rank: int
    nodes: int
    digest: str | None
    by_orbax: bool
    size_bytes: int
    saved_at: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VolumeLook:
    """What lies in one volume of one job; None for shares that do not say whose they are."""

    place: str
    job: str | None
    shares: tuple[ShareLook, ...]
    metas: tuple[tuple[int, int, str], ...] = ()
    damaged: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackupLook:
    """One step in one dated backup.

    Attributes:
        place: the backup's folder.
        job: its job.
        step: the step.
        claims: the hash that each rank's ``.meta`` names.
        sizes: bytes of the data that is there, by hash.
        nodes: ranks of the save, as a share says; None when it does not.
        save_id: as a share says.
        by_orbax: whether Orbax wrote it; None when no share could be read.
        saved_at: when the backup was begun.
        fault: what is wrong with the share that was looked into.
    """

    place: str
    job: str
    step: int
    claims: Mapping[int, str]
    sizes: Mapping[str, int]
    nodes: int | None
    save_id: str | None
    by_orbax: bool | None
    saved_at: float
    fault: str | None = None


def judge_volumes(looks: Sequence[VolumeLook], *, now: float) -> list[Row]:
    """The saves of one job that volumes hold together, newest first, then what is damaged.

    Args:
        looks: of the same job.
        now: seconds since the epoch.
    """
    if not looks:
        return []
    place = ", ".join(look.place for look in looks)
    saves = saves_of(
        VolumeSummary(
            node_rank=position,
            shares=tuple((s.step, s.save_id, s.node_rank, s.nodes, s.digest) for s in look.shares),
            metas=look.metas,
            digests=(),
        )
        for position, look in enumerate(looks)
    )
    saves.sort(key=lambda save: (save.step, save.save_id), reverse=True)
    rows = [_row_of_save(save, looks, place=place, now=now) for save in saves]
    rows += _rows_without_data(looks, {save.step for save in saves}, place=place)
    rows += [
        _row(look.place, "memory", look.job, state="damaged", note=text)
        for look in looks
        for text in look.damaged
    ]
    return rows


def _row_of_save(save: Save, looks: Sequence[VolumeLook], *, place: str, now: float) -> Row:
    shares = [share for look in looks for share in look.shares if _is_of(share, save)]
    digests = {share.digest for share in shares} - {None}
    named = {
        rank
        for look in looks
        for step, rank, digest in look.metas
        # With data-parallel replicas the data of one rank stands for its twin's, too.
        if step == save.step and digest in digests
    }
    ranks = tuple(sorted({*save.held, *named}))
    missing = tuple(sorted(set(range(save.nodes)) - set(ranks)))
    # One copy of each: of what was not taken yet, by its rank.
    sizes = {share.digest or str(share.node_rank): share.size_bytes for share in shares}
    if not save.nodes:
        return _row(
            place,
            "memory",
            looks[0].job,
            step=save.step,
            state="incomplete",
            note="does not say of how many ranks",
            ranks=ranks,
            size_bytes=sum(sizes.values()),
        )
    by_orbax = any(share.by_orbax for share in shares)
    return Row(
        place=place,
        tier="memory",
        job=looks[0].job,
        step=save.step,
        save_id=next((s.save_id for s in shares if s.save_id and not s.by_orbax), None),
        written_by="orbax" if by_orbax else "mtcheckpoint",
        ranks=ranks,
        nodes=save.nodes,
        missing_ranks=missing,
        size_bytes=sum(sizes.values()),
        # Copies are younger than the save.
        age_secs=max(0.0, now - min(share.saved_at for share in shares)),
        state="incomplete" if missing else "complete",
        note=f"{spelled_ranks(missing)} missing" if missing else "",
    )


def _is_of(share: ShareLook, save: Save) -> bool:
    if share.step != save.step:
        return False
    # A share with the content of an earlier step does not know the id.
    return share.save_id == save.save_id or (not share.save_id and share.nodes == save.nodes)


def _rows_without_data(
    looks: Sequence[VolumeLook], steps: set[int], *, place: str
) -> Iterator[Row]:
    """Steps of which only the ``.meta`` files are there."""
    told: dict[int, set[int]] = {}
    for look in looks:
        for step, rank, _ in look.metas:
            if step not in steps:
                told.setdefault(step, set()).add(rank)
    for step, ranks in sorted(told.items(), reverse=True):
        yield _row(
            place,
            "memory",
            looks[0].job,
            step=step,
            state="incomplete",
            note=f"the data of {spelled_ranks(sorted(ranks))} is missing",
            missing_ranks=tuple(sorted(ranks)),
        )


def judge_backup(look: BackupLook, *, now: float) -> Row:
    """Whether one step of a backup is whole: every rank has a ``.meta``, and all data is there."""
    nodes = look.nodes or max(look.claims, default=0) + 1
    held = tuple(r for r in sorted(look.claims) if look.claims[r] in look.sizes and r < nodes)
    missing = tuple(sorted(set(range(nodes)) - set(held)))
    written_by = None if look.by_orbax is None else "orbax" if look.by_orbax else "mtcheckpoint"
    state: State = "incomplete" if missing else "complete"
    note = f"{spelled_ranks(missing)} missing" if missing else ""
    if look.fault is not None:
        state, note = "damaged", look.fault
    return Row(
        place=look.place,
        tier="backup",
        job=look.job,
        step=look.step,
        save_id=look.save_id,
        written_by=written_by,  # type: ignore[arg-type]
        ranks=held,
        nodes=look.nodes,
        missing_ranks=missing,
        size_bytes=sum(look.sizes[digest] for digest in {look.claims[rank] for rank in held}),
        age_secs=max(0.0, now - look.saved_at),
        state=state,
        note=note,
    )


def foreign_row(place: str, tier: Literal["memory", "backup"], job: str | None, note: str) -> Row:
    """A line for what belongs to no step."""
    return _row(place, tier, job, state="foreign", note=note)


def _row(
    place: str,
    tier: Literal["memory", "backup"],
    job: str | None,
    *,
    state: State,
    note: str,
    **more: Any,
) -> Row:
    nothing: dict[str, Any] = {
        "step": None,
        "save_id": None,
        "written_by": None,
        "ranks": (),
        "nodes": None,
        "missing_ranks": (),
        "size_bytes": 0,
        "age_secs": None,
    }
    return Row(place=place, tier=tier, job=job, state=state, note=note, **{**nothing, **more})


def spelled_ranks(ranks: Sequence[int]) -> str:
    """Ranks for people: ``rank 3``, ``ranks 0-3, 7``; ``no ranks``."""
    if not ranks:
        return "no ranks"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    listed = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
