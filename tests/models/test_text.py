"""Text of a row: whole characters, cut before stop texts, whatever the pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from jspec.config import SamplingParams
from jspec.models.bundled import bundled_path
from jspec.models.text import RowText, with_stops
from jspec.models.tokenizer import load_tokenizer
from tests.models import tokenizers as made

TOKENIZER = load_tokenizer(bundled_path())
SPECIAL = frozenset({257})


def feed(tokens: list[int], cuts: list[int], stop: tuple[str, ...]) -> tuple[RowText, str]:
    row, shown, begin = RowText(TOKENIZER, stop, SPECIAL), "", 0
    for end in [*sorted(c % (len(tokens) + 1) for c in cuts), len(tokens)]:
        shown += row.feed(tokens[begin:end])
        begin = end
    return row, shown + row.close()


@given(st.text("ab\né€𝄞", max_size=30), st.lists(st.integers(0, 100), max_size=4))
def test_pieces_join_to_the_text(text, cuts):
    row, shown = feed(list(text.encode()), cuts, ())
    assert shown == row.text == text


@given(
    st.text("abé", max_size=20),
    st.lists(st.integers(0, 100), max_size=4),
    st.lists(st.text("abé", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop(text, cuts, stops):
    row, shown = feed(list(text.encode()), cuts, tuple(stops))
    # The stop text that is complete first ends the text; what comes later does not count.
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        expected = text
    else:
        done = text[: min(ends)]
        expected = done[: min(done.find(s) for s in stops if s in done)]
    assert shown == row.text == expected
    assert row.stopped == bool(ends)


def test_special_tokens_are_counted_but_not_shown():
    row, shown = feed([97, 257], [], ())
    assert (shown, row.tokens) == ("a", [97, 257])


def test_broken_utf8_becomes_replacement_characters():
    _, shown = feed([0xFF, 97, 0xE2, 0x82], [1, 3], ())
    assert shown == "\ufffda\ufffd"


def test_a_stop_text_may_be_complete_at_the_very_end():
    row, shown = feed([97, 98, 0xE2], [], ("b\ufffd",))
    assert (shown, row.text, row.stopped) == ("a", "a", True)


def test_tokens_after_a_stop_text_are_dropped():
    row = RowText(TOKENIZER, ("lo",), SPECIAL)
    assert row.feed(list(b"hello, ")) == "hel"
    assert bytes(row.tokens) == b"hello"
    assert row.feed(list(b"world")) == ""
    assert bytes(row.tokens) == b"hello"


END = TOKENIZER.encode("<|end|>", special=False)[0]


@pytest.mark.parametrize(
    ("tokens", "stop", "expected"),
    [
        ([*b"a", END, *b"\nb"], "<|end|>\n", "a"),
        ([*b"a<|end|>", *b"\nb"], "<|end|>\n", "a"),
        ([*b"a", END, *b"b"], "a<|end|>b", ""),
        ([*b"xa", END, END], "a<|end|><|end|>", "x"),
        ([*b"ab", 256, END, *b"c"], "b<|bos|><|end|>c", "a"),
        # The text that is shown holds no special token.
        ([*b"a", END, *b"\nb"], "a\n", ""),
        ([*b"a", END, *b"b"], "end", None),
        ([*b"a", END, *b"b"], "<|end|>c", None),
        ([*b"a", END, *b"b"], "<|en", None),
    ],
)
def test_stop_texts_with_special_tokens(tokens, stop, expected):
    for cuts in ([], [1], [2, 3], range(len(tokens))):
        row, shown = feed(tokens, list(cuts), (stop,))
        assert row.stopped == (expected is not None)
        whole = TOKENIZER.decode([token for token in tokens if token != 257])
        assert shown == row.text == (whole if expected is None else expected)


def test_a_hidden_token_may_be_the_end_of_a_stop_text():
    row, shown = feed([97, 98, 257], [], ("b" + TOKENIZER.special_ids[257],))
    assert (shown, row.stopped) == ("a", True)


def stop_tokens(tokenizer, *stop) -> tuple[int, ...]:
    return with_stops(SamplingParams(), stop, tokenizer).stop_tokens


def test_a_stop_text_that_is_a_token_ends_a_row_in_the_step(tmp_path):
    assert stop_tokens(TOKENIZER, "\n", "<|end|>", "ab") == (10, END)
    library = made.with_added_tokens(made.byte_fallback())
    library.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(" ", "▁"), normalizers.Lowercase()]
    )
    tokenizer = load_tokenizer(made.write(library, tmp_path / "fallback"))
    ids = {text: library.token_to_id(text) for text in ("a", "▁", "<eos>")}
    assert stop_tokens(tokenizer, "a", "<eos>") == (ids["a"], ids["<eos>"])
    # What a normalizer makes of a text is another text, and the first space may be dropped.
    assert stop_tokens(tokenizer, "A", "\uff41", " ") == ()
    # Of tokens whose text depends on their neighbours, only special ones are known.
    words = made.with_added_tokens(made.word_piece())
    tokenizer = load_tokenizer(made.write(words, tmp_path / "words"))
    assert stop_tokens(tokenizer, "a", "zzz", "<eos>") == (words.token_to_id("<eos>"),)


def test_a_stop_text_without_a_token_of_its_own(tmp_path):
    """It becomes <unk>, which also stands for other texts; or it cannot be encoded at all."""
    library = made.word_piece()
    tokenizer = load_tokenizer(made.write(library, tmp_path))
    assert tokenizer.encode("🙂") == [library.token_to_id("[UNK]")]
    assert stop_tokens(tokenizer, "\U0001f642", "\ud800") == ()
    row = RowText(tokenizer, ("\U0001f642",))
    assert row.feed([library.token_to_id("a"), library.token_to_id("[UNK]")]) == "a [UNK]"
    assert not row.stopped


def test_a_stop_text_with_a_first_space(tmp_path):
    library = made.byte_fallback()
    tokenizer = load_tokenizer(made.write(library, tmp_path))
    tokens = [library.token_to_id(piece) for piece in ("a", "▁the", "b")]
    row = RowText(tokenizer, (" the",), (), tokens[:1])
    assert (row.feed(tokens[1:]), row.stopped, row.tokens) == ("", True, tokens[1:2])
