"""A small transformer language model in plain JAX: data and tensor parallel, with Adam.

Every parameter is split over the ``data`` axis of the mesh, so each node holds a share of its own;
a step puts them together, and adds up the gradients, in one exchange for each kind of parameter.
Heads and hidden units are split over the ``model`` axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtcheckpoint._demo.text import VOCABULARY_SIZE

__all__ = ["Shape", "State", "Step", "abstract_state", "init_state", "train_step"]

State = dict[str, Any]
Step = Callable[[State, jax.Array], tuple[State, jax.Array]]
_Params = dict[str, jax.Array]

_LEARNING_RATE = 5e-3
_BETA_1, _BETA_2, _EPSILON = 0.9, 0.98, 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The size of the model.

    Attributes:
        layers: blocks, each attention and a two-layer network side by side.
        width: of the residual stream; divides by the ``data`` axis and by `heads`.
        heads: of attention; divides by the ``model`` axis.
        context: characters that a prediction may look at.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 32


# How each parameter is laid out over the mesh.
_SPECS: Mapping[str, P] = {
    "embedding": P(None, "data"),
    "position": P(None, "data"),
    "norms": P(None, "data"),
    "attention_in": P(None, "data", None, "model", None),
    "attention_out": P(None, "model", None, "data"),
    "feed_in": P(None, "data", "model"),
    "feed_out": P(None, "model", "data"),
}
_IS_TENSOR_PARALLEL = {name: "model" in spec for name, spec in _SPECS.items()}


def _param_shapes(shape: Shape) -> Mapping[str, tuple[int, ...]]:
    layers, width, heads = shape.layers, shape.width, shape.heads
    return {
        "embedding": (VOCABULARY_SIZE, width),
        "position": (shape.context, width),
        "norms": (layers + 1, width),
        "attention_in": (layers, width, 3, heads, width // heads),
        "attention_out": (layers, heads, width // heads, width),
        "feed_in": (layers, width, 4 * width),
        "feed_out": (layers, 4 * width, width),
    }


def abstract_state(shape: Shape, mesh: Mesh) -> State:
    """A tree of `jax.ShapeDtypeStruct` with shardings: what a restore is asked for."""
    params = {
        name: jax.ShapeDtypeStruct(size, jnp.float32, sharding=NamedSharding(mesh, _SPECS[name]))
        for name, size in _param_shapes(shape).items()
    }
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return {"params": params, "mean": params, "square": params, "count": count}


def init_state(shape: Shape, mesh: Mesh) -> State:
    """The state before the first step. Call on every process of the mesh."""
    random = np.random.default_rng(0)
    scale = 0.5 * shape.width**-0.5
    first = {
        name: np.ones(size) if name == "norms" else scale * random.standard_normal(size)
        for name, size in _param_shapes(shape).items()
    }

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        value = first[path[1].key] if path[0].key == "params" else np.zeros(leaf.shape)
        value = value.astype(leaf.dtype)
        array: jax.Array = jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: value[index]
        )
        return array

    state: State = jax.tree_util.tree_map_with_path(place, abstract_state(shape, mesh))
    return state


def train_step(shape: Shape, mesh: Mesh) -> Step:
    """One step of Adam: state and tokens to state and loss. The state is donated."""
    layout = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract_state(shape, mesh))

    def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(_loss)(state["params"], tokens)
        return _adam(state, gradients), loss

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(layout, P("data", None)), out_specs=(layout, P())
    )
    # It runs for a few dozen steps, and is compiled again after each loss.
    quickly = {"xla_backend_optimization_level": 0}
    compiled: Step = jax.jit(mapped, donate_argnums=0, compiler_options=quickly)
    return compiled


def _adam(state: State, gradients: _Params) -> State:
    count = state["count"] + 1
    rate = _LEARNING_RATE * jnp.sqrt(1 - _BETA_2**count) / (1 - _BETA_1**count)
    mean = jax.tree.map(lambda m, g: _BETA_1 * m + (1 - _BETA_1) * g, state["mean"], gradients)
    square = jax.tree.map(
        lambda s, g: _BETA_2 * s + (1 - _BETA_2) * g * g, state["square"], gradients
    )
    params = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) + _EPSILON), state["params"], mean, square
    )
    return {"params": params, "mean": mean, "square": square, "count": count}


def _loss(shares: _Params, tokens: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of each character, in nats, over the whole batch."""
    params = _gathered(shares, False) | _gathered(shares, True)
    likelihoods = jax.nn.log_softmax(_logits(params, tokens[:, :-1]))
    picked = jnp.take_along_axis(likelihoods, tokens[:, 1:, None], axis=-1)
    mean: jax.Array = jax.lax.pmean(-jnp.mean(picked), "data")
    return mean


def _gathered(shares: _Params, tensor_parallel: bool) -> _Params:
    """The parameters of one kind, whole along ``data``. One exchange for all: many cost more."""
    kind = {n: x for n, x in shares.items() if _IS_TENSOR_PARALLEL[n] == tensor_parallel}
    flat = jnp.concatenate([share.ravel() for share in kind.values()])
    rows = jax.lax.all_gather(flat, "data")
    ends = np.cumsum([share.size for share in kind.values()])
    pieces = jnp.split(rows, ends[:-1], axis=1)
    return {
        name: _joined(piece.reshape(-1, *share.shape), _SPECS[name].index("data"))
        for (name, share), piece in zip(kind.items(), pieces, strict=True)
    }


def _joined(parts: jax.Array, axis: int) -> jax.Array:
    """(parts, ...) to one array, the parts side by side along `axis`."""
    joined: jax.Array = jnp.concatenate(list(parts), axis)
    return joined


def _logits(params: _Params, tokens: jax.Array) -> jax.Array:
    x = params["embedding"][tokens] + params["position"]
    for layer in range(len(params["norms"]) - 1):
        read = _normalised(x, params["norms"][layer])
        attended = _attend(read, params["attention_in"][layer], params["attention_out"][layer])
        fed = jax.nn.gelu(read @ params["feed_in"][layer]) @ params["feed_out"][layer]
        x = x + jax.lax.psum(attended + fed, "model")
    logits: jax.Array = _normalised(x, params["norms"][-1]) @ params["embedding"].T
    return logits


def _attend(x: jax.Array, project: jax.Array, out: jax.Array) -> jax.Array:
    query, key, value = jnp.einsum("btd,dphk->pbthk", x, project)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    attended: jax.Array = jnp.einsum("bthk,hkd->btd", mixed, out)
    return attended


def _normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    normalised: jax.Array = scale * x * jax.lax.rsqrt(mean_square + 1e-6)
    return normalised
