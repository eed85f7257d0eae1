"""What a process of a `ProcessGroup` runs. Started by path, so that it imports only what it must.

Its arguments: the file of its orders, the number of the process that started it, and the folder
that the package lies in, which need not be installed. It starts JAX, calls the target, writes the
result or the error to a file, and stays until the parent lets all processes go: a process of
``jax.distributed`` that leaves early takes the others down.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    _, orders_path, parent_pid, package_root = sys.argv
    _die_with(int(parent_pid))
    orders = json.loads(Path(orders_path).read_text())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if package_root not in sys.path:
        sys.path.append(package_root)
    _write(Path(orders["result"]), _outcome(orders))
    # The end of the file without the word: the parent is gone or in a hurry.
    if sys.stdin.readline() != "leave\n":
        os._exit(0)


def _die_with(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def _outcome(orders: dict[str, Any]) -> dict[str, Any]:
    try:
        if orders["distributed"]:
            _start_jax(orders)
        result = _load(orders["target"])(*orders["args"])
        json.dumps(result)
    except BaseException as error:
        return {
            "error": traceback.format_exc(),
            "summary": "".join(traceback.format_exception_only(error)).strip(),
        }
    return {"value": result}


def _start_jax(orders: dict[str, Any]) -> None:
    import jax

    jax.distributed.initialize(
        coordinator_address=orders["coordinator"],
        num_processes=orders["processes"],
        process_id=orders["process_id"],
        cluster_detection_method="deactivate",
    )


def _load(target: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``path/file.py:function`` names."""
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        module = importlib.import_module(place)
    else:
        # As pytest does it, so that a test module finds the helpers beside it.
        sys.path.insert(0, os.path.dirname(place))
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _write(path: Path, value: dict[str, Any]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(path)


if __name__ == "__main__":
    main()
