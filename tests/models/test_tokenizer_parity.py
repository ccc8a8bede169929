"""Tokenizers and their special tokens against transformers' own; needs the extra "parity"."""

import itertools
import json

import pytest
from tokenizers import normalizers, pre_tokenizers, processors

from jspec.models.tokenizer import load_tokenizer
from tests.models import tokenizers as made
from tests.models.test_tokenizer_files import llama_2, llama_3

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TEXTS = [
    "",
    "the cat sat",
    "  the\n    cat\n",
    "isn't it? né 日本 €\r\n",
    "a<e> <f>b<g>  <eos>",
    "\U0001d11e <think>日é</s>",
]


def prepend_first(scheme: str):
    library = made.metaspace()
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    library.decoder = made.decoders.Metaspace(prepend_scheme=scheme)
    return library


def with_template(library):
    library.add_special_tokens(["<s>"])
    index = library.token_to_id("<s>")
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", index)]
    )
    return library


def nfkc():
    library = made.byte_level()
    library.normalizer = normalizers.NFKC()
    return library


LIBRARIES = {
    "byte level": made.byte_level,
    "byte fallback": made.byte_fallback,
    "metaspace": lambda: prepend_first("always"),
    "metaspace first": lambda: prepend_first("first"),
    "metaspace never": lambda: prepend_first("never"),
    "word piece": made.word_piece,
    "llama 2": lambda: with_template(llama_2()),
    "llama 3": llama_3,
    "nfkc": nfkc,
}


def flags(content: str, **changes: bool) -> dict:
    false = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    return {"content": content, **false, **changes}


# Parts of each file; every pair of parts of the two files is tried.
CONFIGS = [
    {},
    {"eos_token": "<e>"},
    {"bos_token": "<e>", "eos_token": "<f>", "add_bos_token": True},
    {
        "added_tokens_decoder": {},
        "eos_token": {"__type": "AddedToken", **flags("<e>", special=True)},
    },
    {"additional_special_tokens": ["<f>", "<e>"], "pad_token": "<g>"},
    {"extra_special_tokens": {"image_token": "<g>"}},
    {"added_tokens_decoder": {"+0": flags("<e>", special=True), "+1": flags("<f>", lstrip=True)}},
    {"added_tokens_decoder": {"+0": flags("<f>")}, "eos_token": "<f>", "pad_token": "<e>"},
    {"added_tokens_decoder": {"+0": flags("<f>", normalized=True, rstrip=True)}},
    {"image_token": "<g>", "chat_template": ""},
]
OTHERS = [
    {},
    {"special_tokens_map.json": {"eos_token": "<f>", "unk_token": flags("<e>", lstrip=True)}},
    {"added_tokens.json": {"<e>": 0, "<f>": 1}},
    {"added_tokens.json": {"<g>": 0}, "special_tokens_map.json": {"pad_token": "<g>"}},
]


def write(path, library, config, others):
    """The files, with ids that follow those of ``library``."""
    made.write(library, path)
    size = library.get_vocab_size()
    added = config.get("added_tokens_decoder", {}).items()
    if added:
        config = config | {"added_tokens_decoder": {str(size + int(k)): v for k, v in added}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in others.items():
        if name == "added_tokens.json":
            content = {token: size + index for token, index in content.items()}
        (path / name).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
def test_ids_and_texts(library, tmp_path):
    transformers = pytest.importorskip("transformers")
    for number, (config, others) in enumerate(itertools.product(CONFIGS, OTHERS)):
        path = write(tmp_path / str(number), library(), config, others)
        theirs = transformers.AutoTokenizer.from_pretrained(path)
        ours = load_tokenizer(path)
        case = config, others
        assert ours.special_tokens == theirs.special_tokens_map, case
        assert set(ours.special_ids.values()) >= set(theirs.all_special_tokens), case
        assert ours.vocab_size == len(theirs), case
        for text in TEXTS:
            ids = theirs(text).input_ids
            assert ours.encode(text) == ids, (*case, text)
            expected = theirs.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            # Where a byte is broken, the library breaks its neighbours too.
            assert ours.decode(ids) == expected or "\ufffd" in expected, (*case, text)
            for cut in range(len(ids)):
                before, after = ours.decode(ids[:cut]), ours.decode(ids[cut:], prompt=ids[:cut])
                assert before + after == ours.decode(ids) or before.endswith("\ufffd")
