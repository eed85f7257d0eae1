"""``mtcheckpoint replicator``."""

from __future__ import annotations

import argparse
import logging

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--node",
        action="append",
        required=True,
        metavar="DIR",
        help="the RAM disk of a node, made if missing; give it once for each node",
    )
    parser.add_argument(
        "--backup",
        metavar="URL",
        help="where backups go, <URL>/<job>/<date>/: a local path or any fsspec URL",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="take step directories as soon as they are seen, as Google's replicator does",
    )
    parser.add_argument(
        "--timeout",
        type=_positive_seconds,
        default=300.0,
        metavar="SECS",
        help="seconds that nodes wait for each other before it says on whom (default: 300)",
    )


def run(arguments: argparse.Namespace) -> int:
    from mtcheckpoint._replicator import main

    # Forced: Orbax leaves a handler behind when it is imported.
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", force=True
    )
    return main.run(arguments.node, arguments.backup, arguments.strict, arguments.timeout)


def _positive_seconds(text: str) -> float:
    seconds = float(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, found {text}")
    return seconds
