"""The command line: ``mtcheckpoint <command>``, also ``python -m mtcheckpoint``."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from mtcheckpoint.errors import MtCheckpointError

__all__ = ["COMMANDS", "main"]

_FAILED = 1
_INTERRUPTED = 128 + signal.SIGINT

# The command NAME is the module mtcheckpoint._commands.NAME.
COMMANDS = {
    "demo": "see a job lose machines and come back, in under two minutes",
    "doctor": "look whether RAM disk, replicator and bucket are as a job needs them",
    "ls": "show what lies in volumes and backups",
    "replicator": "play the replicator for nodes on this machine",
    "verify": "read shares in volumes and backups and compare them with their seals",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name; None: those of this process.

    Returns:
        The exit status: 0 for success, 1 after an error, 130 after Ctrl-C.

    Raises:
        SystemExit: with status 2 for arguments that make no sense, with 0 after ``--help``.
    """
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        return int(arguments.run(arguments))
    except (MtCheckpointError, OSError) as error:
        print(f"mtcheckpoint {arguments.command}: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtcheckpoint",
        description="Checkpoints for JAX that survive in the cluster's memory.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        subparser = commands.add_parser(name, help=summary, description=description)
        if name in argv[:1]:
            module = importlib.import_module(f"mtcheckpoint._commands.{name}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser.parse_args(argv)
