"""jspec's own decoder with its layers stacked under one scan, its loss and its training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.train_bundled.batches import ANSWER, RETRIEVAL, TEXT
from jspec.config import ModelConfig
from jspec.models.decoder import Block, Decoder
from jspec.typing import Array

CONFIG = ModelConfig.uniform(
    family="qwen3",
    vocab_size=260,
    hidden_size=384,
    intermediate_size=1024,
    num_layers=8,
    num_heads=6,
    num_kv_heads=2,
    head_size=128,
    rope_theta=1e6,
    qk_norm=True,
    tie_embeddings=True,
    norm_eps=1e-6,
    max_context=32768,
    stop_tokens=(257,),
)
Implementation = Literal["xla", "cudnn"]
# Answers are few bytes, and the only ones of a retrieval row that teach much: the rest of it,
# random words and numbers, is mostly noise.
ANSWER_WEIGHT, RETRIEVAL_WEIGHT = 4.0, 0.1

# (float32 parameters, optimiser state)
TrainState = tuple[nnx.State, optax.OptState]


class ScannedBlocks(nnx.Module):
    """All layers as one `Block` whose parameters have a layer axis in front; a scan, with remat.

    It takes a block's place in `Decoder.layers`, so that everything else is the decoder's own code
    and one layer is compiled instead of eight.
    """

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, 0, dtype=dtype, rngs=rngs)

        self.blocks = blocks(rngs)

    def __call__(self, x: Array, layer: int, angles, attend, cache, joined=None, following=None):
        graph, stacked = nnx.split(self.blocks)

        def body(x: Array, state: nnx.State) -> tuple[Array, None]:
            return nnx.merge(graph, state)(x, layer, angles, attend, None)[0], None

        x, _ = jax.lax.scan(jax.checkpoint(body, policy=_saved), x, stacked)
        return x, None, cache


def _saved(primitive, *_, **__) -> bool:
    """Keep the results of products and of fused attention for the backward pass.

    At 32K tokens attention is nearly all of the work; running it again would cost a fifth more.
    """
    name = primitive.name
    return name == "dot_general" or "dot_product_attention_fwd" in name


class TrainingDecoder(Decoder):
    """Looks bytes up by a product with one-hot rows.

    The gradient of a gather adds hundreds of thousands of rows into 260 by colliding atomics; that
    of a product is a product.
    """

    def embed(self, tokens: Array) -> Array:
        embedding = self.embedding[...]
        return jax.nn.one_hot(tokens, embedding.shape[0], dtype=embedding.dtype) @ embedding


def training_decoder(config: ModelConfig, rngs: nnx.Rngs) -> Decoder:
    """A `Decoder` with float32 parameters whose only "layer" is the scan over all layers."""
    decoder = TrainingDecoder(config, dtype=jnp.float32, rngs=rngs)
    scanned: Any = nnx.List([ScannedBlocks(config, dtype=jnp.float32, rngs=rngs)])
    decoder.layers = scanned
    return decoder


def initial_parameters(config: ModelConfig, seed: int) -> nnx.State:
    return nnx.state(training_decoder(config, nnx.Rngs(seed)), nnx.Param)


def graph_of(config: ModelConfig):
    """The static half of the training decoder; `nnx.merge` joins it with parameters."""
    abstract = nnx.eval_shape(lambda: training_decoder(config, nnx.Rngs(0)))
    return nnx.split(abstract, nnx.Param)[0]


def causal_attention(implementation: Implementation) -> Callable:
    """``attend`` over the pass's own tokens; ``implementation`` as in `jax.nn`'s attention."""

    def attend(layer: int, q: Array, k: Array, v: Array, cache):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        return out, cache

    return attend


def forward(graph, parameters: nnx.State, tokens: Array, attend: Callable) -> Array:
    """Logits float32 ``[B, L, V]`` in bfloat16 arithmetic of ``tokens [B, L]``."""
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), parameters)
    decoder = nnx.merge(graph, cast)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = decoder(tokens, positions, attend, None)
    return decoder.logits(hidden)


def token_losses(logits: Array, targets: Array) -> Array:
    """Cross entropy in nats, float32 ``[B, L]``."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def optimiser() -> optax.GradientTransformation:
    """AdamW without its rate, which the step takes as an argument; norms do not decay."""

    def decays(parameters):
        return jax.tree.map_with_path(
            lambda path, _: not any(getattr(key, "key", None) == "scale" for key in path),
            parameters,
        )

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(0.05, mask=decays),
    )


def _mean(values: Array, chosen: Array) -> Array:
    """Mean of float32 ``values`` where ``chosen``; 0 where nothing is."""
    count = jnp.maximum(jnp.sum(chosen.astype(jnp.float32)), 1.0)
    return jnp.sum(jnp.where(chosen, values, 0.0)) / count


def make_train_step(config: ModelConfig, implementation: Implementation) -> jax.stages.Wrapped:
    """``step(state, tokens, kinds, rate) -> (state, metrics)``; a step without finite gradients is
    skipped, and counted in the metrics."""
    graph, attend, optimise = graph_of(config), causal_attention(implementation), optimiser()

    def loss(parameters, tokens, kinds):
        logits = forward(graph, parameters, tokens[:, :-1], attend)
        targets = tokens[:, 1:]
        losses = token_losses(logits, targets)
        text, answer = kinds == TEXT, kinds == ANSWER
        weights = text + ANSWER_WEIGHT * answer + RETRIEVAL_WEIGHT * (kinds == RETRIEVAL)
        right = jnp.argmax(logits, axis=-1) == targets
        metrics = {
            "text_bits": _mean(losses, text) / jnp.log(2.0),
            "answer_accuracy": _mean(right.astype(jnp.float32), answer),
        }
        return jnp.sum(losses * weights) / jnp.sum(weights), metrics

    def step(state: TrainState, tokens: Array, kinds: Array, rate: Array):
        parameters, moments = state
        tokens = tokens.astype(jnp.int32)
        (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(
            parameters, tokens, kinds
        )
        norm = optax.tree.norm(gradients)
        updates, new_moments = optimise.update(gradients, moments, parameters)
        updates = jax.tree.map(lambda update: -rate * update, updates)
        proposal = (optax.apply_updates(parameters, updates), new_moments)
        finite = jnp.isfinite(norm)
        state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), proposal, state)
        return state, {
            **metrics,
            "loss": value,
            "norm": norm,
            "skipped": 1.0 - finite.astype(jnp.float32),
        }

    return jax.jit(step, donate_argnums=0)


def make_score(config: ModelConfig, implementation: Implementation) -> jax.stages.Wrapped:
    """``score(parameters, tokens [B, L + 1]) -> (losses float32 [B, L], right bool [B, L])``."""
    graph, attend = graph_of(config), causal_attention(implementation)

    def score(parameters: nnx.State, tokens: Array):
        tokens = tokens.astype(jnp.int32)
        logits = forward(graph, parameters, tokens[:, :-1], attend)
        targets = tokens[:, 1:]
        return token_losses(logits, targets), jnp.argmax(logits, axis=-1) == targets

    return jax.jit(score)
