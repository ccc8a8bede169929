"""Frozen, hashable settings of models, requests and steps, checked when they are made."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from jspec.checks import (
    check_flags,
    check_numbers,
    check_sizes,
    present_fields,
    require,
    shown,
    token_ids,
    whole_number,
)
from jspec.parts import Activation, Experts, Latent, Rope, RopeScaling

SamplingMode = Literal["greedy", "sampled", "filtered"]

LAYER_LIMIT = 1024  # a file that asks for more is damaged
FLOAT32_MAX = float.fromhex("0x1.fffffep127")


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What a layer keeps in the cache, and how its queries read it.

    Attributes:
        kv_heads: Key-value heads (K).
        key_size: Channels of a key.
        value_size: Channels of a value.
        values_in_keys: Whether the values are the first ``value_size`` channels of the keys, and
            are not stored again (multi-head latent attention).
        window: A query reads the last ``window`` tokens, itself included; None is all of them.
        scale: Scores are q.k times ``scale``; None is ``key_size ** -0.5``.
        softcap: Scores are then ``softcap * tanh(scores / softcap)``, unless it is None.
        rope: An index into `ModelConfig.ropes`; only jspec's own decoder reads it.
    """

    kv_heads: int
    key_size: int
    value_size: int
    values_in_keys: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    rope: int = 0

    def __post_init__(self) -> None:
        check_sizes(self, "kv_heads", "key_size", "value_size", *present_fields(self, "window"))
        check_numbers(self, *present_fields(self, "scale", "softcap"))
        check_flags(self, "values_in_keys")
        require(
            type(self.rope) is int and self.rope >= 0,
            f"rope={shown(self.rope)} must be an index, at least 0",
        )
        require(
            not self.values_in_keys or self.value_size <= self.key_size,
            f"value_size={self.value_size} must be at most key_size={self.key_size} where values "
            "are in keys",
        )

    @property
    def score_scale(self) -> float:
        """What q.k is multiplied by."""
        return self.key_size**-0.5 if self.scale is None else self.scale


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and conventions of jspec's own decoder, layer by layer.

    `ModelConfig.uniform` makes one whose layers are all alike; `jspec.models.families` reads one
    from a config.json.

    Attributes:
        vocab_size: Tokens of the vocabulary (V).
        hidden_size: Channels of hidden states (D).
        intermediate_size: Channels of the feed-forward.
        num_heads: Query heads (N), the same in every layer.
        layers: The `LayerSpec` of each layer.
        ropes: The rotary embeddings that layers refer to.
        family: The model family that the conventions are from; it changes nothing.
        norm_eps: The epsilon of all norms.
        tie_embeddings: Whether logits use the embedding matrix.
        qkv_bias: Whether the projections to queries, keys and values have a bias.
        out_bias: Whether the projection of attention's output has a bias.
        mlp_bias: Whether the feed-forward has biases.
        qk_norm: Whether queries and keys are normed.
        joint_qk_norm: Whether that norm is over the channels of all heads together, in place of
            each head.
        sinks: Whether each head has a learned attention sink.
        pre_norms: Whether attention and feed-forward have a norm before them.
        post_norms: Whether attention and feed-forward have a norm after them.
        centered_norms: Whether all norms scale by 1 + their parameter.
        activation: The activation of the feed-forward.
        embedding_scale: A factor on embeddings, unless it is None.
        residual_scale: A factor on what attention and feed-forward add to the hidden states, unless
            it is None.
        logit_scale: A factor on logits, before their soft cap, unless it is None.
        logit_softcap: Logits are ``logit_softcap * tanh(logits / logit_softcap)``, unless it is
            None.
        latent: Multi-head latent attention: a layer keeps one KV head, latent and rotated key
            concatenated, and its values are the latent in it.
        experts: The mixture of experts in the feed-forward of some layers.
        max_context: Most tokens of a row.
        stop_tokens: Tokens that end a row.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[Rope, ...] = (Rope(),)
    family: str = "llama"
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    sinks: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    centered_norms: bool = False
    activation: Activation = "silu"
    embedding_scale: float | None = None
    residual_scale: float | None = None
    logit_scale: float | None = None
    logit_softcap: float | None = None
    latent: Latent | None = None
    experts: Experts | None = None
    max_context: int = 4096
    stop_tokens: tuple[int, ...] = ()

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        rope_theta: float = 10000.0,
        rope_scaling: RopeScaling | None = None,
        **settings: Any,
    ) -> ModelConfig:
        """A config with ``num_layers`` equal layers of ``num_kv_heads`` heads and one rope.

        ``settings``: the other fields, all but ``layers`` and ``ropes``.
        """
        # Checked here, before a tuple of this length is made.
        require(
            type(num_layers) is int and num_layers >= 1,
            f"num_layers={shown(num_layers)} must be a positive int",
        )
        require(num_layers <= LAYER_LIMIT, f"num_layers={num_layers} must be at most {LAYER_LIMIT}")
        spec = LayerSpec(kv_heads=num_kv_heads, key_size=head_size, value_size=head_size)
        rope = Rope(rope_theta, rope_scaling)
        return cls(layers=(spec,) * num_layers, ropes=(rope,), **settings)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "hidden_size", "intermediate_size", "num_heads")
        check_sizes(self, "max_context")
        check_numbers(self, "norm_eps", *present_fields(self, "embedding_scale", "logit_softcap"))
        check_numbers(self, *present_fields(self, "residual_scale", "logit_scale"))
        check_flags(self, "tie_embeddings", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "sinks")
        check_flags(self, "joint_qk_norm", "pre_norms", "post_norms", "centered_norms")
        known = get_args(Activation)
        require(
            self.activation in known,
            f"activation={shown(self.activation)} must be one of {', '.join(known)}",
        )
        require(isinstance(self.family, str), f"family={shown(self.family)} must be a string")
        for name, kind in (("layers", LayerSpec), ("ropes", Rope)):
            items = getattr(self, name)
            require(
                isinstance(items, tuple) and all(isinstance(item, kind) for item in items),
                f"{name}={shown(items)} must be a tuple of {kind.__name__}",
            )
        layers = self.num_layers
        require(
            1 <= layers <= LAYER_LIMIT,
            f"the model has {layers} layers; it must have 1 to {LAYER_LIMIT}",
        )
        for name, kind in (("latent", Latent), ("experts", Experts)):
            part = getattr(self, name)
            require(
                part is None or isinstance(part, kind),
                f"{name}={shown(part)} must be {kind.__name__} or None",
            )
        is_plain = self.latent is None and self.experts is None
        require(
            is_plain or (not self.post_norms and self.residual_scale is None),
            "post_norms and residual_scale go with plain attention and feed-forward; leave latent "
            "and experts out",
        )
        require(
            self.pre_norms or self.post_norms,
            "pre_norms=False leaves no norm in a layer; give post_norms=True",
        )
        require(self.qk_norm or not self.joint_qk_norm, "joint_qk_norm=True needs qk_norm=True")
        for index, spec in enumerate(self.layers):
            self._check_layer(f"layers[{index}]", spec)
        self._check_stop_tokens()

    def _check_layer(self, name: str, spec: LayerSpec) -> None:
        require(
            self.num_heads % spec.kv_heads == 0,
            f"{name}: num_heads={self.num_heads} must be a multiple of kv_heads={spec.kv_heads}",
        )
        require(
            self.latent is not None or spec.key_size % 2 == 0,
            f"{name}: key_size={spec.key_size} must be even for RoPE",
        )
        require(
            spec.rope < len(self.ropes),
            f"{name}: rope={spec.rope} must be an index into the {len(self.ropes)} ropes",
        )
        rope = self.ropes[spec.rope]
        size = spec.key_size if self.latent is None else self.latent.rope_size
        pairs = (size if rope.rotated is None else rope.rotated) // 2
        require(
            rope.rotated is None or (self.latent is None and rope.rotated <= spec.key_size),
            f"{name}: rotated={rope.rotated} of its rope must be at most key_size={spec.key_size}, "
            "and None with latent",
        )
        scaling = rope.scaling
        require(
            scaling is None or len(scaling.wave_factors) in (0, pairs),
            f"{name}: its rope needs {pairs} wave_factors, one for each pair of rotated channels",
        )
        if (latent := self.latent) is not None:
            keeps = spec.kv_heads, spec.key_size, spec.value_size, spec.values_in_keys
            expected = 1, latent.rank + latent.rope_size, latent.rank, True
            require(
                keeps == expected,
                f"{name}: kv_heads, key_size, value_size, values_in_keys={keeps} must be "
                f"{expected}, those of latent",
            )

    def _check_stop_tokens(self) -> None:
        stops = self.stop_tokens
        require(
            isinstance(stops, tuple)
            and all(type(token) is int and 0 <= token < self.vocab_size for token in stops),
            f"stop_tokens={shown(stops)} must be a tuple of token ids below {self.vocab_size}",
        )


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    Whole numbers are int32, the seed uint32, the others float32; numpy's numbers are accepted. The
    filters apply in the order ``top_k``, ``top_p``, ``min_p``, after the temperature; a tie at a
    threshold is kept whole.

    Attributes:
        max_new_tokens: Most new tokens.
        temperature: 0 is greedy.
        top_k: Keeps the ``top_k`` most likely tokens; 0 or -1, which becomes 0, switches the filter
            off.
        top_p: Keeps the most likely tokens of this total probability; 1 switches the filter off.
        min_p: Keeps tokens of at least this share of the highest probability; 0 switches the filter
            off.
        seed: Determines every random number of the request (see `jspec.ops.sample`); None draws
            one.
        stop_tokens: End the request in addition to the model's stop tokens.
        draft_limit: Most draft tokens of the request per step; None is the step's gamma.
        ignore_eos: Whether the model's stop tokens do not end the request.
        logprobs: How many of the likeliest tokens to give with each token and its log-probability;
            0 gives the token alone, None no log-probabilities.
        prompt_logprobs: The same for the tokens of the prompt, but the first.
        routed_experts: Whether to give the experts that each token was routed to, by a model with a
            mixture of experts.
        logit_bias: What is added to the logits of tokens, as ``{token: bias}``; minus infinity bans
            a token. The fields from here on are those of `jspec.LogitsProcessor`: they change the
            logits before the temperature, also of greedy requests.
        banned_tokens: Tokens that are never generated.
        min_new_tokens: New tokens before which no stop token is generated.
        repetition_penalty: Positive logits of tokens of the prompt and the answer are divided by
            it, others multiplied; 1 switches it off.
        frequency_penalty: Subtracted from a token's logit for each time that the answer has it.
        presence_penalty: Subtracted from a token's logit where the answer has it.

    Raises:
        ValueError: For any other value.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    draft_limit: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    routed_experts: bool = False
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    banned_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        self._whole("max_new_tokens", 1, "must be at least 1")
        self._whole("top_k", -1, "must be at least 1; 0 or -1 switches it off")
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.seed is not None:
            self._whole("seed", 0, "must be in [0, 2**32), or None for a fresh one", 2**32)
        if self.draft_limit is not None:
            self._whole("draft_limit", 0, "must be at least 0; None leaves it to gamma")
        self._real(
            "temperature",
            lambda x: 0 <= x <= FLOAT32_MAX,
            "must be 0 (greedy) or a positive float32",
        )
        self._real("top_p", lambda x: 0 < x <= 1, "must be in (0, 1]; 1 switches it off")
        self._real("min_p", lambda x: 0 <= x <= 1, "must be in [0, 1]; 0 switches it off")
        object.__setattr__(self, "stop_tokens", token_ids("stop_tokens", self.stop_tokens))
        for name in ("ignore_eos", "routed_experts"):
            flag = getattr(self, name)
            require(type(flag) is bool, f"{name}={shown(flag)} must be True or False")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name, 0, "must be at least 0; None gives no log-probabilities")
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        banned = token_ids("banned_tokens", self.banned_tokens)
        object.__setattr__(self, "banned_tokens", tuple(dict.fromkeys(banned)))
        self._whole("min_new_tokens", 0, "must be at least 0")
        require(
            self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens={self.min_new_tokens} must be at most max_new_tokens="
            f"{self.max_new_tokens}",
        )
        positive_or_off = "must be a positive float32; 1 switches it off"
        self._real("repetition_penalty", lambda x: 1e-30 <= x <= 1e30, positive_or_off)
        for name in ("frequency_penalty", "presence_penalty"):
            self._real(name, lambda x: abs(x) <= 1e30, "must be finite; 0 switches it off")

    @classmethod
    def from_model(cls, path: str | os.PathLike[str], **changes: Any) -> SamplingParams:
        """The sampling parameters that a model's generation_config.json recommends.

        Nothing uses them unless they are passed. Without ``do_sample`` in the file they are greedy;
        a field of it that jspec does not implement is named in a warning.

        Args:
            path: A model directory, or a GGUF file in one.
            **changes: Parameters that replace those of the file.

        Raises:
            CheckpointError: There is no such directory, or the file is malformed.
            ValueError: A parameter is invalid.
        """
        # Models are read by packages that import this one.
        from jspec.models.sampling_defaults import sampling_defaults

        return cls(**{**sampling_defaults(path), **changes})

    def _whole(self, name: str, least: int, requirement: str, limit: int = 2**31) -> None:
        value = getattr(self, name)
        number = whole_number(value)
        if number is None:
            raise ValueError(f"{name}={shown(value)} must be a whole number")
        require(number >= least, f"{name}={shown(number)} {requirement}")
        above = requirement if limit == 2**32 else f"must be below {limit}"
        require(number < limit, f"{name}={shown(number)} {above}")
        object.__setattr__(self, name, number)

    def _real(self, name: str, valid: Callable[[Any], bool], requirement: str) -> None:
        value = getattr(self, name)
        require(_is_real(value, valid), f"{name}={shown(value)} {requirement}")
        object.__setattr__(self, name, float(value))

    @property
    def mode(self) -> SamplingMode:
        """The simplest mode that serves this request."""
        if self.temperature == 0:
            return "greedy"
        filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return "filtered" if filtered else "sampled"


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """``value`` of `SamplingParams.logit_bias` as pairs, one for each token."""
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    message = (
        f"logit_bias={shown(value)} must map token ids to biases, finite float32 or minus infinity"
    )
    is_pairs = isinstance(pairs, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in pairs)
    require(is_pairs, message)
    tokens = token_ids("logit_bias", [token for token, _ in pairs])
    biases = [bias for _, bias in pairs]
    valid = all(_is_real(bias, lambda x: x == -math.inf or abs(x) <= 1e30) for bias in biases)
    require(valid, message)
    return tuple(dict(zip(tokens, map(float, biases), strict=True)).items())


def _is_real(value: Any, valid: Callable[[Any], bool]) -> bool:
    """Whether ``value`` is a number, no bool, and ``valid``."""
    # Compared before it becomes a float, which an int of 400 digits cannot.
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and valid(value)


def positive(name: str, value: Any, limit: int = 2**31 - 1) -> int:
    """``value`` as a number in 1..limit. Raises `ValueError`, by ``name``, for any other."""
    number = whole_number(value)
    if number is None or not 1 <= number <= limit:
        least = "a whole number, at least 1" if number is None else "at least 1"
        bound = f"at most {limit}" if number is not None and number > limit else least
        raise ValueError(f"{name}={shown(value)} must be {bound}")
    return number


def refuse_class(name: str, value: Any) -> None:
    """Raise `TypeError` for a class where an object of it is needed."""
    if isinstance(value, type):
        raise TypeError(f"{name}={value.__name__} is a class; pass one of it, {value.__name__}()")
