"""Rollouts for Tunix by `jspec.Engine`, in the trainer's process: pass `Rollout` to its cluster.

Needs the extra ``tunix``.
"""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config import ModelConfig, SamplingParams
from jspec.decode.engine import Engine
from jspec.decode.options import DecodeOptions
from jspec.decode.score import score_tokens
from jspec.extras import install
from jspec.models.decoder import Decoder

try:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter  # pyright: ignore
    from tunix.generate.utils import next_power_of_2, pad_to_length  # pyright: ignore
    from tunix.models.llama3.model import Llama3  # pyright: ignore
    from tunix.models.qwen2.model import Qwen2  # pyright: ignore
    from tunix.models.qwen3.model import Qwen3  # pyright: ignore
    from tunix.rl.rollout.base_rollout import (  # pyright: ignore
        BaseRollout,
        RolloutConfig,
        RolloutOutput,
    )
except ImportError as error:
    raise ImportError(f"jspec.tunix needs Tunix ({error}); {install('tunix')}") from error

# Attention of Llama3 and Qwen3 rotates by 1e6, whatever ``rope_theta`` their configs have.
FAMILIES: dict[type, dict[str, Any]] = {
    Llama3: {"family": "llama", "rope_theta": 1e6},
    Qwen2: {"family": "qwen2", "qkv_bias": True},
    Qwen3: {"family": "qwen3", "qk_norm": True, "rope_theta": 1e6},
}


class Rollout(BaseRollout):
    """A rollout engine of Tunix that decodes by `jspec.Engine`.

    Its weights are a copy of the actor's, in the layout of jspec's models: Tunix's `Llama3`,
    `Qwen2` and dense `Qwen3` on one device. Prompts that repeat, as those of GRPO do, are prefilled
    once. Pass the class as ``rollout_engine`` of Tunix's ``ClusterConfig``, or
    ``functools.partial(Rollout, slots=64, draft=jspec.NgramDraft())``.

    Args:
        rollout_actor: Tunix's model.
        tokenizer: As Tunix takes it.
        rollout_config: Tunix's; its ``kv_cache_size`` is the engine's capacity, and its
            ``data_type`` the dtype of the copy, None for that of the actor's embedding.
        mesh: Tunix's mesh of rollouts, of one device.
        slots: Requests that decode at the same time.
        **options: Options of decoding: `jspec.DecodeOptions`.

    Attributes:
        engine: The engine.

    Raises:
        ValueError: For another model, or a mesh of several devices.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        rollout_config: RolloutConfig,
        mesh: jax.sharding.Mesh | None = None,
        *,
        slots: int = 32,
        **options: Unpack[DecodeOptions],
    ) -> None:
        if mesh is not None and mesh.size > 1:
            raise ValueError(
                f"the mesh of rollouts has {mesh.size} devices, and jspec.tunix.Rollout runs on "
                "one; give Role.ROLLOUT a mesh of one device"
            )
        is_adapter = isinstance(tokenizer, TokenizerAdapter)
        self._tokenizer = tokenizer if is_adapter else TokenizerAdapter(tokenizer)
        self._actor = rollout_actor
        config = config_of(rollout_actor)
        weights = weights_of(nnx.state(rollout_actor, nnx.Param))
        dtype = rollout_config.data_type or weights["embedding"].dtype
        model = Decoder(config, dtype=dtype, rngs=None)
        state = nnx.state(model)
        nnx.replace_by_pure_dict(state, jax.tree.map(lambda x: x.astype(dtype), weights))
        nnx.update(model, state)
        sizes = {"slots": slots, "capacity": rollout_config.kv_cache_size}
        self.engine = Engine(model, **sizes, logprobs=0, **options)

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Answers to ``prompts``, as Tunix's own sampler gives them: without the stop token.

        ``logprobs`` are those of the distribution that a token was drawn from, and the model's own
        for temperature 0. Without a seed, each call draws one.
        """
        ids = [self._encoded(prompt) for prompt in prompts]
        seeds: list[Any] = [None] * len(ids)
        if rollout_config.seed is not None:
            words = np.asarray(jax.random.key_data(jnp.asarray(rollout_config.seed)))
            seeds = np.random.default_rng(words.ravel()).integers(2**32, size=len(ids)).tolist()
        stops = tuple(rollout_config.eos_tokens or [self.eos_id()])
        requests = [
            self.engine.submit(
                prompt,
                SamplingParams(
                    max_new_tokens=rollout_config.max_tokens_to_generate,
                    temperature=float(rollout_config.temperature),
                    top_k=rollout_config.top_k or 0,
                    top_p=1.0 if rollout_config.top_p is None else rollout_config.top_p,
                    seed=seed,
                    stop_tokens=stops,
                    logprobs=0 if rollout_config.return_logprobs else None,
                ),
            )
            for prompt, seed in zip(ids, seeds, strict=True)
        ]
        self.engine.run()
        tokens, logprobs = [], []
        for request in requests:
            count = len(request.tokens) - (request.finished == "stop")
            tokens.append(np.array(request.tokens[:count], np.int32))
            if (scores := request.logprobs) is not None:
                of = scores.sampling if request.params.temperature else scores.model
                logprobs.append(of.logprobs[:count])
        longest, width = max(map(len, ids)), rollout_config.max_prompt_length
        width = width if width >= longest else next_power_of_2(longest)
        padded = [pad_to_length(np.array(x), width, self.pad_id(), left=True) for x in ids]
        return RolloutOutput(
            text=[self._tokenizer.decode(x.tolist()) for x in tokens],
            logits=None,
            tokens=tokens,
            left_padded_prompt_tokens=np.array(padded),
            logprobs=logprobs if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Log-probabilities of ``completion_tokens [B, C]``, padded on the right, at temperature 1.

        Those of ``prompt_tokens [B, P]``, padded on the left, are before them. float32 ``[B, C]``,
        0 for padding.
        """
        prompts, answers = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        starts = [int(np.argmax(np.append(row != self.pad_id(), True))) for row in prompts]
        counts = [self._answer_length(row) for row in answers]
        texts = [
            [*prompt[start:].tolist(), *answer[:count].tolist()]
            for prompt, start, answer, count in zip(prompts, starts, answers, counts, strict=True)
        ]
        result = np.zeros(answers.shape, np.float32)
        scores = score_tokens(self.engine.model, texts)
        for row, (of_text, count) in enumerate(zip(scores, counts, strict=True)):
            result[row, :count] = of_text[len(of_text) - count :]
        return jnp.asarray(result)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Go on with ``params``, the state of Tunix's model; nothing compiles."""
        self.engine.update(weights_of(params), on_update="recompute")

    def pad_id(self) -> int:
        """The tokenizer's padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The tokenizer's end of a text."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """Tunix's model, whose state `update_params` takes."""
        return self._actor

    def _encoded(self, text: str) -> list[int]:
        """Token ids, as Tunix's sampler encodes them."""
        bos = self._tokenizer.bos_id()
        ids = [*([bos] if bos else []), *self._tokenizer.encode(text)]
        return [int(x) for x in self._tokenizer.dedup_bos_ids(ids)]

    def _answer_length(self, row: np.ndarray) -> int:
        """Tokens up to the first end of a text, or up to the padding."""
        (ends,) = np.nonzero(row == self.eos_id())
        (used,) = np.nonzero(row != self.pad_id())
        return int(ends[0] if len(ends) else used[-1] if len(used) else -1) + 1


def config_of(model: nnx.Module) -> ModelConfig:
    """The config of a Tunix model. Raises `ValueError` for a family that has none here."""
    family = FAMILIES.get(type(model))
    config = getattr(model, "config", None)
    if family is None or config is None or getattr(config, "num_experts", None):
        raise ValueError(
            f"{type(model).__name__} is none of Tunix's Llama3, Qwen2 and dense Qwen3; use "
            "Tunix's own rollout engine for it"
        )
    rope: dict[str, Any] = {"rope_theta": float(config.rope_theta)}
    tied = getattr(config, "use_tied_embedding", getattr(config, "weight_tying", False))
    return ModelConfig.uniform(
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.hidden_dim,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        norm_eps=config.norm_eps,
        tie_embeddings=bool(tied),
        max_context=2**24,  # Tunix's models have no limit
        **rope | family,
    )


@jax.jit
def weights_of(params: Any) -> dict[str, Any]:
    """Weights of a `Decoder`, of the state of a Tunix model with all of its parameters.

    Names are looked at when it is traced: those of a model of 30 layers take the host milliseconds.

    Raises `ValueError` for adapters (LoRA), whose weights are those of no model.
    """
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)}
    if adapters := sorted(name for name in names if "lora" in name.lower()):
        raise ValueError(
            f"the parameters have {adapters[0]}, an adapter; merge adapters into the weights, or "
            "use Tunix's own rollout engine"
        )
    params = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    weights = {
        "embedding": params["embedder"]["input_embedding"],
        "norm": {"scale": params["final_norm"]["w"]},
        "layers": {index: _layer(layer) for index, layer in params["layers"].items()},
    }
    return weights | ({"head": {"kernel": params["lm_head"]["w"]}} if "lm_head" in params else {})


def _layer(layer: dict[str, Any]) -> dict[str, Any]:
    attention, mlp = layer["attn"], layer["mlp"]
    k = attention["k_proj"]["w"]
    kv_heads = k.shape[1]

    def by_kv_head(x: jax.Array) -> jax.Array:
        """Heads ``[..., N, H]`` as ``[..., K, G * H]``."""
        return x.reshape(*x.shape[:-2], kv_heads, -1)

    qkv = {"kernel": _joined(by_kv_head(attention["q_proj"]["w"]), k, attention["v_proj"]["w"])}
    if "q_bias" in attention:
        biases = (attention[name].reshape(kv_heads, -1) for name in ("q_bias", "k_bias", "v_bias"))
        qkv["bias"] = _joined(*biases)
    out = attention["o_proj"]["w"]
    norms = {
        name: {"scale": attention[name]["w"]} for name in ("q_norm", "k_norm") if name in attention
    }
    gate_up = jnp.stack([mlp["gate_proj"]["kernel"], mlp["up_proj"]["kernel"]], axis=1)
    return {
        "attention": {"qkv": qkv, "out": {"kernel": out.reshape(-1, out.shape[-1])}, **norms},
        "attention_norm": {"scale": layer["input_layernorm"]["w"]},
        "mlp": {"gate_up": {"kernel": gate_up}, "down": {"kernel": mlp["down_proj"]["kernel"]}},
        "mlp_norm": {"scale": layer["post_attention_layernorm"]["w"]},
    }


def _joined(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts, axis=-1)
