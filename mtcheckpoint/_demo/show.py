"""The whole show, from the first start to the clean-up."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from mtcheckpoint._demo.interrupts import Interrupts
from mtcheckpoint._demo.job import NODES, Job
from mtcheckpoint._demo.scenarios import SCENARIOS, play
from mtcheckpoint._demo.screen import screen_for
from mtcheckpoint._demo.stage import Stage
from mtcheckpoint._demo.summary import checkpoint_distances, summary_tables, write_json
from mtcheckpoint._demo.view import Recovery

__all__ = ["run"]

_START_LIMIT_SECONDS = 90.0
_LAST_STEPS = 10
_MAX_WIDTH = 100
_LOG_FORMAT = "%(asctime)s %(levelname).1s %(message)s"


def run(json_path: Path | None, *, verbose: bool) -> int:
    """Plays the demo; to be called on the main thread.

    Leaves no process and no folder behind, whether it ends, fails, or is interrupted.

    Args:
        json_path: where the result goes; None: nowhere.
        verbose: the log of the replicator on stderr, and plain lines instead of the live view.

    Returns:
        0 when the job came back from every loss as it should, else 1.

    Raises:
        ProcessFailedError: a process failed that was not struck.
        WaitTimeoutError: something took much too long.
        OSError: the result cannot be written.
    """
    _set_up_logging(verbose)
    console = _console()
    with Interrupts() as interrupts, Job(interrupts) as job:
        with screen_for(console, live=not verbose) as screen:
            recoveries = _play_all(Stage(job, screen))
        distances = checkpoint_distances(job.committed_steps)
    ok = all(recovery.ok for recovery in recoveries)
    console.print(summary_tables(recoveries, distances))
    if json_path is not None:
        write_json(json_path, ok=ok, recoveries=recoveries, distances=distances)
    return 0 if ok else 1


def _play_all(stage: Stage) -> list[Recovery]:
    job = stage.job
    stage.act = "starting"
    place = job.memory.parent
    note = "" if place == Path("/dev/shm") else ", which is no memory: there is no /dev/shm here"
    stage.say(f"starting {NODES} processes; their nodes' memory is in {place}{note}")
    job.start()
    stage.wait_until(lambda: job.is_restored, "the processes to start", _START_LIMIT_SECONDS)
    stage.say("no checkpoint anywhere: training a language model from step 0")
    recoveries = []
    for number, scenario in enumerate(SCENARIOS, 1):
        stage.part = f"{number}/{len(SCENARIOS)}"
        recoveries.append(play(scenario, stage))
    stage.act = "training goes on"
    stage.wait_until(
        lambda: job.trained_steps >= _LAST_STEPS, "the job to go on", _START_LIMIT_SECONDS
    )
    stage.say(f"training goes on: step {job.step}, loss {job.losses[-1]:.2f}")
    job.end()
    return recoveries


def _console() -> Console:
    console = Console()
    # Wider tables only have wider gaps.
    console.width = min(console.width, _MAX_WIDTH)
    return console


def _set_up_logging(verbose: bool) -> None:
    # A replicator has much to say of losses. Forced: Orbax leaves a handler behind when imported.
    handler = logging.StreamHandler() if verbose else logging.NullHandler()
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT, handlers=[handler], force=True)
