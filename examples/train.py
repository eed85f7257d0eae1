"""A training loop that survives: MaxText's flags, continuous checkpoints, an exact resume.

One process, without a replicator:

    mkdir -p /dev/shm/try
    python examples/train.py --run_name=try --steps=2000 --enable_replicator=false \\
        --local_checkpoint_directory=/dev/shm/try --max_num_checkpoints_to_keep=2

Kill it, start it again: it goes on where it was, with the batch that comes next. With several
processes each has a RAM disk of its own, and a replicator beside them (`mtcheckpoint replicator`).
Who is who comes from ``jax-init-info.txt`` in the RAM disk, as on GKE, or from
--coordinator_address, --num_processes and --process_id.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mtcheckpoint as mtc

State = dict[str, Any]

BATCH_SIZE = 64
WIDTH, HIDDEN = 16, 64


def parse_flags() -> argparse.Namespace:
    """MaxText's names; `CheckpointConfig.from_flags` takes those that concern it."""
    parser = argparse.ArgumentParser(description="A training loop that survives.")
    parser.add_argument("--run_name", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--enable_multi_tier_checkpointing", default="true")
    parser.add_argument("--enable_continuous_checkpointing", default="true")
    parser.add_argument("--enable_autocheckpoint", default="false")
    parser.add_argument("--save_checkpoint_on_completion", default="true")
    parser.add_argument("--local_checkpoint_directory", required=True)
    parser.add_argument("--local_checkpoint_period", default="0")
    parser.add_argument("--max_num_checkpoints_to_keep", default="none")
    parser.add_argument("--multi_tier_checkpointing_backup_interval_minutes", default="none")
    parser.add_argument("--multi_tier_checkpointing_backup_interval_steps", default="none")
    # Ours.
    parser.add_argument("--backup_root", default="none")
    parser.add_argument("--enable_replicator", default="true")
    parser.add_argument("--timeout_secs", default="300")
    # For people without a cluster.
    parser.add_argument("--coordinator_address")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--process_id", type=int)
    parser.add_argument("--log", help="file for one JSON line per step; one file per process")
    return parser.parse_args()


class DataIterator:
    """Shuffled batches, epoch after epoch; its state is bytes, as that of Grain's iterators."""

    def __init__(self, data: np.ndarray, batch_size: int) -> None:
        self._data = data
        self._batch_size = batch_size
        self._taken = 0

    def __next__(self) -> np.ndarray:
        epoch, position = divmod(self._taken, len(self._data) // self._batch_size)
        order = np.random.default_rng(epoch).permutation(len(self._data))
        self._taken += 1
        return self._data[order[position * self._batch_size :][: self._batch_size]]

    def get_state(self) -> bytes:
        return json.dumps({"taken": self._taken}).encode()

    def set_state(self, state: bytes) -> None:
        self._taken = json.loads(state)["taken"]


def open_data() -> DataIterator:
    """This process's part of the data set."""
    everything = np.random.default_rng(0).standard_normal((4096, WIDTH), np.float32)
    part = everything[jax.process_index() :: jax.process_count()]
    return DataIterator(part, BATCH_SIZE // jax.process_count())


def init_state() -> State:
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "first": jax.random.normal(first, (WIDTH, HIDDEN)) / WIDTH**0.5,
        "second": jax.random.normal(second, (HIDDEN, WIDTH)) / HIDDEN**0.5,
    }
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}


def train_step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        error: jax.Array = jnp.tanh(batch @ params["first"]) @ params["second"] - batch
        return (error**2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.05 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, loss


def restore_or_init(
    manager: mtc.ReplicatedCheckpointManager, sharding: NamedSharding, data: DataIterator
) -> tuple[State, int]:
    """The state to go on from and the step to go on with; sets the iterator to the same place."""
    abstract_state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(init_state),
    )
    restored = manager.restore_latest(abstract_state)
    if restored is None:
        return jax.jit(init_state, out_shardings=sharding)(), 0
    data.set_state(restored.extras[jax.process_index()]["data"])
    print(f"restored step {restored.step} from {restored.tier}", flush=True)
    return restored.state, restored.step + 1


class StepLog:
    """What was trained on, step by step: to see that a resume leaves no gap and repeats nothing."""

    def __init__(self, path: str | None) -> None:
        self._file = open(path, "a", encoding="utf-8") if path else None  # noqa: SIM115

    def write(self, step: int, batch: np.ndarray, loss: jax.Array, state: State) -> None:
        if self._file is None:
            return
        shards = [s.data for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards]
        line = {
            "step": step,
            "batch": _digest([batch]),
            "loss": float(loss),
            "state": _digest(shards),
        }
        print(json.dumps(line), file=self._file, flush=True)


def _digest(arrays: list[Any]) -> str:
    data = b"".join(np.asarray(array).tobytes() for array in arrays)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def main() -> None:
    flags = parse_flags()
    config = mtc.CheckpointConfig.from_flags(flags)
    if flags.coordinator_address:
        jax.distributed.initialize(flags.coordinator_address, flags.num_processes, flags.process_id)
    mtc.initialize(config)

    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, P("data"))
    stepped = jax.jit(train_step, donate_argnums=0, out_shardings=(sharding, None))
    data, log = open_data(), StepLog(flags.log)

    with mtc.ReplicatedCheckpointManager(config, mesh=mesh) as manager:
        state, start = restore_or_init(manager, sharding, data)
        for step in range(start, flags.steps):
            batch = next(data)
            state, loss = stepped(state, jax.make_array_from_process_local_data(sharding, batch))
            log.write(step, batch, loss, state)
            is_last = step == flags.steps - 1
            manager.save(
                step,
                state,
                extras={"data": data.get_state()},
                force=is_last and config.save_checkpoint_on_completion,
            )
            if manager.reached_preemption(step):
                print(f"preempted: saved step {step}", flush=True)
                break
    # Leaving the `with` has waited for the save in progress.
    print("done", flush=True)


if __name__ == "__main__":
    main()
