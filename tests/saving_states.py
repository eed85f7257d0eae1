"""Jobs that hand over states of all kinds of leaves and then do their worst to them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saving_jobs as jobs

import mtcheckpoint as mtc
from mtcheckpoint import _snapshot

_NARROW = ("int4", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "int8")
_ROUNDS = 4
_SIDE = 1024
_IS_HOST_MEMORY = _snapshot.is_host_memory


def state_of(step: int) -> dict[str, Any]:
    """Every kind of leaf; each element depends on the step."""
    rng = np.random.default_rng(step)
    over_both, replicated = jax.P("data", "model"), jax.P()
    narrow = {name: _global(rng.integers(0, 7, (4, 4)).astype(name), over_both) for name in _NARROW}
    return {
        **narrow,
        "large": _global(rng.random((_SIDE, _SIDE), np.float32), over_both),
        "bool": _global(rng.random((4, 4)) > 0.5, over_both),
        "complex": _global((rng.random((4, 4)) + 1j * step).astype(np.complex64), over_both),
        "scalar": _global(np.asarray(step, np.int32), replicated),
        "pinned": jax.device_put(
            _global(rng.random((64, 64), np.float32), over_both),
            jax.NamedSharding(jobs.mesh(), over_both, memory_kind="pinned_host"),
        ),
        "local": jnp.asarray(rng.random((3, 5), np.float32)),
        "local key": jax.random.key(step, impl="rbg"),
        "key": jax.jit(
            lambda s: jax.random.split(jax.random.key(s), 3),
            out_shardings=jax.NamedSharding(jobs.mesh(), replicated),
        )(np.uint32(step)),
        "numpy": rng.random((300, 300)),
        "numpy of bfloat16": rng.random((3, 3)).astype(jnp.bfloat16),
        "numpy of bool": rng.random(9) > 0.5,
        "numpy, 0-d": np.asarray(1.5 * step),
        "numpy scalar": np.float32(step + 0.25),
        "numpy bool": np.bool_(step % 2),
        "int": step,
        "float": step + 0.5,
        "complex number": complex(step, 1),
        "true": step % 2 == 0,
        "text": f"step {step}",
        "no text": "",
        "text of numpy": np.str_("numpy's"),
        "nothing": None,
        "nested": [{"a": (_global(np.full((4, 4), step, np.float32), over_both), ())}],
    }


def _global(value: np.ndarray, spec: Any) -> jax.Array:
    sharding = jax.NamedSharding(jobs.mesh(), spec)
    array: jax.Array = jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])
    return array


def destroy(state: Any) -> int:
    """Donates, overwrites and deletes everything, at once; returns how much could be donated."""
    leaves = jax.tree.leaves(state)
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not _is_key(x)]
    donated = [
        x for x in arrays if x.sharding.memory_kind == "device" and not x.is_fully_replicated
    ]
    for ones in _overwrite(donated):
        assert all(np.all(np.asarray(shard.data) == 1) for shard in ones.addressable_shards)
    deleted = sum(x.is_deleted() for x in donated)
    for array in leaves:
        if isinstance(array, jax.Array) and not array.is_deleted():
            array.delete()
        elif isinstance(array, np.ndarray):
            array[...] = 0
    return deleted


@jax.jit(donate_argnums=0)
def _overwrite(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.where(x == x, jnp.ones_like(x), x) for x in arrays]


def _is_key(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def differences(found: Any, expected: Any) -> list[str]:
    """The leaves that differ in type, shape or any element on this process."""
    wanted = dict(_leaves(expected))
    there = dict(_leaves(found))
    if list(there) != list(wanted):
        return [f"leaves: {list(there)}"]
    return [name for name in wanted if not _same(there[name], wanted[name])]


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path), leaf


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, np.str_):  # comes back as Python's
        return type(found) is str and found == wanted
    if not isinstance(wanted, jax.Array):
        return type(found) is type(wanted) and _equal(np.asarray(found), np.asarray(wanted))
    if not isinstance(found, jax.Array) or found.dtype != wanted.dtype:
        return False
    if _is_key(wanted):
        found, wanted = jax.random.key_data(found), jax.random.key_data(wanted)
    # A host-local array comes back as one that is replicated over the job.
    shards = found.addressable_shards
    if wanted.is_fully_addressable:
        return all(_equal(np.asarray(s.data), np.asarray(wanted)) for s in shards)
    pairs = zip(shards, wanted.addressable_shards, strict=True)
    return all(_equal(np.asarray(a.data), np.asarray(b.data)) for a, b in pairs)


def _equal(found: np.ndarray, wanted: np.ndarray) -> bool:
    return (found.dtype, found.shape, found.tobytes()) == (
        wanted.dtype,
        wanted.shape,
        wanted.tobytes(),
    )


def handed_over(root: str) -> dict[str, Any]:
    """Saves, destroys, and reads back with another manager: what differs, round by round."""
    shutil.rmtree(jobs.volume(root))
    jobs.volume(root).mkdir()
    settings = jobs.alone(root, max_num_checkpoints_to_keep=_ROUNDS)
    extras, metadata = {"batches": [0], "bytes": b"x"}, {"note": ["as handed over"]}
    with mtc.ReplicatedCheckpointManager(settings, mesh=jobs.mesh()) as manager:
        for step in range(_ROUNDS):
            # As if these were other devices than CPUs, whose memory has to be copied.
            copied = step % 2 == 1
            _snapshot.is_host_memory = (lambda _: False) if copied else _IS_HOST_MEMORY
            state = state_of(step)
            extras["batches"] = [step]
            metadata["note"] = ["as handed over"]
            assert manager.save(step, state, extras=extras, custom_metadata=metadata, force=True)
            deleted = destroy(state)
            assert deleted > 5 or not copied
            extras["batches"][0] = -1
            metadata["note"].append("changed later")
        manager.wait_until_finished()
    found = {}
    with mtc.ReplicatedCheckpointManager(settings, mesh=jobs.mesh()) as manager:
        latest = manager.restore_latest()
        assert latest is not None and latest.step == _ROUNDS - 1
        kept = [own["batches"] for own in latest.extras]
        for step in range(_ROUNDS):
            found[str(step)] = differences(manager.restore(step)["state"], state_of(step))
    notes = [path.read_text() for path in jobs.volume(root).glob("*/_CHECKPOINT_METADATA")]
    return {
        "differ": found,
        "extras": kept,
        "notes": [("as handed over" in note, "changed later" in note) for note in notes],
    }


def refused(root: str) -> dict[str, str]:
    """What cannot be saved, what is said, and whether the next save works."""
    donated = _global(np.ones((4, 4), np.float32), jax.P("data", "model"))
    _overwrite([donated])
    bad = {
        "object": object(),
        "bytes": b"x",
        "donated": donated,
        "text array": np.array(["a"]),
        "dates": np.array(["2026-01-01"], "M8[D]"),
        "records": np.zeros(2, [("a", "i4")]),
        "huge": 2**70,
        "uint4": jnp.zeros(4, "uint4"),
        "no elements": jnp.zeros((0, 3)),
        "numpy without elements": np.zeros((0,), np.int64),
    }
    said = {}
    shutil.rmtree(jobs.volume(root))
    jobs.volume(root).mkdir()
    settings = jobs.alone(root, run_name="job-refused")
    with mtc.ReplicatedCheckpointManager(settings, mesh=jobs.mesh()) as manager:
        for name, leaf in bad.items():
            try:
                manager.save(1, {"ok": np.ones(3), "opt": [{name: leaf}]}, force=True)
            except (TypeError, ValueError) as error:
                said[name] = str(error)
        try:
            manager.save(1, {"ok": np.ones(3)}, extras={"it": [object()]}, force=True)
        except TypeError as error:
            said["extras"] = str(error)
        manager.wait_until_finished()
        said["written"] = ", ".join(path.name for path in _steps(jobs.volume(root)))
        # Not forced: nothing of the refused ones may be waited for.
        said["next"] = str(manager.save(2, {"ok": np.ones(3)}))
    return said


def _steps(volume: Path) -> list[Path]:
    return [path for path in volume.iterdir() if path.name.isdigit()]


def behind_queued_work(root: str) -> dict[str, Any]:
    """Saves what is still being computed: how long `save` blocked, and for how long it queued."""
    sharding = jax.NamedSharding(jobs.mesh(), jax.P("data", "model"))
    ones = np.ones((256, 256), np.float32)
    x = jax.make_array_from_callback(ones.shape, sharding, lambda i: ones[i])
    compute = jax.jit(
        lambda x, n: jax.lax.fori_loop(0, n, lambda i, a: jnp.sin(a) * 0 + i + 1.0, x),
        out_shardings=sharding,
    )
    n = _loops_for(compute, x, seconds=2.0)
    settings = jobs.alone(root, run_name="job-queued")
    with mtc.ReplicatedCheckpointManager(settings, mesh=jobs.mesh()) as manager:
        manager.save(0, {"y": x}, force=True)
        manager.wait_until_finished()
        begun = time.monotonic()
        state = {"y": compute(x, n)}
        dispatched = time.monotonic()
        assert manager.save(1, state, force=True)
        blocked = time.monotonic() - dispatched
        jax.block_until_ready(state)
        queued = time.monotonic() - begun
        manager.wait_until_finished()
        restored = manager.restore(1)["state"]["y"]
        right = all((np.asarray(s.data) == n).all() for s in restored.addressable_shards)
    return {"blocked": blocked, "queued": queued, "right": right}


def _loops_for(compute: Any, x: jax.Array, *, seconds: float) -> int:
    """How many loops take that long; the same on all processes."""
    from mtcheckpoint._coordination import job_coordinator

    jax.block_until_ready(compute(x, 10))
    begun = time.monotonic()
    jax.block_until_ready(compute(x, 100))
    loops = int(100 * seconds / (time.monotonic() - begun))
    return int(max(job_coordinator("loops", timeout_secs=60).gather("loops", loops)))


def everything(root: str) -> dict[str, Any]:
    return {
        "queued": behind_queued_work(root),
        "refused": refused(root),
        "handed over": handed_over(root),
    }
