"""Text in, text out: a model, its tokenizer and its chat template as one object."""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from jspec.config import SamplingParams, shown, whole_number
from jspec.decode.checks import one_each
from jspec.decode.draft import Drafter, NgramDraft, NoDraft
from jspec.decode.generation import generate
from jspec.decode.options import DecodeOptions, check_names
from jspec.decode.score import score_tokens
from jspec.decode.settings import check_draft, check_target
from jspec.decode.state import Models
from jspec.dispatch import Backends
from jspec.eval.sample import prepared
from jspec.models.bundled import bundled_path
from jspec.models.chat import ChatTemplate, Message, load_chat_template
from jspec.models.checkpoint import load_model
from jspec.models.text import RowText, with_stops
from jspec.models.tokenizer import Tokenizer, load_tokenizer
from jspec.policies import Dense, Policy
from jspec.policies.hata import with_hashes
from jspec.typing import Model


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer to a prompt.

    Attributes:
        text: the text, without the stop text that ended it.
        tokens: all generated token ids.
        finished: ``stop`` or ``length``.
        seed: seed that reproduces a sampled answer.
        logprobs: float32 ``[len(tokens)]``, log-probability of each token; None unless requested.
    """

    text: str
    tokens: tuple[int, ...]
    finished: str
    seed: int
    logprobs: np.ndarray | None = None


class LLM:
    """A model with its tokenizer: ``LLM("path/to/model").generate("Once upon a time")[0].text``.

    Args:
        model: a directory or GGUF file, as in `load_model`, a model, or None for the bundled model.
        tokenizer: the tokenizer; None loads that of the directory or file.
        chat_template: the template of `chat`; None loads that of the directory or file.
        batch: prompts decoded at a time.
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
        chat_template: ChatTemplate | None = None,
        batch: int = 8,
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
        if tokenizer is None:
            raise ValueError("a model without a directory needs tokenizer=load_tokenizer(...)")
        self.model = model
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._batch = batch
        policy_params = options.get("policy_params")
        if policy_params is None:
            policy_params = self._arrays(draft, target, path)
        # What a drafter makes of the model is made once.
        draft_model = draft.prepare(Models(model, options.get("draft_model"))).draft
        self._options: DecodeOptions = {
            **options,
            "draft": draft,
            "draft_model": draft_model,
            "policy_params": policy_params,
        }

    def _arrays(self, draft: Drafter, target: Policy, path: Path | None) -> Any:
        """The arrays of the policy in use, computed from a text that ships with jspec.

        ``path``: the model's directory, which may have trained hashes.
        """
        policy = draft.cache_policy if isinstance(target, Dense) else target
        policy = policy if path is None else with_hashes(policy, path)
        return prepared(policy, self.model, self.tokenizer)

    def generate(
        self,
        prompts: str | bytes | Sequence[str | bytes],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        stop: str | Sequence[str] = (),
        n: int = 1,
        logprobs: bool = False,
    ) -> list[Completion]:
        """Complete prompts.

        Args:
            prompts: one text or several.
            params: sampling parameters of all prompts, or of each. The n answers of a prompt with a
                seed take that seed and those after it.
            stop: texts that end an answer, which is cut before the first of them.
            n: completions of each prompt.
            logprobs: whether to compute the log-probability of each token under the model, at
                temperature 1 without filters. It costs another prefill.

        Returns:
            ``n`` completions of the first prompt, then of the second, and so on.

        Raises:
            ValueError: as `jspec.generate`.
        """
        prompts = [prompts] if isinstance(prompts, str | bytes) else prompts
        ids = [self.tokenizer.encode(prompt) for prompt in prompts]
        return self._complete(ids, params, stop, n, logprobs)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        stop: str | Sequence[str] = (),
        n: int = 1,
        logprobs: bool = False,
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
            **settings: variables of the template, as ``tools=[...]`` or ``enable_thinking=False``.

        Returns:
            As `generate`.

        Raises:
            ValueError: the model has no chat template, or it refuses the messages.
        """
        single = not len(conversations) or isinstance(conversations[0], Mapping)
        several: Any = [conversations] if single else conversations
        ids = [self.encode_chat(messages, **settings) for messages in several]
        return self._complete(ids, params, stop, n, logprobs)

    def stream(
        self,
        prompt: str | bytes | Sequence[Message],
        params: SamplingParams = SamplingParams(),
        *,
        stop: str | Sequence[str] = (),
        **settings: Any,
    ) -> Iterator[str]:
        """Stream the text of one answer while it is decoded.

        Closing the iterator ends decoding after the current chunk.

        Args:
            prompt: a text, or the messages of a conversation.
            params: sampling parameters.
            stop: as in `generate`.
            **settings: as in `chat`.

        Yields:
            Pieces of the text.
        """
        if isinstance(prompt, str | bytes):
            ids = self.tokenizer.encode(prompt)
        else:
            ids = self.encode_chat(prompt, **settings)
        pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        closed = threading.Event()
        row = self._row(ids, params, _texts(stop))
        params = with_stops(params, _texts(stop), self.tokenizer)

        def on_tokens(_: int, tokens: tuple[int, ...]) -> int | None:
            text, end = row.take(tokens)
            pieces.put(text)
            return 0 if closed.is_set() else end

        def decode() -> None:
            try:
                generate(self.model, [ids], params, on_tokens=on_tokens, **self._options)
                pieces.put(row.close())
                pieces.put(None)
            except BaseException as error:  # raised again where the text is read
                pieces.put(error)

        # Decoding runs ahead of the caller; once closed it ends after the current chunk.
        thread = threading.Thread(target=decode, daemon=True)
        thread.start()
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                if piece:
                    yield piece
        finally:
            closed.set()
            thread.join()

    def encode_chat(self, messages: Sequence[Message], **settings: Any) -> list[int]:
        """Convert a conversation to token ids, with the start of the model's answer.

        Raises:
            ValueError: the model has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(
                "the model has no chat template; pass chat_template=ChatTemplate(...), or a text "
                "to generate()"
            )
        return self.chat_template.encode(self.tokenizer, messages, **settings)

    def _complete(self, prompts, params, stop, n, logprobs) -> list[Completion]:
        if (whole_number(n) or 0) < 1:
            raise ValueError(f"n={shown(n)} must be a whole number, at least 1")
        stop = _texts(stop)
        # `one_each` gives every prompt a seed; its other answers take the seeds that follow.
        params = [
            dataclasses.replace(p, seed=(p.seed + sample) % 2**32)
            for p in one_each(params, len(prompts))
            if p.seed is not None
            for sample in range(n)
        ]
        ids = [prompt for prompt in prompts for _ in range(n)]
        completions: list[Completion] = []
        for begin in range(0, len(ids), self._batch):
            part = slice(begin, begin + self._batch)
            completions += self._answer(ids[part], params[part], stop, logprobs)
        return completions

    def _answer(self, prompts, params, stop, logprobs) -> list[Completion]:
        """Completions of one batch."""
        rows = [self._row(ids, p, stop) for ids, p in zip(prompts, params, strict=True)]
        params = [with_stops(p, stop, self.tokenizer) for p in params]

        def on_tokens(row: int, tokens: tuple[int, ...]) -> int | None:
            return rows[row].take(tokens)[1]

        output = generate(self.model, prompts, params, on_tokens=on_tokens, **self._options)
        for row in rows:
            row.close()
        marks: list[np.ndarray | None] = [None] * len(prompts)
        if logprobs:
            whole = [
                [*prompt, *tokens] for prompt, tokens in zip(prompts, output.tokens, strict=True)
            ]
            scores = score_tokens(
                self.model,
                whole,
                backends=self._options.get("backends", Backends()),
                exact=self._options.get("exact", False),
            )
            marks = [s[-len(t) :] for s, t in zip(scores, output.tokens, strict=True)]
        return [
            Completion(row.text, tokens, "stop" if row.stopped else why, seed, mark)
            for row, tokens, why, seed, mark in zip(
                rows, output.tokens, output.finished, output.seeds, marks, strict=True
            )
        ]

    def _row(self, prompt: Sequence[int], params: SamplingParams, stop: tuple[str, ...]) -> RowText:
        ends = () if params.ignore_eos else self.model.config.stop_tokens
        return RowText(self.tokenizer, stop, ends, prompt)


def _texts(stop: str | Sequence[str]) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop={stop!r:.80} must be a text or texts, none of them empty")
    return texts
