"""A seal's text, most of which is made once, says what a seal should."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st

from mtcheckpoint._shares.seal import Seal, seal_from_json
from mtcheckpoint._shares.sealing import NO_SUMMARY, SealForm

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8) | st.sampled_from(
    ["100%", "%s", "%(x)s", '"', "\\", "a.b", "}", "\n"]
)
CHUNKS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=3, unique=True
)
Held = dict[str, list[tuple[int, int]]]


def checksums_of(held: Held, salt: str = "") -> list[str]:
    return [f"{abs(hash((name, chunk, salt))):032x}"[-32:] for name in held for chunk in held[name]]


def form_of(held: Held) -> SealForm:
    leaves = dict.fromkeys(held, ((40, 130), "float32", (10, 10)))
    return SealForm(leaves, [(name, chunk, 400) for name in held for chunk in held[name]])


@hypothesis.given(held=st.dictionaries(NAMES, CHUNKS, max_size=5))
@hypothesis.settings(max_examples=80, deadline=None)
def test_what_is_read_is_what_was_sealed(held: Held) -> None:
    checksums = iter(checksums_of(held))
    files = {"d/%s": (7, None), 'a"b': (3, "0" * 32)}
    ranks = (("1" * 16, "2" * 16),)
    sealed = form_of(held).seal(checksums_of(held), step=5, save_id="an id", files=files)
    assert seal_from_json(sealed.text(ranks).encode(), "here") == Seal(
        step=5,
        save_id="an id",
        leaves=dict.fromkeys(held, ((40, 130), "float32", (10, 10))),
        chunks={
            name: {chunk: (400, next(checksums)) for chunk in chunks}
            for name, chunks in held.items()
        },
        files=files,
        ranks=ranks,
    )


@hypothesis.given(held=st.dictionaries(NAMES, CHUNKS, min_size=1, max_size=5))
@hypothesis.settings(max_examples=80, deadline=None)
def test_a_summary_tells_which_chunks_and_what_they_are(held: Held) -> None:
    def summary(held: Held, salt: str = "") -> tuple[str, str]:
        sealed = form_of(held).seal(checksums_of(held, salt), step=1, save_id="a", files={})
        return sealed.summary

    which, what = summary(held)
    assert len(which) == len(what) == len(NO_SUMMARY[0])
    in_other_order = {name: held[name][::-1] for name in reversed(held)}
    assert summary(in_other_order) == (which, what)
    assert summary(held, "other")[0] == which
    assert summary(held, "other")[1] != what
    fewer = dict(list(held.items())[1:])
    assert summary(fewer)[0] != which
