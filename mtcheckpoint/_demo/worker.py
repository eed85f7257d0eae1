"""What each process of the demo runs: a training loop, with its reports and its ledger."""

from __future__ import annotations

import dataclasses
import logging
import traceback
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mtcheckpoint as mtc
from mtcheckpoint._demo.ledger import Ledger, differences
from mtcheckpoint._demo.model import Shape, State, abstract_state, init_state, train_step
from mtcheckpoint._demo.text import Batches, read_text
from mtcheckpoint.testing import report, this_process

__all__ = ["Orders", "train"]

_BATCH_SIZE = 16
_PEOPLE_WAIT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What the processes are told; the same for all.

    Attributes:
        run: how often the job was started before.
        nodes: the RAM disk of each process's node.
        backup: the folder that stands for the bucket.
        ledger: the folder of the ledger.
        backup_interval_steps: steps between backups.
    """

    run: int
    nodes: tuple[str, ...]
    backup: str
    ledger: str
    backup_interval_steps: int


def train(orders: dict[str, Any]) -> None:
    """Trains until it is killed; reports ``failed`` when it cannot go on."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", force=True
    )
    try:
        _Training(Orders(**orders)).run()
    except BaseException:
        report("failed", error=traceback.format_exc())
        raise


class _Training:
    """One process of one run of the job."""

    def __init__(self, orders: Orders) -> None:
        place = this_process()
        assert place is not None, "started by the demo only"
        self._run = orders.run
        self._shape = Shape()
        self._mesh = _mesh()
        self._batches = Batches(read_text(), _BATCH_SIZE, self._shape.context)
        self._ledger = Ledger(Path(orders.ledger))
        self._saving: int | None = None
        config = mtc.CheckpointConfig(
            run_name="demo",
            enable_multi_tier_checkpointing=True,
            enable_continuous_checkpointing=True,
            local_checkpoint_directory=orders.nodes[place.rank],
            multi_tier_checkpointing_backup_interval_steps=orders.backup_interval_steps,
            backup_root=orders.backup,
            replication="copies",
            timeout_secs=_PEOPLE_WAIT_SECONDS,
        )
        self._manager = mtc.ReplicatedCheckpointManager(config, mesh=self._mesh)

    def run(self) -> None:
        state, step = self._restored() or (init_state(self._shape, self._mesh), 0)
        stepped = train_step(self._shape, self._mesh)
        while True:
            state, loss = stepped(state, self._tokens(step))
            report("step", step=step, loss=float(loss))
            self._save(step, state)
            step += 1

    def _restored(self) -> tuple[State, int] | None:
        """The state that came back and the step to go on with, once it is compared."""
        restored = self._manager.restore_latest(abstract_state(self._shape, self._mesh))
        if restored is None:
            report("restored", step=None)
            return None
        jax.block_until_ready(restored.state)
        # Before the comparison, which no training loop has.
        passed_over = [[entry.step, entry.reason] for entry in restored.report.passed_over]
        report("restored", step=restored.step, tier=restored.tier, passed_over=passed_over)
        # The extras of all processes of the run that saved it, which may have had another number.
        saved = self._ledger.read(restored.extras[0]["run"], restored.step)
        report("compared", differing=differences(saved, restored.state, self._mesh))
        return restored.state, restored.step + 1

    def _tokens(self, step: int) -> jax.Array:
        batch = self._batches.batch(step)
        rows = NamedSharding(self._mesh, P("data", None))
        tokens: jax.Array = jax.make_array_from_callback(
            batch.shape, rows, lambda index: batch[index]
        )
        return tokens

    def _save(self, step: int, state: State) -> None:
        self._report_commit()
        if self._manager.should_save(step):
            self._ledger.write(self._run, step, jax.process_index(), state)
            if self._manager.save(step, state, extras={"run": self._run}):
                self._saving = step

    def _report_commit(self) -> None:
        if self._saving is None or self._manager.is_saving_in_progress():
            return
        self._manager.check_for_errors()
        report("committed", step=self._saving)
        self._saving = None


def _mesh() -> Mesh:
    """One row of the ``data`` axis for each process, its devices along ``model``."""
    sizes = (jax.process_count(), jax.local_device_count())
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(sizes, ("data", "model"), axis_types=kinds)
