"""``python -m benchmarks``: runs the cases and prints what they found."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    agreement,
    deciding,
    handshakes,
    interval,
    memory,
    planning,
    replicator_lag,
    restoring,
    saving,
    scaling,
    stepping,
    torch_dcp,
)
from benchmarks.results import Case, NotInstalledError, Result, Settings, machine

__all__ = ["CASES", "main"]

_MODULES = (
    planning,
    agreement,
    saving,
    restoring,
    torch_dcp,
    stepping,
    scaling,
    memory,
    deciding,
    handshakes,
    interval,
    replicator_lag,
)
CASES: dict[str, Case] = {name: case for module in _MODULES for name, case in module.CASES.items()}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    settings = Settings(size_mib=arguments.size_mib, pairs=arguments.pairs)
    results: list[Result] = []
    how = {"command": _command(arguments), "load_average": os.getloadavg()[0]}
    for name in arguments.case or CASES:
        try:
            results.append(CASES[name](settings))
        except NotInstalledError as error:
            print(f"{name}: skipped: {error}", flush=True)
        else:
            _show(results[-1])
        if arguments.json:  # after each case: what was measured is kept when one fails
            found = {
                "machine": machine() | how,
                "results": [result.to_json() for result in results],
            }
            arguments.json.write_text(json.dumps(found, indent=1))
    return 0


def _command(arguments: argparse.Namespace) -> str:
    cases = "".join(f" --case {name}" for name in arguments.case or ())
    return f"python -m benchmarks{cases} --size-mib {arguments.size_mib} --pairs {arguments.pairs}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="only this; may be repeated")
    parser.add_argument("--size-mib", type=int, default=1024, help="of the state (default: 1024)")
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    return parser.parse_args(argv)


def _show(result: Result) -> None:
    low, high = result.spread
    print(
        f"{result.case}: ratio {result.ratio:.2f} ({low:.2f} to {high:.2f}), ours"
        f" {result.ours:.4g} {result.unit}, other {result.other:.4g} {result.unit}\n"
        f"  {result.notes}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
