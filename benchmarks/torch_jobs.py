"""What the processes of PyTorch's side run."""

from __future__ import annotations

import gc
import math
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import states
from benchmarks.timing import clocked, warm_bytes, warm_memory
from benchmarks.turns import Turns
from mtcheckpoint.testing import report, this_process

__all__ = ["save_and_load"]


def save_and_load(root: str, size_bytes: int, pairs: int) -> None:
    """Saves and loads in turns with our side: see `torch_jobs_ours.save_and_load`.

    The times are in the event ``measured``.
    """
    import torch.distributed as dist

    place = this_process()
    assert place is not None
    _start(place.coordinator, place.rank, place.processes)
    turns = Turns(root, group=1, rank=place.rank, processes=[place.processes] * 2)
    state = _state(size_bytes, seed=place.rank)
    target = _zeros_like(state)
    told: dict[str, list[dict[str, float]]] = {"torch save": [], "torch load": []}
    for step in range(1, pairs + 2):
        with turns.turn():
            folder = Path(root) / "torch" / str(step)
            _together(size_bytes)
            told["torch save"].append(_saved(folder, state))
            _together(size_bytes)
            told["torch load"].append(_loaded(folder, target))
            if step == 1:
                _assert_equal(target, state)
            dist.barrier()
            if place.rank == 0:
                shutil.rmtree(folder)
            dist.barrier()
    report("measured", times=told)


def _together(size_bytes: int) -> None:
    import torch.distributed as dist

    gc.collect()
    warm_memory(warm_bytes(size_bytes))
    dist.barrier()


def _start(coordinator: str, rank: int, processes: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // processes, 1))
    dist.init_process_group(
        "gloo", init_method=f"tcp://{coordinator}", rank=rank, world_size=processes
    )


def _saved(folder: Path, state: dict[str, Any]) -> dict[str, float]:
    import torch.distributed.checkpoint as dcp

    taken, _ = clocked(lambda: dcp.async_save(state, checkpoint_id=folder).result())
    return taken


def _loaded(folder: Path, target: dict[str, Any]) -> dict[str, float]:
    import torch.distributed.checkpoint as dcp

    taken, _ = clocked(lambda: dcp.load(target, checkpoint_id=folder))
    return taken


def _state(size_bytes: int, *, seed: int) -> dict[str, Any]:
    """Tensors of the same shapes as the other side's, each with its rows over the processes."""
    random = np.random.default_rng(seed)
    shapes = jax.tree_util.tree_leaves_with_path(
        states.shapes(size_bytes), is_leaf=lambda node: isinstance(node, tuple)
    )
    return {jax.tree_util.keystr(path): _tensor(random, shape) for path, shape in shapes}


def _tensor(random: np.random.Generator, shape: tuple[int, ...]) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    if not shape:
        return torch.tensor(0, dtype=torch.int32)
    processes = dist.get_world_size()
    own = (math.ceil(shape[0] / processes), *shape[1:])
    local = torch.from_numpy(random.standard_normal(own, np.float32))
    return DTensor.from_local(local, init_device_mesh("cpu", (processes,)), [Shard(0)])


def _zeros_like(state: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def _assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    import torch

    for name, tensor in wanted.items():
        assert torch.equal(_local(found[name]), _local(tensor)), name


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
