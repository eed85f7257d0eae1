"""Plays many seeds, and says what was struck: `python -m tests.crash`."""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence

from tests.crash.checks import Violation
from tests.crash.driver import play
from tests.crash.strikes import Tally
from tests.warm import start_warm


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    if chosen.seed is not None:
        seeds = range(chosen.seed, chosen.seed + 1)
    tally, failed = Tally(), []
    for seed, passed, text, struck in _played(seeds, chosen.rounds, chosen.jobs):
        failed += [] if passed else [seed]
        tally.add(struck)
        print(text if chosen.seed is not None else text.partition("\n  story\n")[0], flush=True)
    print("\n".join(tally.table()))
    print(f"{len(failed)} of {len(seeds)} failed: {failed}" if failed else f"{len(seeds)} passed")
    return bool(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many (20)")
    parser.add_argument("--first", type=int, default=0, help="the first one (0)")
    parser.add_argument("--seed", type=int, help="only this one, with all that it did")
    parser.add_argument("--rounds", type=int, default=4, help="runs a seed (4)")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at the same time (1)")
    return parser


def _played(seeds: Iterable[int], rounds: int, jobs: int) -> Iterator[tuple[int, bool, str, Tally]]:
    """Each seed with what became of it, in the order in which they end."""
    with concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=start_warm
    ) as pool:
        playing = [pool.submit(_play, seed, rounds) for seed in seeds]
        for done in concurrent.futures.as_completed(playing):
            yield done.result()


def _play(seed: int, rounds: int) -> tuple[int, bool, str, Tally]:
    begun, tally = time.monotonic(), Tally()
    try:
        story = play(seed, rounds=rounds, tally=tally)
    except Violation as violation:
        return seed, False, f"seed {seed} FAILED: {violation}", tally
    text = f"seed {seed} passed in {time.monotonic() - begun:.1f} s"
    return seed, True, "\n".join([text, "  story", *story]), tally
