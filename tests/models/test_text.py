"""Text of a row: whole characters, cut before stop texts, whatever the pieces."""

from hypothesis import given
from hypothesis import strategies as st

from jspec.models.bundled import bundled_path
from jspec.models.text import RowText
from jspec.models.tokenizer import load_tokenizer

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
