"""The manager that a training loop holds: decides, snapshots, saves in the background, restores."""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from etils import epath
from jax.experimental import multihost_utils

from mtcheckpoint import _jax, _orbax, _policy, _topology
from mtcheckpoint._attempt import Means
from mtcheckpoint._coordination import job_coordinator
from mtcheckpoint._decider import Decider, Decision, policy_of
from mtcheckpoint._handshake.client import ReplicatorWatch
from mtcheckpoint._reports import Reports
from mtcheckpoint._restored import Request, RestoredState
from mtcheckpoint._restorer import Restorer
from mtcheckpoint._saver import Saver, SaveRequest
from mtcheckpoint._session import Session
from mtcheckpoint._shares.identity import Identity, encode_extras
from mtcheckpoint._shares.peers import address_towards
from mtcheckpoint._shares.volume import KeptSteps, ReplicatedSteps
from mtcheckpoint._snapshot import take_snapshot
from mtcheckpoint._target import Cast, saved_tree
from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.errors import ConfigError, ReplicatorFailedError, SaveError, StepNotFoundError

__all__ = ["ReplicatedCheckpointManager"]

_LOG = logging.getLogger("mtcheckpoint")

# The replicator watches for new steps only after it has mounted its peers and tidied up.
_SETTLE_SECONDS = 1.0
# A replicator that has stopped is heard of after this many steps, however seldom steps are saved.
_ASK_EVERY_STEPS = 100


class ReplicatedCheckpointManager(_orbax.AbstractCheckpointManager):  # type: ignore[misc]
    """Keeps the newest state of a job in the memory of its cluster.

    Every method is called on all processes of the job, in the same order, as a JAX program does. A
    context manager: leaving it waits for the save in progress and raises what went wrong.

    The handshake with the replicator happens on the first call that needs it, on all processes.
    """

    def __init__(
        self, config: CheckpointConfig, *, mesh: jax.sharding.Mesh, policy: Any = None
    ) -> None:
        """
        Args:
            config: the flags; multi-tier checkpointing must be on.
            mesh: the mesh of the job.
            policy: when to save, instead of what the flags say: any of Orbax's
                `SaveDecisionPolicy` objects. It is asked on process 0 only.

        Raises:
            ConfigError: multi-tier checkpointing is off, or the policy is none.
            TopologyError: nodes, slices and replicas do not fit each other.
            CoordinationError: the processes have different configurations.
        """
        if not (config.enable_checkpointing and config.enable_multi_tier_checkpointing):
            raise ConfigError(
                "ReplicatedCheckpointManager needs enable_checkpointing and"
                " enable_multi_tier_checkpointing; create_checkpoint_manager picks the manager that"
                " the flags ask for",
                fields=["enable_checkpointing", "enable_multi_tier_checkpointing"],
            )
        if policy is not None and not _is_policy(policy):
            raise ConfigError(
                f"policy should be one of Orbax's SaveDecisionPolicy objects, found"
                f" {type(policy).__name__}",
                fields=["policy"],
            )
        self._config = config
        self._mesh = mesh
        self._volume = Path(config.local_checkpoint_directory)
        self._topology = _topology.from_jax(config, _jax.node_ranks_by_process)
        self._coordinator = job_coordinator("manager", timeout_secs=config.timeout_secs)
        self._restorer = Restorer(
            Means(
                coordinator=self._coordinator,
                mesh=mesh,
                address=address_towards(_jax.coordinator_address()),
                concurrent_bytes=config.checkpoint_storage_concurrent_gb << 30,
                timeout_secs=config.timeout_secs,
                verify=config.verify,
            )
        )
        self._session = Session(config, self._topology, self._coordinator)
        self._watch: ReplicatorWatch | None = None
        self._saver: Saver | None = None
        self._reports = Reports(self._coordinator)
        self._decider = Decider(
            self._coordinator,
            policy_of(config, policy),
            self._reports,
            save_on_start=config.save_checkpoint_on_start,
            ask_every=_ASK_EVERY_STEPS if config.enable_replicator else _policy.NEVER,
        )
        self._restored_step: int | None = None
        self._steps: list[int] = []
        self._saving: int | None = None
        self._commits = 0  # of this run, as far as all processes know of them
        self._failures_raised = 0
        self._failures_in_a_row = 0
        self._told_stopped = False
        self._closed = False

    # Restoring.

    def restore_latest(
        self,
        abstract_state: Any = None,
        *,
        partial: bool = False,
        cast: Cast = "never",
        strict: bool = False,
    ) -> RestoredState | None:
        """Restores the newest step that is whole, from memory or else from the backup.

        The mesh, the shardings, the number of processes and the hosts need not be those of the
        save. What the replicator would not offer to this run is read before the handshake, and is
        saved again at once.

        Args:
            abstract_state: a tree of `jax.ShapeDtypeStruct` with shardings, or of arrays; None for
                the state as it was saved, on the saved partition specs.
            partial: leaves that `abstract_state` does not name are not read. Then the handshake
                is left to the first `save`, which ends what the replicator does not offer.
            cast: which changes of element types are allowed: ``"never"``, ``"safe"`` (those that
                lose nothing) or ``"lossy"``.
            strict: raise at the first bad copy, instead of using another one or an older step.

        Returns:
            The restored state, the same step on all processes. None only when every tier was read
            and holds nothing for this job.

        Raises:
            RestoreError: there is something, and nothing of it could be restored; or `strict`, and
                a copy is bad.
            StructureMismatchError: `abstract_state` differs from what was saved.
            TierUnreadableError: a tier could not be read.
            HandshakeError: the replicator failed.
            WaitTimeoutError: a process, the replicator or a tier did not answer in time.
        """
        request = Request(tree=abstract_state, partial=partial, cast=cast, strict=strict)
        return self._restore(request, None)

    def restore(self, step: int | None = None, args: Any = None) -> Any:
        """Restores a step, as Orbax's managers do.

        Args:
            step: the step; None for the newest one.
            args: ``ocp.args.Composite(state=ocp.args.PyTreeRestore(...))``; None for the state as
                it was saved.

        Returns:
            ``Composite(state=...)``.

        Raises:
            StepNotFoundError: the step is nowhere, or there is none at all.
        """
        restored = self._restore(Request(tree=_orbax.restore_request(args)), step)
        if restored is None:
            raise self._not_found(step)
        return _orbax.composite_result(restored.state)

    def _not_found(self, step: int | None) -> StepNotFoundError:
        available = self.all_steps()
        wanted = f"step {step}" if step is not None else "any step"
        return StepNotFoundError(
            f"{wanted} of job {self._config.run_name!r} is neither in {self._volume} nor in"
            f" {self._config.backup_root or 'a backup (no backup_root)'}; there are:"
            f" {list(available) or 'none'}",
            step=step if step is not None else -1,
            available=available,
        )

    def _restore(self, request: Request, step: int | None) -> RestoredState | None:
        self.wait_until_finished()
        found = self._session.candidates(
            step, saved_since=bool(self._steps), may_shake_hands=not request.partial
        )
        try:
            restored = self._restorer.restore(
                found, request, self._session.seconds, self._session.what_is_left
            )
        finally:
            self._session.let_go()
        if restored is not None:
            self._restored_step = restored.step
            self._steps = [s for s in self._steps if s <= restored.step]
            self._decider.resume_after(restored.step)
            if not request.partial:
                self._make_safe(restored)
            # Only now: until all have the state, even a bad share may have a chunk that is good.
            self._session.condemn(self._restorer.take_bad_paths())
        return restored

    def _make_safe(self, restored: RestoredState) -> None:
        """Saves a state anew that no volume holds in this run."""
        if not self._config.enable_replicator or self._steps:
            return
        in_bucket = restored.tier == "backup"
        in_memory_only = self._session.answer is None and not in_bucket
        if in_memory_only:
            # From here to the commit, the arrays of this run are all there is of it.
            self._session.mark_unsafe(restored.step)
        self._begin()
        # What the replicator offers instead is another save, be it of the same step.
        if not in_memory_only and self._session.is_offered(restored.step):
            return
        if not in_bucket:
            self._session.mark_unsafe(restored.step)
        extras = [encode_extras(own) for own in restored.extras]
        self._start_save(restored.step, restored.state, None, all_extras=extras)

    # Saving.

    def save(
        self,
        step: int,
        state: Any = None,
        *,
        args: Any = None,
        extras: Mapping[str, Any] | None = None,
        force: bool = False,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Starts a save when it is time for one, and returns at once.

        The state may be donated or overwritten as soon as this returns. A step that is saved
        already is not saved again.

        Args:
            step: the step that `state` is of.
            state: the state: a tree of arrays.
            args: instead of `state`: ``ocp.args.Composite(state=ocp.args.PyTreeSave(state))``.
            extras: what else this process needs to resume, such as the state of its data iterator:
                numbers, strings, bytes, lists and mappings. Kept small: every node keeps all.
            force: save now, whatever the policy says; waits for the save in progress.
            custom_metadata: goes into Orbax's metadata of the step.

        Returns:
            True when a save was started: the same answer on all processes.

        Raises:
            TypeError: a leaf of the state or a value of the extras is of a type that is not saved.
            ValueError: the step is negative, or an array was donated before.
            SaveError: an earlier save failed, here or elsewhere.
            ReplicatorFailedError: the replicator has stopped, here or elsewhere; at the same step
                on all processes. Under ``on_save_error="warn"`` that is logged, and training goes
                on without saves.
            WaitTimeoutError: the process that decides, or the save in progress, took too long.
        """
        tree = _orbax.state_to_save(args) if args is not None else state
        if tree is None:
            raise ValueError("save needs a state, or args=Composite(state=PyTreeSave(state))")
        self._check_open()
        step = _checked_step(step)
        if not force and not self._agreed_to_save(step):
            return False
        self._finish_save()
        self._raise_save_errors()
        if self._steps and self._steps[-1] == step:
            return False
        self._start_save(step, tree, copy.deepcopy(custom_metadata), extras=encode_extras(extras))
        if not self._config.async_checkpointing:
            self.wait_until_finished()
        return True

    def _start_save(
        self,
        step: int,
        tree: Any,
        custom_metadata: Mapping[str, Any] | None,
        *,
        extras: Any = None,
        all_extras: Sequence[Any] | None = None,
    ) -> None:
        # Before anything is on record: what cannot be saved is refused here.
        request = SaveRequest(
            step=step,
            snapshot=take_snapshot(tree, self._mesh),
            extras=extras,
            custom_metadata=custom_metadata,
            all_extras=all_extras,
        )
        self._started(step)
        self._the_saver().start(request)

    def should_save(self, step: int) -> bool:
        """Whether `save` would start a save of this step: the same answer on all processes."""
        return self.reached_preemption(step) or self._decision(step).save

    def reached_preemption(self, step: int) -> bool:
        """True at the step at which all processes stop for a preemption.

        Always False without ``enable_autocheckpoint``.
        """
        if not self._config.enable_autocheckpoint or jax.process_count() == 1:
            return False
        return bool(multihost_utils.reached_preemption_sync_point(step))

    def is_saving_in_progress(self) -> bool:
        """True from `save` until the step is committed on all processes."""
        return self._saver is not None and self._saver.busy

    def wait_until_finished(self) -> None:
        """Waits until no save is in progress.

        Raises:
            SaveError: it failed, here or elsewhere.
            WaitTimeoutError: it took longer than ``timeout_secs``.
        """
        self._finish_save()
        self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raises what went wrong in the background since the last call.

        Raises:
            SaveError: a save failed. Under ``on_save_error="warn"``: more saves in a row failed
                than ``save_error_budget``.
            ReplicatorFailedError: the replicator has stopped. Under ``on_save_error="warn"`` that
                is logged, and nothing is saved any more.
        """
        self._check_replicator()
        self._raise_save_errors()

    # What is there.

    @property
    def directory(self) -> epath.Path:
        """The RAM disk."""
        return epath.Path(self._volume)

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Steps that can be restored, and once this run has begun to save, those that it saved.

        Args:
            read: list the tiers, on all processes, whether saves have begun or not.
        """
        # From the first save on without the others: one process may know of a commit before another
        # does, and would not take part in looking.
        if self._saver is not None and not read:
            known = () if self._restored_step is None else (self._restored_step,)
            return tuple(self._steps) or known
        return tuple(sorted({*self._session.restorable_steps(), *self._steps}))

    def latest_step(self) -> int | None:
        """The newest step that was committed in this run, else the newest that can be restored.

        The same answer on all processes: it counts what was committed on all of them when they
        last came to `save`, `should_save` or `wait_until_finished`. A save that has ended since is
        told by the next of these that asks, which is soon while a save is in progress.
        """
        if self._steps:
            return self._steps[-1]
        if self._restored_step is not None:
            return self._restored_step
        # None while the first save is on its way: see `all_steps`.
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Not available: a replicator keeps the newest step."""
        raise NotImplementedError(
            "best_step: a replicator keeps the newest step only, whatever its metrics; see"
            " latest_step"
        )

    def reload(self) -> None:
        """Does nothing: what was saved is on record, and tiers are listed when asked for."""

    def delete(self, step: int) -> None:
        """Not available: with a replicator, committed steps belong to the replicator."""
        raise NotImplementedError(f"step {step}: committed steps belong to the replicator")

    def item_metadata(self, step: int) -> Any:
        """``metadata(step).item_metadata``: ``Composite(state=...)`` with Orbax's metadata."""
        return self.metadata(step).item_metadata

    def metadata(self, step: int | None = None) -> Any:
        """What a step says of itself, without reading its arrays: Orbax's `StepMetadata`.

        Its `item_metadata` has shapes, element types and shardings, its `custom_metadata` what
        `save` was given. The step may lie in any volume, or else in a backup. Call on every
        process; the answer is the same on all.

        Args:
            step: the step; None for an empty `RootMetadata`, since nothing is kept of all steps.

        Raises:
            StepNotFoundError: the step is nowhere.
            TierUnreadableError: no volume holds it, and the backup could not be read.
        """
        if step is None:
            return _orbax.root_metadata()
        found = self._session.describe(step)
        if found is None:
            raise self._not_found(step)
        tree = saved_tree(found.leaves, found.empty)
        return _orbax.step_metadata(found.checkpoint, tree, found.place)

    def metrics(self, step: int) -> Any:
        """Not available: `save` takes no metrics."""
        raise NotImplementedError(
            f"metrics of step {step}: save takes none, since a replicator keeps the newest step,"
            " whatever they are. Put them into custom_metadata, and read metadata(step)"
        )

    # Ending.

    def close(self) -> None:
        """Waits for the save in progress, ends the background thread, raises what went wrong."""
        if self._closed:
            return
        try:
            self.wait_until_finished()
        finally:
            self._closed = True
            self._session.let_go()
            if self._saver is not None:
                self._saver.close()

    def __enter__(self) -> ReplicatedCheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception:  # the error that ended the loop says more
            _LOG.exception("while closing after %s", type(error).__name__)

    # Parts that come to life when they are needed.

    def _begin(self) -> None:
        """Hands the run to the replicator, once."""
        answer = self._session.shake_hands()
        if self._watch is None and self._config.enable_replicator:
            self._watch = ReplicatorWatch(self._volume, seen_errors=answer.errors)

    def _the_saver(self) -> Saver:
        if self._saver is None:
            self._begin()
            self._saver = self._open_saver(self._session.shake_hands().finished_at)
        return self._saver

    def _open_saver(self, begun_at: float) -> Saver:
        config, topology = self._config, self._topology
        keep = config.max_num_checkpoints_to_keep or 1
        return Saver(
            steps=(
                ReplicatedSteps(self._volume)
                if config.enable_replicator
                else KeptSteps(self._volume, job=config.run_name, keep=keep)
            ),
            open_writer=self._open_writer,
            coordinator=self._coordinator,
            reports=self._reports,
            look_ahead=self._decider.look_ahead,
            identity=Identity(
                job=config.run_name,
                step=0,
                save_id="",
                node_rank=topology.node_rank,
                nodes=topology.nodes,
            ),
            commit_not_before=begun_at + (_SETTLE_SECONDS if config.enable_replicator else 0.0),
            timeout_secs=config.timeout_secs,
            check_replicator=self._watch.check if self._watch is not None else lambda: None,
        )

    def _open_writer(self, staging: Path) -> _orbax.ShareWriter:
        return _orbax.ShareWriter(
            staging,
            mesh=self._mesh,
            device_ids_by_rank=_device_ids_by_rank(self._topology.node_ranks),
            data_file_size_bytes=self._config.checkpoint_storage_target_data_file_size_bytes,
        )

    # Deciding, and the record of what was saved.

    def _agreed_to_save(self, step: int) -> bool:
        if self.reached_preemption(step):
            return True
        decision = self._decision(step)
        if decision.faults:
            self._stopped(step, decision.faults)
        if decision.failed_saves > self._failures_raised:
            # All processes hear of it at the same step, so that all raise or none.
            self._finish_save()
            self._raise_save_errors()
        return decision.save

    def _decision(self, step: int) -> Decision:
        # Not only the next save: its thread also watches the replicator.
        saver = self._the_saver()
        decision = self._decider.decide(step, failed=saver.failed, commits=saver.commits)
        self._settle(decision.commits)
        return decision

    def _stopped(self, step: int, faults: Mapping[str, str]) -> None:
        """The replicator has stopped somewhere: all processes hear of it at the same step."""
        names = self._coordinator.names(map(int, faults))
        listed = "; ".join(f"{n}: {text}" for n, text in zip(names, faults.values(), strict=True))
        if self._config.on_save_error == "raise":
            raise ReplicatorFailedError(
                f"step {step}: the replicator has stopped: {listed}", text=listed
            )
        self._tell_stopped(listed)

    def _check_replicator(self) -> None:
        try:
            if self._watch is not None:
                self._watch.check()
        except ReplicatorFailedError as error:
            if self._config.on_save_error == "raise":
                raise
            self._tell_stopped(str(error))

    def _tell_stopped(self, listed: str) -> None:
        if self._told_stopped:
            return
        self._told_stopped = True
        committed = self._saver.committed if self._saver is not None else None
        newest = committed if committed is not None else self._restored_step
        _LOG.warning(
            "the replicator has stopped: %s. Training goes on (on_save_error is 'warn'), but"
            " nothing is saved or replicated any more: %s is lost with any node, until the job is"
            " restarted",
            listed,
            "all of this run" if newest is None else f"what comes after step {newest}",
        )

    def _raise_save_errors(self) -> None:
        for error in self._saver.take_errors() if self._saver is not None else ():
            self._failed(error)

    def _started(self, step: int) -> None:
        self._steps = [s for s in self._steps if s < step]
        self._saving = step
        self._decider.started(step)

    def _finish_save(self) -> None:
        if self._saver is not None:
            self._saver.wait()
            self._settle(self._saver.commits)
            self._saving = None

    def _settle(self, commits: int) -> None:
        """Notes a commit of which all processes hear at this point of the program.

        Only there: what one of them knows a moment before the others is on nobody's record.
        """
        if commits <= self._commits:
            return
        self._commits = commits
        if self._saving is not None:
            self._session.mark_safe()
            self._steps.append(self._saving)
            self._saving = None
            self._failures_in_a_row = 0

    def _failed(self, error: SaveError) -> None:
        self._failures_raised += 1
        self._failures_in_a_row += 1
        allowed = self._config.save_error_budget if self._config.on_save_error == "warn" else 0
        if self._failures_in_a_row > allowed:
            raise error
        _LOG.warning("%d of %d failures in a row: %s", self._failures_in_a_row, allowed, error)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this manager is closed")


def _checked_step(step: Any) -> int:
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"step should be 0 or more, found {number}")
    return number


def _is_policy(policy: Any) -> bool:
    return hasattr(policy, "wants") or _orbax.is_save_decision_policy(policy)


def _device_ids_by_rank(node_ranks: Sequence[int]) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in node_ranks]
    for device in jax.devices():
        ids[node_ranks[device.process_index]].append(device.id)
    return ids
