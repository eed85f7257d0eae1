"""``mtcheckpoint doctor``."""

from __future__ import annotations

import argparse
import dataclasses
import json

__all__ = ["add_arguments", "run"]

_COLOURS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "flags",
        nargs="*",
        type=_flag,
        metavar="NAME=VALUE",
        help="flags of the job, over those of --config, such as backup_root=gs://bucket",
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file of the job's flags")
    parser.add_argument(
        "--state-bytes",
        type=_positive,
        metavar="N",
        help="bytes of the whole state, to tell whether the RAM disk is large enough",
    )
    parser.add_argument("--nodes", type=_positive, metavar="N", help="nodes of the job")
    parser.add_argument(
        "--write-test",
        action="store_true",
        help="also make an object in the backup root and remove it again",
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects, as JSON")
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=60,
        metavar="SECS",
        help="seconds that one request to a bucket may take (default: 60)",
    )


def run(arguments: argparse.Namespace) -> int:
    from mtcheckpoint._doctor import examine

    findings = examine(
        arguments.config,
        dict(arguments.flags),
        state_bytes=arguments.state_bytes,
        nodes=arguments.nodes,
        write_test=arguments.write_test,
        timeout_secs=arguments.timeout,
    )
    if arguments.json:
        print(json.dumps([finding.to_json() for finding in findings], indent=1))
    else:
        from rich.console import Console

        console = Console(highlight=False, markup=False, soft_wrap=True)
        for finding in findings:
            console.print(f"{finding.level:4} ", style=_COLOURS[finding.level], end="")
            console.print(finding.line)
    return int(any(finding.level == "FAIL" for finding in findings))


def _flag(text: str) -> tuple[str, str]:
    from mtcheckpoint.config import CheckpointConfig

    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, found {text!r}")
    if name not in {field.name for field in dataclasses.fields(CheckpointConfig)}:
        raise argparse.ArgumentTypeError(f"there is no flag {name!r}: see docs/configuration.md")
    return name, value


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text}")
    return number
