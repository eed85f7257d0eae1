"""Saves and loads against PyTorch's distributed checkpoints, of equal bytes on the same tmpfs."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

from benchmarks import timing, torch_jobs, torch_jobs_ours
from benchmarks.results import Case, NotInstalledError, Result, Settings
from mtcheckpoint.testing import ProcessGroup, ram_disk

__all__ = ["CASES"]

_PROCESSES = 2
_DEVICES = 2
_LIMIT_SECONDS = 1800.0


def save_vs_torch_dcp(settings: Settings) -> Result:
    """From the call to the end of the asynchronous save."""
    return timing.result_of(
        "save_vs_torch_dcp",
        _in_turns(settings),
        "torch save",
        f"{_setting(settings)}; from the call of save to the commit on all processes, ours sealed,"
        " against torch.distributed.checkpoint.async_save until its future is done, no checksums",
        ours="ours save",
    )


def load_vs_torch_dcp(settings: Settings) -> Result:
    """Into arrays on the devices, against tensors that are there already."""
    return timing.result_of(
        "load_vs_torch_dcp",
        _in_turns(settings),
        "torch load",
        f"{_setting(settings)}; ours by a new manager into new arrays, verified, against"
        " torch.distributed.checkpoint.load into tensors whose memory is there already, unverified",
        ours="ours load",
    )


CASES: dict[str, Case] = {
    "save_vs_torch_dcp": save_vs_torch_dcp,
    "load_vs_torch_dcp": load_vs_torch_dcp,
}


@functools.cache
def _in_turns(settings: Settings) -> timing.Told:
    """Both in turns, each in processes of its own, all of which stay alive."""
    if importlib.util.find_spec("torch") is None:
        raise NotInstalledError("torch is not installed: pip install 'mtcheckpoint[bench]'")
    with ram_disk("mtcheckpoint-bench-") as root:
        arguments = [str(root), settings.size_bytes, settings.pairs]
        with (
            ProcessGroup(
                torch_jobs_ours.save_and_load, _PROCESSES, devices=_DEVICES, args=arguments
            ) as ours,
            ProcessGroup(
                torch_jobs.save_and_load, _PROCESSES, args=arguments, distributed=False
            ) as torch,
        ):
            told = ours.wait(_LIMIT_SECONDS)
            # Its threads can keep a process from ending for long: it is killed instead.
            measured = torch.wait_for_all("measured", timeout_secs=_LIMIT_SECONDS)
    return [*told, *(event["times"] for event in measured)]


def _setting(settings: Settings) -> str:
    return (
        f"{settings.size_mib} MiB, {_PROCESSES} processes each, torch"
        f" {importlib.metadata.version('torch')} by gloo with DTensors"
    )
