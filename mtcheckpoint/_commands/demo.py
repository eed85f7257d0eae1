"""``mtcheckpoint demo``."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write what happened to FILE, as JSON"
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show the replicator's log, and plain lines instead of the live view",
    )


def run(arguments: argparse.Namespace) -> int:
    from mtcheckpoint._demo import show

    return show.run(arguments.json, verbose=arguments.verbose)
