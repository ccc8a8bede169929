"""`LLM`: text and conversations in, text out, by the first layers of the bundled model."""

import dataclasses
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec.decode.engine_pool import EnginePool, room_for
from jspec.decode.score import score_top_tokens
from jspec.decode.weights import array_like
from jspec.models.bundled import bundled_path
from jspec.models.chat import ChatTemplate
from jspec.models.tokenizer import Tokenizer
from tests.models import tokenizers as made

CODE = "import os\nimport sys\n\n\ndef main():\n"
TALK = [{"role": "user", "content": CODE}]
SHORT = jspec.SamplingParams(max_new_tokens=12)
HOT = jspec.SamplingParams(max_new_tokens=12, temperature=1.0, seed=2**32 - 1)


@pytest.fixture(scope="module")
def llm(short_bundled) -> jspec.LLM:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, {"bos_token": "<|bos|>"}, "test")
    tokenizer = jspec.load_tokenizer(bundled_path())
    return jspec.LLM(short_bundled, tokenizer=tokenizer, chat_template=template)


@pytest.fixture(scope="module")
def plain(llm):
    """Tokens of the call beneath."""
    ids = [llm.tokenizer.encode(CODE)]
    return jspec.generate(llm.model, ids, SHORT, draft=jspec.NgramDraft()).tokens[0]


def test_a_completion_is_what_generate_gives(llm, plain):
    (result,) = llm.generate(CODE, SHORT)
    assert result.tokens == plain
    assert result.text == llm.tokenizer.decode(plain)
    assert result.finished == "length"
    assert result.logprobs is None


def test_a_conversation_goes_through_the_template(llm, plain):
    assert llm.encode_chat(TALK) == llm.tokenizer.encode(CODE)  # special tokens come once
    assert [c.tokens for c in llm.chat(TALK, SHORT)] == [plain]
    several = llm.chat([TALK, TALK], [SHORT, HOT])
    assert several[0].tokens == plain
    assert several[1].seed == HOT.seed


def test_a_stream_is_the_text_in_pieces(llm, plain):
    text = llm.tokenizer.decode(plain)
    pieces = list(llm.stream(CODE, SHORT))
    assert "".join(pieces) == text
    assert all(pieces)
    assert len(pieces) > 1
    assert "".join(llm.stream(TALK, SHORT)) == text
    assert "".join(llm.stream(CODE, SHORT, stop=text[4:8])) == text[: text.index(text[4:8])]


def test_a_stream_may_be_closed_and_its_errors_reach_the_reader(llm):
    stream = llm.stream(CODE, jspec.SamplingParams(max_new_tokens=1000))
    assert next(stream)
    engine = llm._engines.engines[1]
    before = engine.stats.committed
    assert engine.busy
    stream.close()
    assert not engine.busy
    assert engine.stats.committed - before < 500
    with pytest.raises(ValueError, match="exceeds the context"):
        list(llm.stream(CODE, jspec.SamplingParams(max_new_tokens=10**6)))


def test_streams_and_calls_take_turns(llm, plain):
    text = llm.tokenizer.decode(plain)
    streams = [llm.stream(CODE, SHORT) for _ in range(2)]
    parts = [next(stream) for stream in streams]
    assert llm.generate(CODE, SHORT)[0].text == text
    assert [part + "".join(stream) for part, stream in zip(parts, streams, strict=True)] == [
        text
    ] * 2


def test_threads_share_a_model(llm, plain):
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(lambda _: "".join(llm.stream(CODE, SHORT)), range(3)))
    assert texts == [llm.tokenizer.decode(plain)] * 3


def test_no_number_of_prompts_and_no_length_compiles_again(llm):
    lengths = [12, 1, 5, 3, 9, 2, 7, 4, 6, 8, 10]
    params = [jspec.SamplingParams(max_new_tokens=x) for x in lengths]
    prompts = [CODE[: 5 + i] for i in range(len(lengths))]
    whole = llm.generate(prompts, params)
    assert [len(one.tokens) for one in whole] == lengths
    assert all(1 <= one.steps <= len(one.tokens) for one in whole)
    engine = llm._engines.engines[8]
    compiled = engine.stats.compilations
    part = llm.generate(prompts[3:8], params[3:8])
    assert [one.tokens for one in part] == [one.tokens for one in whole[3:8]]
    assert llm._engines.engines[8] is engine
    assert engine.stats.compilations == compiled


def test_an_interrupted_engine_gives_no_part_of_an_answer(llm, monkeypatch):
    stream = llm.stream(CODE, jspec.SamplingParams(max_new_tokens=1000))
    assert next(stream)

    def interrupt(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("jspec.decode.runner.Runner.decode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(CODE, SHORT)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="the engine was interrupted in another call"):
        list(stream)
    assert len(llm.generate(CODE, SHORT)[0].tokens) == 12


def test_fewer_prompts_share_the_engine_of_more(short_bundled):
    """Two of them make no cache of eight rows."""
    pool = EnginePool(short_bundled, {"draft": None})

    def engines_after(slots, new):
        params = jspec.SamplingParams(max_new_tokens=new, seed=0)
        pool.cancel(pool.submit([[1], [2]], [params] * 2, [lambda tokens: None] * 2, slots=slots))
        return {size: engine.capacity for size, engine in pool.engines.items()}

    assert engines_after(2, 8) == {2: 512}
    assert engines_after(4, 8) == {4: 512}
    assert engines_after(2, 8) == {4: 512}
    assert engines_after(2, 600) == {4: 512, 2: 640}
    assert engines_after(1, 8) == {4: 512, 2: 640, 1: 512}
    assert engines_after(8, 8) == {2: 640, 1: 512, 8: 512}


def test_prompts_share_blocks(short_bundled, llm):
    """Five of up to 512 positions each in eight blocks; alone, the slots would have 32."""
    settings = {"tokenizer": llm.tokenizer, "draft": None}
    with pytest.raises(ValueError, match="cache_blocks=3 of 128 positions must be at least 4"):
        jspec.LLM(short_bundled, **settings, cache_blocks=3)
    other = jspec.LLM(short_bundled, **settings, cache_blocks=8)
    prompts = [CODE[: 40 + i] for i in range(5)]
    params = [jspec.SamplingParams(max_new_tokens=n) for n in (12, 3, 90, 1, 12)]
    whole = llm.generate(prompts, params)
    assert [x.tokens for x in other.generate(prompts, params)] == [x.tokens for x in whole]
    assert other._engines.engines[8].cache_blocks == 8
    other.generate(CODE, SHORT)
    assert other._engines.engines[1].cache_blocks is None


@pytest.mark.exhaustive
def test_a_longer_request_gets_more_room(short_bundled, llm):
    other = jspec.LLM(short_bundled, tokenizer=llm.tokenizer, draft=None)
    other.generate("x = ", SHORT)
    small = other._engines.engines[1]
    long = jspec.SamplingParams(max_new_tokens=600, stop_tokens=tuple(range(200, 230)))
    assert len(other.generate("x = ", long)[0].tokens) <= 600
    large = other._engines.engines[1]
    assert large.capacity > small.capacity
    assert large.stop_tokens >= 30
    other.generate("x = ", SHORT)
    assert other._engines.engines[1] is large


def test_replaced_weights_decode(llm):
    model = Script([1, 2, 3])
    other = jspec.LLM(model, tokenizer=llm.tokenizer, draft=None)
    short = jspec.SamplingParams(max_new_tokens=3)
    assert other.generate([1], short)[0].tokens == (2, 3, 1)
    model.following.set_value(Script([1, 3, 2]).following.get_value())
    assert other.generate([1], short)[0].tokens == (3, 2, 1)


def test_updated_weights_decode_and_compile_nothing(llm, monkeypatch):
    """In answers, log-probabilities and streams; the earlier weights are free."""
    scripts = [Script([1, 2, 3]), Script([1, 3, 2])]
    other = jspec.LLM(scripts[0], tokenizer=llm.tokenizer, draft=None)
    short = jspec.SamplingParams(max_new_tokens=3)
    assert other.generate([1], short)[0].tokens == (2, 3, 1)
    engine, following = other._engines.engines[1], scripts[1].following.get_value()
    before = weakref.ref(scripts.pop(0).following.get_value())

    def array_once(x, like, *, donate):
        assert before() is None
        return array_like(x, like, donate=donate)

    monkeypatch.setattr("jspec.decode.weights.array_like", array_once)
    for on_update in ("keep", "recompute", "abort"):
        stream = other.stream([1], jspec.SamplingParams(max_new_tokens=40))
        next(stream)
        compiled = engine.stats.compilations
        other.update({"following": np.asarray(following)}, on_update=on_update)
        assert other.generate([1], short)[0].tokens == (3, 2, 1)
        assert engine.stats.compilations == compiled
        if on_update == "abort":
            with pytest.raises(RuntimeError, match="aborted by an update of the weights"):
                list(stream)
        else:
            list(stream)
    assert other._engines.engines == {1: engine}
    assert engine.version == 3
    (scored,) = other.generate([1], short, logprobs=0)
    assert min(x for one in scored.logprobs or () for x in one.values()) > -1e-3
    with pytest.raises(ValueError, match="'following' is missing"):
        other.update({})
    assert other.generate([1], short)[0].tokens == (3, 2, 1)


@pytest.mark.exhaustive
def test_an_update_makes_again_what_a_policy_learns_of_the_model(llm, short_bundled):
    draft = jspec.SelfDraft(jspec.policies.Loki(budget=32))
    other = jspec.LLM(short_bundled, tokenizer=llm.tokenizer, draft=draft)
    other.generate("x = ", SHORT)
    before = other._models.policy

    def changed(x):
        noise = jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
        return x + 0.05 * noise.astype(x.dtype)

    other.update(jax.tree.map(changed, nnx.state(short_bundled)))
    fresh = jspec.LLM(other.model, tokenizer=llm.tokenizer, draft=draft)
    params = other._models.policy
    jax.tree.map(np.testing.assert_array_equal, params, fresh._models.policy)
    assert other._engines.engines[1]._options.models.policy is params
    assert other._options.get("policy_params") is params
    assert float(jnp.abs(params[0] - before[0]).max()) > 1e-3
    assert other.generate("x = ", SHORT)[0].tokens == fresh.generate("x = ", SHORT)[0].tokens


def test_a_refused_prompt_leaves_no_other_one_behind(llm):
    with pytest.raises(ValueError, match=r"prompt 1: the prompt has .* exceeds the context"):
        llm.generate([CODE, "x = "], [SHORT, jspec.SamplingParams(max_new_tokens=10**6)])
    assert not any(engine.busy for engine in llm._engines.engines.values())


def test_an_error_while_text_is_made_ends_all(llm, monkeypatch):
    def take(self, tokens):
        raise OSError("no text")

    monkeypatch.setattr("jspec.models.text.RowText.take", take)
    with pytest.raises(OSError, match="no text"):
        llm.generate([CODE, "x = "], SHORT)
    monkeypatch.undo()
    assert not any(engine.busy for engine in llm._engines.engines.values())
    assert len(llm.generate([CODE, "x = "], SHORT)) == 2


def test_rooms_are_few_and_not_much_larger(llm):
    rooms = {positions: room_for(positions) for positions in range(1, 9000, 7)}
    assert all(p <= room <= max(1.25 * p, 512) for p, room in rooms.items())
    assert len(set(rooms.values())) < 20


def test_text_ends_before_a_stop_text(llm, plain):
    text = llm.tokenizer.decode(plain)
    (result,) = llm.generate(CODE, SHORT, stop=[text[4:8]])
    assert result.text == text[: text.index(text[4:8])]
    assert result.finished == "stop"
    assert result.tokens == plain[: len(result.tokens)]


@dataclasses.dataclass(frozen=True)
class ScriptConfig:
    stop_tokens: tuple[int, ...]
    vocab_size: int = 300
    max_context: int = 64
    layers: tuple = (jspec.LayerSpec(kv_heads=1, key_size=8, value_size=8),)


class Script(nnx.Module):
    """Each token is followed by the next one of ``tokens``, which it repeats."""

    dtype = jnp.float32

    def __init__(self, tokens, *ends):
        self.config = ScriptConfig(ends)
        following = np.zeros(self.config.vocab_size, np.int32)
        following[tokens] = np.roll(tokens, -1)
        self.following = nnx.Param(jnp.asarray(following))

    def __call__(self, tokens, positions, attend, cache):
        q = jnp.zeros((*tokens.shape, 1, 8))
        y, cache = attend(0, q, q, q, cache)
        hidden = jax.nn.one_hot(self.following[...][jnp.maximum(tokens, 0)], 300)
        return hidden + 0 * y.sum(), cache

    def logits(self, hidden):
        return 20.0 * hidden


def test_an_answer_keeps_its_first_space(tmp_path):
    """As after a prompt, where tokenizers of Llama 2's kind drop the first space of a text."""
    library = made.byte_fallback()
    tokenizer = jspec.load_tokenizer(made.write(library, tmp_path))
    script = [library.token_to_id(piece) for piece in ("a", "▁the", "b", "▁▁")]
    llm = jspec.LLM(Script(script), tokenizer=tokenizer, draft=None)
    params = jspec.SamplingParams(max_new_tokens=4)
    assert llm.generate("a", params)[0].text == " theb  a"
    assert "".join(llm.stream("a", params)) == " theb  a"
    (ended,) = llm.generate("a", params, stop=" the")
    assert (ended.text, ended.finished, len(ended.tokens)) == ("", "stop", 1)


def test_an_end_token_that_ends_nothing_is_text():
    tokenizer: Tokenizer = jspec.load_tokenizer(bundled_path())
    llm = jspec.LLM(Script([97, 98, 10], 10), tokenizer=tokenizer, draft=None)
    params = jspec.SamplingParams(max_new_tokens=6)
    assert llm.generate("a", params)[0].text == "b"
    params = dataclasses.replace(params, ignore_eos=True)
    assert llm.generate("a", params)[0].text == "b\nab\na"
    assert "".join(llm.stream("a", params)) == "b\nab\na"
    (ended,) = llm.generate("a", params, stop="\nab")
    assert (ended.text, ended.finished) == ("b", "stop")


@pytest.mark.exhaustive
def test_n_answers_have_seeds_in_a_row(llm):
    result = llm.generate([CODE, "x = "], HOT, n=3)
    assert [c.seed for c in result] == [2**32 - 1, 0, 1] * 2
    assert len({c.tokens for c in result[:3]}) > 1
    alone = jspec.SamplingParams(max_new_tokens=12, temperature=1.0, seed=1)
    assert llm.generate("x = ", alone)[0].tokens == result[5].tokens


def test_a_seeded_answer_is_that_of_plain_decoding(llm):
    ids = llm.tokenizer.encode(CODE)
    plain = jspec.generate(llm.model, [ids], HOT, draft=None)
    assert llm.generate(CODE, HOT)[0].tokens == plain.tokens[0]


def test_log_probabilities_are_the_models(llm):
    params = jspec.SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)
    result = llm.generate([CODE, "x = "], params, logprobs=0)
    for prompt, completion in zip((CODE, "x = "), result, strict=True):
        whole = [*llm.tokenizer.encode(prompt), *completion.tokens]
        expected = jspec.score_tokens(llm.model, [whole])[0][-len(completion.tokens) :]
        assert [tuple(tokens) for tokens in completion.logprobs] == [
            (t,) for t in completion.tokens
        ]
        values = [x for tokens in completion.logprobs for x in tokens.values()]
        np.testing.assert_allclose(values, expected, atol=1e-4)
    assert llm.generate(CODE, SHORT, logprobs=None)[0].logprobs is None


@pytest.mark.exhaustive
def test_log_probabilities_have_the_form_of_vllm(llm):
    """The chosen token comes first, whether or not it is among the most likely ones."""
    params = jspec.SamplingParams(max_new_tokens=24, temperature=3.0, seed=3)
    (result,) = llm.generate(CODE, params, logprobs=5)
    whole = [*llm.tokenizer.encode(CODE), *result.tokens]
    (scores,) = score_top_tokens(llm.model, [whole], llm.model.config.vocab_size)
    sizes = []
    for place, (token, logprobs) in enumerate(
        zip(result.tokens, result.logprobs, strict=True), -24
    ):
        ids, values = scores.top_tokens[place].tolist(), scores.top_logprobs[place].tolist()
        law = dict(zip(ids, values, strict=True))
        assert list(logprobs) == list(dict.fromkeys([token, *ids[:5]]))
        np.testing.assert_allclose(list(logprobs.values()), [law[x] for x in logprobs], atol=1e-5)
        sizes.append(len(logprobs))
    assert set(sizes) == {5, 6}


@pytest.mark.exhaustive
def test_tokens_of_a_prompt_have_log_probabilities(llm):
    results = llm.generate([CODE, "x"], SHORT, n=2, prompt_logprobs=2, logprobs=0)
    ids = [llm.tokenizer.encode(text) for text in (CODE, "x")]
    for index, result in enumerate(results):
        (scores,) = score_top_tokens(llm.model, [ids[index // 2]], 2)
        first, *rest = result.prompt_logprobs
        assert first is None
        for token, logprobs, value, top in zip(
            ids[index // 2][1:], rest, scores.logprobs, scores.top_tokens, strict=True
        ):
            assert list(logprobs) == list(dict.fromkeys([token, *top.tolist()]))
            np.testing.assert_allclose(logprobs[token], value, atol=1e-5)
        assert result.logprob_arrays.sampling.logprobs.shape == (len(result.tokens),)
    assert llm.generate(CODE, SHORT)[0].prompt_logprobs is None


def test_prompts_have_the_forms_of_vllm(llm, plain):
    ids = llm.tokenizer.encode(CODE)
    forms = [CODE, CODE.encode(), ids, tuple(ids), np.asarray(ids, np.int32)]
    forms += [{"prompt": CODE}, {"prompt_token_ids": ids}, {"prompt_token_ids": np.asarray(ids)}]
    for form in forms:
        assert [c.tokens for c in llm.generate(form, SHORT)] == [plain]
    assert [c.tokens for c in llm.generate(forms, SHORT)] == [plain] * len(forms)
    for rows in (np.asarray([ids, ids]), jnp.asarray([ids, ids])):
        assert [c.tokens for c in llm.generate(rows, SHORT)] == [plain] * 2
    for form in forms:
        assert "".join(llm.stream(form, SHORT)) == llm.tokenizer.decode(plain)


@pytest.mark.parametrize(
    "prompts",
    [None, 3, {CODE}, [None], [1.5], [[1.5]], [{"prompt": [1]}], {"prompt": CODE, "cache_salt": 1},
     {"prompt_token_ids": CODE}, [[CODE]], [{"prompt_token_ids": [1], "prompt": CODE}], {}],
)  # fmt: skip
def test_prompts_of_other_forms_are_refused(llm, prompts):
    with pytest.raises((TypeError, ValueError), match=r"pass a text, token ids|must be token ids"):
        llm.generate(prompts, SHORT)


def test_a_template_of_the_call_or_of_the_model(llm, plain):
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    other = jspec.LLM(llm.model, tokenizer=llm.tokenizer)
    other.tokenizer.special_tokens["bos_token"] = "<|bos|>"
    assert [c.tokens for c in other.chat(TALK, SHORT, chat_template=source)] == [plain]
    other = jspec.LLM(llm.model, tokenizer=llm.tokenizer, chat_template=source)
    assert [c.tokens for c in other.chat([TALK], SHORT)] == [plain]
    other.tokenizer.special_tokens.clear()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(CODE, n=0), "n=0 must be a whole number, at least 1"),
        (lambda llm: llm.generate(CODE, n=1.5), r"n=1\.5 must be a whole number"),
        (lambda llm: llm.generate(CODE, stop=None), "stop=None must be a text or texts"),
        (lambda llm: llm.generate(CODE, stop=[""]), "none of them empty"),
        (lambda llm: llm.generate(CODE, stop=[3]), "must be a text or texts"),
        (lambda llm: llm.generate([]), "no prompts were given"),
        (lambda llm: llm.chat([]), "no conversation; pass messages"),
        (lambda llm: llm.chat(TALK[0]), "no conversation; pass messages"),
        (lambda llm: llm.chat("Hi"), "no conversation; pass messages"),
        (lambda llm: llm.chat(["Hi"]), "no conversation; pass messages"),
        (lambda llm: llm.chat(TALK, sampling_params=SHORT), "sampling_params= is no variable"),
        (lambda llm: llm.generate(CODE, logprobs=-1), "logprobs=-1 must be how many of the 260"),
        (lambda llm: llm.generate(CODE, logprobs=True), "logprobs=True must be how many"),
        (lambda llm: llm.generate(CODE, logprobs=2.0), r"logprobs=2\.0 must be"),
        (lambda llm: llm.generate(CODE, logprobs=10**6), "how many of the 260 tokens"),
        (lambda llm: jspec.LLM(batch=0), "batch=0 must be a whole number, at least 1"),
        (lambda llm: jspec.LLM(batch="8"), "batch='8' must be a whole number"),
        (lambda llm: jspec.LLM(llm.model), "needs tokenizer="),
        (
            lambda llm: jspec.LLM(llm.model, tokenizer=llm.tokenizer).chat(TALK),
            r"has no chat template; pass chat_template=",
        ),
    ],
    ids=[
        *("n", "half-n", "no-stop", "empty-stop", "stop", "none", "no-messages", "message"),
        *(
            "text",
            "texts",
            "params",
            "below-0",
            "true",
            "half-logprobs",
            "over-vocabulary",
            "batch",
        ),
        *("text-batch", "tokenizer", "template"),
    ],
)
def test_bad_calls_say_the_way_out(llm, call, message):
    with pytest.raises(ValueError, match=message):
        call(llm)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft": "ngram"}, r"pass jspec.named_draft\('ngram'\)"),
        ({"draft": jspec.NgramDraft}, r"pass one of it, NgramDraft\(\)"),
        ({"draft": jspec.policies.Quest()}, r"is a policy; pass SelfDraft\(Quest"),
        ({"draft": None, "target": "quest"}, "must be a policy; pass jspec.policies.named_policy"),
    ],
    ids=["name", "class", "policy", "target"],
)
def test_what_is_no_drafter_or_policy_says_what_was_meant(settings, message):
    with pytest.raises(TypeError, match=message):
        jspec.LLM(**settings)
