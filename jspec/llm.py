"""Text in, text out: a model, its tokenizer and its chat template as one object."""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from jspec.config import SamplingParams, shown, whole_number
from jspec.decode.checks import one_each
from jspec.decode.draft import Drafter, NgramDraft, NoDraft
from jspec.decode.generation import generate
from jspec.decode.options import DecodeOptions, check_names
from jspec.decode.score import score_top_tokens
from jspec.decode.settings import check_draft, check_target
from jspec.decode.state import Models
from jspec.dispatch import Backends
from jspec.eval.sample import prepared
from jspec.models.bundled import bundled_path
from jspec.models.chat import ChatTemplate, Message, load_chat_template
from jspec.models.checkpoint import load_model
from jspec.models.prompts import Prompt, encode_prompt, encode_prompts
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
        logprobs: for each token a dict from token ids to log-probabilities, natural logs: the token
            itself, then the most likely tokens at its place, as many as requested, the likeliest
            first. They are laid out as vLLM's, with a number in place of a ``Logprob``. None unless
            requested.
    """

    text: str
    tokens: tuple[int, ...]
    finished: str
    seed: int
    logprobs: tuple[dict[int, float], ...] | None = None


class LLM:
    """A model with its tokenizer: ``LLM("path/to/model").generate("Once upon a time")[0].text``.

    Args:
        model: a directory or GGUF file, as in `load_model`, a model, or None for the bundled model.
        tokenizer: the tokenizer; None loads that of the directory or file.
        chat_template: the template of `chat`, or its source; None loads that of the directory or
            file.
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
        chat_template: ChatTemplate | str | None = None,
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
        if isinstance(chat_template, str):
            chat_template = ChatTemplate(chat_template, tokenizer.special_tokens, "chat_template")
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
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        stop: str | Sequence[str] = (),
        n: int = 1,
        logprobs: int | None = None,
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
                `Completion.logprobs`; 0 gives the token itself alone, None no log-probabilities.
                They are the model's, at temperature 1 without filters, and cost another prefill.

        Returns:
            ``n`` completions of the first prompt, then of the second, and so on.

        Raises:
            TypeError: a prompt has another form.
            ValueError: as `jspec.generate`.
        """
        ids = encode_prompts(self.tokenizer, prompts)
        return self._complete(ids, params, stop, n, logprobs)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        stop: str | Sequence[str] = (),
        n: int = 1,
        logprobs: int | None = None,
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
        return self._complete(ids, params, stop, n, logprobs)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams = SamplingParams(),
        *,
        stop: str | Sequence[str] = (),
        **settings: Any,
    ) -> Iterator[str]:
        """Stream the text of one answer while it is decoded.

        Closing the iterator ends decoding after the current chunk.

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

    def _complete(self, prompts, params, stop, n, logprobs) -> list[Completion]:
        if (whole_number(n) or 0) < 1:
            raise ValueError(f"n={shown(n)} must be a whole number, at least 1")
        stop, top = _texts(stop), self._checked_logprobs(logprobs)
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
            completions += self._answer(ids[part], params[part], stop, top)
        return completions

    def _answer(self, prompts, params, stop, top: int | None) -> list[Completion]:
        """Completions of one batch.

        ``top``: how many of the likeliest tokens to give for each token; None for no
        log-probabilities.
        """
        rows = [self._row(ids, p, stop) for ids, p in zip(prompts, params, strict=True)]
        params = [with_stops(p, stop, self.tokenizer) for p in params]

        def on_tokens(row: int, tokens: tuple[int, ...]) -> int | None:
            return rows[row].take(tokens)[1]

        output = generate(self.model, prompts, params, on_tokens=on_tokens, **self._options)
        for row in rows:
            row.close()
        completions = [
            Completion(row.text, tokens, "stop" if row.stopped else why, seed)
            for row, tokens, why, seed in zip(
                rows, output.tokens, output.finished, output.seeds, strict=True
            )
        ]
        return completions if top is None else self._scored(prompts, completions, top)

    def _scored(self, prompts, completions: list[Completion], top: int) -> list[Completion]:
        """``completions`` with log-probabilities."""
        scores = score_top_tokens(
            self.model,
            [[*ids, *one.tokens] for ids, one in zip(prompts, completions, strict=True)],
            top,
            backends=self._options.get("backends", Backends()),
            exact=self._options.get("exact", False),
        )
        scored = []
        for score, one in zip(scores, completions, strict=True):
            begin = len(score.logprobs) - len(one.tokens)
            chosen = zip(one.tokens, score.logprobs[begin:].tolist(), strict=True)
            likely = zip(score.top_tokens[begin:], score.top_logprobs[begin:], strict=True)
            logprobs = tuple(
                {token: value} | dict(zip(ids.tolist(), values.tolist(), strict=True))
                for (token, value), (ids, values) in zip(chosen, likely, strict=True)
            )
            scored.append(dataclasses.replace(one, logprobs=logprobs))
        return scored

    def _checked_logprobs(self, logprobs: int | None) -> int | None:
        """``logprobs`` as `generate` takes it; raises `ValueError` for anything else."""
        count, limit = whole_number(logprobs), self.model.config.vocab_size
        if logprobs is not None and (count is None or not 0 <= count <= limit):
            raise ValueError(
                f"logprobs={shown(logprobs)} must be how many of the {limit} tokens to give with "
                "each token: 0 for the token itself alone, or None for no log-probabilities"
            )
        return count

    def _row(self, prompt: Sequence[int], params: SamplingParams, stop: tuple[str, ...]) -> RowText:
        ends = () if params.ignore_eos else self.model.config.stop_tokens
        return RowText(self.tokenizer, stop, ends, prompt)


def _is_listing(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value)


def _texts(stop: str | Sequence[str]) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop={stop!r:.80} must be a text or texts, none of them empty")
    return texts
