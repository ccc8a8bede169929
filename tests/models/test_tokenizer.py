"""Text to ids and back, compared with the tokenizers library."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jspec.models.bundled import bundled_path
from jspec.models.tokenizer import load_tokenizer
from tests.models import tokenizers as made

BYTES = load_tokenizer(bundled_path())
BUNDLED = Library.from_file(str(bundled_path() / "tokenizer.json"))
KINDS = {
    "byte level": made.byte_level(),
    "bytes alone": made.bytes_alone(),
    "byte fallback": made.byte_fallback(),
    "byte fallback without strip": made.byte_fallback(strip=False),
    "metaspace": made.metaspace(),
    "word piece": made.word_piece(),
    "no decoder": made.no_decoder(),
    "word ends": made.word_ends(),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """The library's tokenizer and ours of the same file."""
    library = made.with_added_tokens(KINDS[request.param])
    path = made.write(library, tmp_path_factory.mktemp("tokenizer"))
    return library, load_tokenizer(path)


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    return load_tokenizer(made.write(made.byte_level(), tmp_path_factory.mktemp("merged")))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory):
    return load_tokenizer(made.write(made.byte_fallback(), tmp_path_factory.mktemp("fallback")))


@pytest.fixture(scope="module")
def other_order(tmp_path_factory):
    library = made.byte_fallback()
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = load_tokenizer(made.write(library, tmp_path_factory.mktemp("order")))
    assert tokenizer._joined is None
    return library, tokenizer


def streamed(tokenizer, tokens, cuts=()) -> list[str]:
    """The pieces of ``tokens``, cut at ``cuts``; one by one without any."""
    ends = sorted({cut % (len(tokens) + 1) for cut in cuts} or range(1, len(tokens)))
    advance, begins = tokenizer.stream(), [0, *ends]
    pieces = [advance(tokens[a:b], False) for a, b in zip(begins, ends, strict=False)]
    return [*pieces, advance(tokens[begins[-1] :], False), advance([], True)]


# Ids beyond the vocabulary vanish, in the library as here.
@given(st.data())
def test_pieces_join_to_the_text(pair, data):
    library, tokenizer = pair
    limit = library.get_vocab_size() + 2
    # What is not a byte comes last.
    ids = st.integers(0, limit) | st.integers(max(0, limit - 20), limit)
    tokens = data.draw(st.lists(ids, max_size=12))
    cuts = data.draw(st.lists(st.integers(0, 12), max_size=3))
    text = tokenizer.decode(tokens)
    assert "".join(streamed(tokenizer, tokens)) == text
    assert "".join(streamed(tokenizer, tokens, cuts)) == text
    theirs = library.decode(tokens)
    # Next to a broken byte, the library's ByteFallback breaks whole characters too.
    if "ByteFallback" not in str(library.decoder) or "\ufffd" not in theirs:
        assert text == theirs


@given(st.data())
def test_an_answer_continues_its_prompt(pair, data):
    """Where the prompt ends in half a character, the answer completes it."""
    library, tokenizer = pair
    ids = st.integers(0, library.get_vocab_size() - 1)
    prompt, answer = data.draw(st.lists(ids, max_size=6)), data.draw(st.lists(ids, max_size=6))
    text, before = (tokenizer.decode(tokens) for tokens in ([*prompt, *answer], prompt))
    result = tokenizer.decode(answer, prompt=np.asarray(prompt, np.int32))
    if text.startswith(before):
        assert before + result == text
    else:
        assert before.removesuffix("\ufffd") + result == text
    advance = tokenizer.stream(prompt)
    assert "".join(advance([token], False) for token in answer) + advance([], True) == result


def test_a_first_space_is_dropped_from_the_prompt_alone(tmp_path):
    """What Llama 2's decoder drops; an indent keeps its width after a prompt."""
    library = made.byte_fallback()
    tokenizer = load_tokenizer(made.write(library, tmp_path))
    space, the, a, newline = (library.token_to_id(piece) for piece in ("▁▁", "▁the", "a", "<0x0A>"))
    assert tokenizer.decode([the]) == "the"
    assert tokenizer.decode([the], prompt=[a]) == " the"
    assert tokenizer.decode([space, a], prompt=[a, newline]) == "  a"
    assert tokenizer.decode([space, a], prompt=[the, the]) == "  a"
    assert tokenizer.decode([the], prompt=[library.token_to_id("▁")]) == " the"
    library.add_special_tokens(["<s>"])
    tokenizer = load_tokenizer(made.write(library, tmp_path))
    assert tokenizer.decode([the], prompt=[library.token_to_id("<s>")]) == "the"


@given(st.binary(max_size=12), st.lists(st.sampled_from(["a", "日", "▁the"]), max_size=3))
def test_bytes_of_a_fallback_are_read_as_utf8(fallback, data, rest):
    """Python's own decoder says what broken bytes become."""
    vocabulary = KINDS["byte fallback"].get_vocab()
    tokens = [vocabulary[f"<0x{byte:02X}>"] for byte in data] + [vocabulary[p] for p in rest]
    text = (data + "".join(rest).replace("▁", " ").encode()).decode(errors="replace")
    assert fallback.decode(tokens) == "".join(streamed(fallback, tokens)) == text.removeprefix(" ")


@given(st.text("a日é€𝄞\U0010ffff ", max_size=12), st.lists(st.integers(0, 40), max_size=5))
def test_a_stream_splits_no_character(pair, text, cuts):
    library, tokenizer = pair
    tokens = library.encode(text).ids
    pieces = streamed(tokenizer, tokens, cuts)
    assert "".join(pieces) == library.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.text("a日é€𝄞\U0010ffff", max_size=12))
def test_a_stream_of_bytes_that_the_library_joins(other_order, text):
    """Bytes before another step than `byte_decoder` knows: the library decodes them."""
    library, tokenizer = other_order
    pieces = streamed(tokenizer, library.encode(text).ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(("name", "piece"), [("merged", "ÿ"), ("fallback", "<0xFF>")])
def test_broken_bytes_are_shown_at_once(request, name, piece):
    """None waits for the end, and the time is linear: 20,000 would take minutes otherwise."""
    kind = {"merged": "byte level", "fallback": "byte fallback"}[name]
    byte = KINDS[kind].token_to_id(piece)
    advance = request.getfixturevalue(name).stream()
    assert all(advance([byte], False) == "\ufffd" for _ in range(20_000))


def test_broken_bytes_that_the_library_joins_wait_for_one_character(other_order):
    library, tokenizer = other_order
    advance, byte = tokenizer.stream(), library.token_to_id("<0xFF>")
    pieces = [advance([byte], False) for _ in range(12)]
    assert [bool(piece) for piece in pieces] == [False, False, False, True] * 3


def test_numpy_ids_are_ids_and_floats_are_not(fallback):
    assert fallback.decode(np.asarray([98, 99], np.int32)) == fallback.decode([98, 99]) == "ab"
    with pytest.raises(TypeError):
        fallback.decode([1.5])


@given(st.binary(max_size=40))
def test_bytes_survive(data):
    tokens = BYTES.encode(data, special=False)
    assert BYTES.raw(tokens) == data


@given(st.text(max_size=20), st.integers(0, 3))
def test_byte_ids_agree_with_the_library(text, specials):
    """Special tokens that are written out are found, as in the library."""
    text = text + "<|end|>" * specials + text
    assert BYTES.encode(text) == BUNDLED.encode(text).ids
    assert BYTES.encode(text, special=False) == BUNDLED.encode(text, add_special_tokens=False).ids


def test_bytes_that_are_no_text_hold_no_special_tokens():
    assert BYTES.encode(b"\xff<|end|>") == [256, *b"\xff<|end|>"]
    assert BYTES.decode([256, 0xFF, 97, 257]) == "\ufffda"


def variants():
    """Byte vocabularies that are not the bytes in order, or do more than that."""
    closing = made.bytes_alone()
    closing.add_special_tokens(["<s>", "</s>"])
    closing.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    prefix, lower, spaces, merges = (made.bytes_alone() for _ in range(4))
    prefix.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    lower.normalizer = normalizers.Lowercase()
    spaces.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    byte_a = made.bytes_alone()
    byte_a.add_special_tokens(["<s>"])
    byte_a.post_processor = processors.TemplateProcessing(
        single="a $A", special_tokens=[("a", ord("a"))]
    )
    yield "closing", closing, {}, True
    yield "prefix space", prefix, {}, False
    yield "lower case", lower, {}, False
    yield "spaces dropped", spaces, {}, False
    yield "a letter as template", byte_a, {}, False
    model = json.loads(merges.to_str())["model"]
    later = {piece: number + 3 for piece, number in model["vocab"].items()}
    swapped = model["vocab"] | {"y": ord("z"), "z": ord("y")}
    yield "two bytes swapped", merges, {"model": model | {"vocab": swapped}}, False
    yield "another decoder", merges, {"decoder": {"type": "Fuse"}}, False
    yield "ids from 3", merges, {"model": model | {"vocab": later}}, False
    words = model | {"vocab": model["vocab"] | {"the": 256}, "ignore_merges": True}
    yield "whole words", merges, {"model": words}, False
    yield "suffix", merges, {"model": model | {"end_of_word_suffix": "Ġ"}}, False


@pytest.mark.parametrize(
    ("library", "changes", "short"), [pytest.param(*rest, id=name) for name, *rest in variants()]
)
def test_byte_vocabularies(tmp_path, library, changes, short):
    path = made.write(library, tmp_path, **changes)
    library, tokenizer = Library.from_file(str(path / "tokenizer.json")), load_tokenizer(path)
    assert tokenizer.byte_level is short
    for text in ("Hi the é", " a", "", "the", "xyz"):
        assert tokenizer.encode(text) == library.encode(text).ids
        tokens = tokenizer.encode(text, special=False)
        assert tokens == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokens) == library.decode(tokens)


def test_a_merging_tokenizer_needs_utf8(merged):
    with pytest.raises(ValueError, match="byte 2 of the text is not UTF-8"):
        merged.encode(b"a\xff")


@pytest.mark.parametrize("tokenizer", ["merged", "bytes"])
def test_half_a_surrogate_pair(merged, tokenizer):
    tokenizer = merged if tokenizer == "merged" else BYTES
    with pytest.raises(ValueError, match="character 2 of the text is half of a surrogate pair"):
        tokenizer.encode("a\ud800")


def test_a_text_that_the_library_cannot_encode(tmp_path):
    library = Library(models.WordPiece(vocab={"a": 0}, unk_token="[UNK]"))
    tokenizer = load_tokenizer(made.write(library, tmp_path))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(ValueError, match=r"cannot encode a text of 3 characters: .*\[UNK\]"):
        tokenizer.encode("xyz")
