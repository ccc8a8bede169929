"""Text in, text out: a model, its tokenizer and its chat template as one object."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jspec.config import SamplingParams, shown, whole_number
from jspec.decode.blocks import check_blocks
from jspec.decode.checks import agreed_params, check_requests
from jspec.decode.draft import NgramDraft, NoDraft
from jspec.decode.engine import OnUpdate, check_on_update
from jspec.decode.engine_pool import LEAST_ROOM, EnginePool
from jspec.decode.logprobs import Logprobs, TokenScores
from jspec.decode.options import DecodeOptions, ResolvedOptions, check_names
from jspec.decode.request import Request
from jspec.decode.rows import power_of_two
from jspec.decode.settings import check_draft, check_target
from jspec.decode.state import Models
from jspec.decode.weights import WeightTypes
from jspec.eval.sample import prepared
from jspec.models.bundled import bundled_path
from jspec.models.chat import ChatTemplate, Message, load_chat_template
from jspec.models.checkpoint import load_model
from jspec.models.hashes import FOLDER
from jspec.models.prompts import Prompt, encode_prompt, encode_prompts
from jspec.models.text import RowText, with_stops
from jspec.models.tokenizer import Tokenizer, load_tokenizer
from jspec.policies import Dense
from jspec.policies.hata import with_hashes
from jspec.typing import Model

QUICK = 2.0  # seconds without a bar of progress


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer to a prompt.

    Attributes:
        text: the text, without the stop text that ended it.
        tokens: all generated token ids.
        finished: ``stop`` or ``length``.
        seed: seed that reproduces a sampled answer.
        steps: verification steps that its tokens took.
        logprobs: for each token a dict from token ids to log-probabilities, natural logs: the token
            itself, then the most likely tokens at its place, as many as requested, the likeliest
            first. They are laid out as vLLM's, with a number in place of a ``Logprob``. None unless
            requested.
        logprob_arrays: the same as arrays, and those under the distribution that each token was
            drawn from. None unless requested.
        prompt_logprobs: for each token of the prompt the same as in ``logprobs``, None for the
            first. None unless requested.
        routed_experts: the experts of the tokens of prompt and answer, but the last, as
            `Request.routed_experts`; None unless ``params`` ask.
    """

    text: str
    tokens: tuple[int, ...]
    finished: str
    seed: int
    steps: int
    logprobs: tuple[dict[int, float], ...] | None = None
    logprob_arrays: Logprobs | None = None
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = None
    routed_experts: np.ndarray | None = None


class LLM:
    """A model with its tokenizer: ``LLM("path/to/model").generate("Once upon a time")[0].text``.

    Prompts decode by `jspec.Engine`: an answer that ends makes room for the next prompt. Engines
    are made when first needed, and again for more prompts at a time or longer requests; they keep
    their caches between calls. Threads may share an `LLM`.

    Args:
        model: a directory or GGUF file, as in `load_model`, a model, or None for the bundled model.
        tokenizer: the tokenizer; None loads that of the directory or file.
        chat_template: the template of `chat`, or its source; None loads that of the directory or
            file.
        batch: prompts decoded at a time, where there are several.
        cache_blocks: blocks of 128 positions that these share, as in `Engine`; None: each has
            memory for the longest one.
        **options: the drafter, gamma and other options of decoding: `DecodeOptions`.

    Raises:
        CheckpointError: as `load_model`.
        ValueError: an argument is invalid, or a model is passed without a tokenizer.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Model | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        chat_template: ChatTemplate | str | None = None,
        batch: int = 8,
        cache_blocks: int | None = None,
        **options: Unpack[DecodeOptions],
    ):
        if (whole_number(batch) or 0) < 1:
            raise ValueError(f"batch={shown(batch)} must be a whole number, at least 1")
        check_names(options)
        draft, target = options.get("draft", NgramDraft()), options.get("target", Dense())
        draft = NoDraft() if draft is None else draft
        check_draft(draft)
        check_target(target, draft, 0)
        path = None
        if model is None or isinstance(model, str | os.PathLike):
            path = bundled_path() if model is None else Path(model)
            tokenizer = load_tokenizer(path) if tokenizer is None else tokenizer
            chat_template = load_chat_template(path) if chat_template is None else chat_template
            model = load_model(path)
        if not hasattr(model, "config"):
            raise TypeError(f"model={shown(model)} must be a path, a model, or None")
        if tokenizer is None:
            raise ValueError("a model without a directory needs tokenizer=load_tokenizer(...)")
        if isinstance(chat_template, str):
            chat_template = ChatTemplate(chat_template, tokenizer.special_tokens, "chat_template")
        self.model = model
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._batch = batch
        policy_params = options.get("policy_params")
        self._params_of: Callable[[Model], Any] | None = None
        if policy_params is None:
            policy = draft.cache_policy if isinstance(target, Dense) else target
            # The model's directory may have trained hashes.
            policy = policy if path is None else with_hashes(policy, path / FOLDER)
            self._params_of = functools.partial(prepared, policy, tokenizer=tokenizer)
            policy_params = self._params_of(model)
        options = {**options, "draft": draft, "policy_params": policy_params}
        # What a drafter makes of the model is made once.
        self._resolved = ResolvedOptions.of(model, options)
        self._options: DecodeOptions = {**options, "draft_model": self._models.draft}
        if cache_blocks is not None:
            check_blocks(self._resolved, cache_blocks, LEAST_ROOM)
        self._engines = EnginePool(model, self._options, cache_blocks)

    @property
    def _models(self) -> Models:
        return self._resolved.models

    @functools.cached_property
    def _weight_types(self) -> WeightTypes:
        return WeightTypes(self._models.target)

    def update(self, weights: Any, *, on_update: OnUpdate = "keep", donate: bool = False) -> None:
        """Replace the weights of the model, as `Engine.update` does; nothing compiles.

        ``model`` is another object afterwards. What drafter and policy make of the model is made
        again, also by a text.

        Args:
            weights: a pytree of the model's own structure, an `nnx.State`, or a model.
            on_update: what becomes of answers that are being streamed, or decoded by other threads:
                ``"keep"``, ``"recompute"`` or ``"abort"``.
            donate: whether arrays of ``weights`` that must be copied are freed one by one.

        Raises:
            ValueError: ``weights`` do not fit the model.
        """
        check_on_update(on_update)
        types = self._weight_types
        arrays = types.matched(weights, self._resolved.flat)

        def update() -> tuple[ResolvedOptions, DecodeOptions]:
            self._resolved, self.model = self._resolved.without_weights(types.blank), types.blank
            self._options = {**self._options, "draft_model": None, "policy_params": None}
            target = types.model_of(arrays, donate=donate)
            self._resolved = self._resolved.updated(target, self._params_of)
            self.model = self._models.target
            self._options["draft_model"] = self._models.draft
            self._options["policy_params"] = self._models.policy
            return self._resolved, self._options

        self._engines.update(update, on_update, types.blank)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        stop: str | Sequence[str] = (),
        n: int = 1,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> list[Completion]:
        """Complete prompts.

        Args:
            prompts: one prompt or several. A prompt is a text, token ids, ``{"prompt": text}`` or
                ``{"prompt_token_ids": ids}``.
            params: sampling parameters of all prompts, or of each. The n answers of a prompt with a
                seed take that seed and those after it.
            stop: texts that end an answer, which is cut before the first of them.
            n: completions of each prompt.
            logprobs: how many of the most likely tokens to give with each token, as
                `Completion.logprobs`; 0 gives the token itself alone, None what ``params`` ask
                for. They are the model's, at temperature 1 without filters and processors, from the
                passes that verify the tokens.
            prompt_logprobs: the same for the tokens of the prompt, from its prefill.

        Returns:
            ``n`` completions of the first prompt, then of the second, and so on.

        Raises:
            TypeError: a prompt has another form.
            ValueError: as `jspec.generate`.
        """
        ids = encode_prompts(self.tokenizer, prompts)
        return self._complete(ids, params, stop, n, logprobs, prompt_logprobs)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        stop: str | Sequence[str] = (),
        n: int = 1,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **settings: Any,
    ) -> list[Completion]:
        """Answer conversations, rendered by the model's chat template.

        Args:
            conversations: one conversation or several; a conversation is a sequence of messages,
                mappings with a ``role`` and a ``content``.
            params: as in `generate`.
            stop: as in `generate`.
            n: as in `generate`.
            logprobs: as in `generate`.
            prompt_logprobs: as in `generate`.
            **settings: as in `ChatTemplate.render`: ``add_generation_prompt``,
                ``continue_final_message``, ``chat_template`` and variables of the template, as
                ``tools=[...]`` or ``enable_thinking=False``.

        Returns:
            As `generate`.

        Raises:
            ChatTemplateError: the template is malformed or refuses the messages.
            ValueError: the model has no chat template, or an argument is invalid.
        """
        one = not _is_listing(conversations) or isinstance(conversations[0], Mapping)
        several: Any = [conversations] if one else conversations
        ids = [self.encode_chat(messages, **settings) for messages in several]
        return self._complete(ids, params, stop, n, logprobs, prompt_logprobs)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams = SamplingParams(),
        *,
        stop: str | Sequence[str] = (),
        **settings: Any,
    ) -> Iterator[str]:
        """Stream the text of one answer while it is decoded.

        Reading it decodes. Closing the iterator ends decoding.

        Args:
            prompt: a prompt as in `generate`, or the messages of a conversation.
            params: sampling parameters.
            stop: as in `generate`.
            **settings: as in `chat`.

        Yields:
            Pieces of the text.
        """
        any_prompt: Any = prompt
        if _is_listing(prompt) and isinstance(any_prompt[0], Mapping):
            ids = self.encode_chat(any_prompt, **settings)
        elif settings:
            raise TypeError(f"{next(iter(settings))}= is for conversations; the prompt is none")
        else:
            ids = encode_prompt(self.tokenizer, any_prompt)
        pieces: collections.deque[str] = collections.deque()
        answer = _Answer(self._row(ids, params, _texts(stop)), pieces.append)
        params = with_stops(params, _texts(stop), self.tokenizer)
        rows = [np.asarray(ids)]
        check_requests(self._models, rows, [params])
        agreed = agreed_params(self._models, rows, params, None)
        requests = self._engines.submit(rows, agreed, [answer.take], slots=1)
        try:
            while requests[0].finished is None:
                while pieces:
                    yield pieces.popleft()
                self._engines.step(requests[0])
            answer.close(requests[0])
            yield from pieces
        finally:
            self._engines.cancel(requests)

    def encode_chat(self, messages: Sequence[Message], /, **settings: Any) -> list[int]:
        """Convert a conversation to token ids, with the start of the model's answer.

        Args:
            messages: mappings with a ``role`` and a ``content``.
            **settings: as in `chat`.

        Raises:
            ChatTemplateError: the template is malformed or refuses the messages.
            ValueError: the model has no chat template, or an argument is invalid.
        """
        template = self.chat_template
        if template is None:
            if settings.get("chat_template") is None:
                raise ValueError(
                    "the model has no chat template; pass chat_template=, a template or its "
                    "source, or a text to generate()"
                )
            template = ChatTemplate({}, self.tokenizer.special_tokens, "chat_template")
        return template.encode(self.tokenizer, messages, **settings)

    def _complete(self, prompts, params, stop, n, logprobs, prompt_logprobs) -> list[Completion]:
        if (whole_number(n) or 0) < 1:
            raise ValueError(f"n={shown(n)} must be a whole number, at least 1")
        stop, asked = _texts(stop), {}
        if (count := self._checked_logprobs("logprobs", logprobs)) is not None:
            asked["logprobs"] = count
        if (count := self._checked_logprobs("prompt_logprobs", prompt_logprobs)) is not None:
            asked["prompt_logprobs"] = count
        # Each prompt has a seed by then, which the condition tells type checkers; its other answers
        # take the seeds that follow.
        params = [
            dataclasses.replace(p, seed=(p.seed + sample) % 2**32, **asked)
            for p in agreed_params(self._models, list(map(np.asarray, prompts)), params, n)
            if p.seed is not None
            for sample in range(n)
        ]
        ids = [prompt for prompt in prompts for _ in range(n)]
        answers = [_Answer(self._row(*row, stop)) for row in zip(ids, params, strict=True)]
        params = [with_stops(p, stop, self.tokenizer) for p in params]
        check_requests(self._models, [np.asarray(x) for x in ids], params)
        slots = min(self._batch, power_of_two(len(ids)))
        requests = self._engines.submit(ids, params, [x.take for x in answers], slots=slots)
        try:
            with _progress(requests) as show:
                for request in requests:
                    while request.finished is None:
                        self._engines.step(request)
                        show()
        finally:
            self._engines.cancel(requests)
        completions = [x.close(request) for x, request in zip(answers, requests, strict=True)]
        return [
            one if x is None else dataclasses.replace(one, prompt_logprobs=_by_token(prompt, x))
            for one, prompt, x in zip(
                completions, ids, (request.prompt_logprobs for request in requests), strict=True
            )
        ]

    def _checked_logprobs(self, name: str, logprobs: int | None) -> int | None:
        """``logprobs`` as `generate` takes it; raises `ValueError` for anything else."""
        count, limit = whole_number(logprobs), self.model.config.vocab_size
        if logprobs is not None and (count is None or not 0 <= count <= limit):
            raise ValueError(
                f"{name}={shown(logprobs)} must be how many of the {limit} tokens to give with "
                "each token: 0 for the token itself alone, or None for no log-probabilities"
            )
        return count

    def _row(self, prompt: Sequence[int], params: SamplingParams, stop: tuple[str, ...]) -> RowText:
        ends = () if params.ignore_eos else self.model.config.stop_tokens
        return RowText(self.tokenizer, stop, ends, prompt)


class _Answer:
    """The text of a request's tokens, up to a stop text.

    Args:
        row: decodes the tokens.
        show: called with each piece of the text.
    """

    def __init__(self, row: RowText, show: Callable[[str], None] = lambda text: None):
        self._row, self._show = row, show

    def take(self, tokens: tuple[int, ...]) -> int | None:
        """The callback of the request."""
        text, end = self._row.take(tokens)
        if text:
            self._show(text)
        return end

    def close(self, request: Request) -> Completion:
        """The completion of the request, which has ended; raises what ended it by an error."""
        if request.error is not None:
            raise request.error
        if request.finished == "aborted":
            raise RuntimeError("the answer was aborted by an update of the weights; ask again")
        if request.finished == "interrupted":
            raise RuntimeError("the engine was interrupted in another call; ask again")
        if text := self._row.close():
            self._show(text)
        why = "stop" if self._row.stopped else request.finished
        seed = request.params.seed
        assert why is not None
        assert seed is not None
        arrays, tokens = request.logprobs, request.tokens
        logprobs = None if arrays is None else arrays.model.by_token(tokens)
        answer = self._row.text, tokens, why, seed, request.steps
        return Completion(*answer, logprobs, arrays, routed_experts=request.routed_experts)


@contextlib.contextmanager
def _progress(requests: Sequence[Request]) -> Iterator[Callable[[], None]]:
    """Yields what shows how many requests have ended, on a terminal, where it takes long."""
    begin, bars = time.monotonic(), None
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

    def show() -> None:
        nonlocal bars
        if bars is None and sys.stderr.isatty() and time.monotonic() - begin > QUICK:
            bars = Progress(*columns, console=Console(stderr=True), transient=True)
            bars.add_task("", total=len(requests))
            bars.start()
        if bars is not None:
            ended = sum(request.finished is not None for request in requests)
            bars.update(bars.task_ids[0], completed=ended)

    try:
        yield show
    finally:
        if bars is not None:
            bars.stop()


def _by_token(prompt: Sequence[int], scores: TokenScores) -> tuple[dict[int, float] | None, ...]:
    """Log-probabilities of the tokens of a prompt, None for the first one."""
    return None, *scores.by_token(prompt[1:])


def _is_listing(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value)


def _texts(stop: str | Sequence[str]) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop={shown(stop)} must be a text or texts, none of them empty")
    return texts
