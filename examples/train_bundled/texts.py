"""Texts to learn the bundled model's hashes from: `python -m examples.train_bundled.texts --out D`.

Half are source, half synthetic retrieval documents, as in the model's own training data. What goes
to ``D/held-out`` is for the report: source of packages that are held out, documents of other seeds.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from examples.train_bundled import corpus
from examples.train_bundled.batches import source_filler
from examples.train_bundled.plan import FULL
from jspec.eval import ruler_bytes

LENGTHS = {"train": (2048, 4096, 8192, 16384, 32768), "held-out": (4096, 8192, 16384, 32768)}
COUNT = {"train": 24, "held-out": 2}  # of each kind and length
SPLIT = {"train": "train", "held-out": "packages"}


def write(out: Path, data: corpus.Corpus, seed: int) -> None:
    """Write the files of both parts below ``out``."""
    for number, part in enumerate(LENGTHS):
        rng = np.random.default_rng((seed, number))
        split = data.split(SPLIT[part])
        (out / part).mkdir(parents=True)
        for length in LENGTHS[part]:
            for index in range(COUNT[part]):
                name = out / part / f"{length}-{index}"
                name.with_suffix(".source.txt").write_bytes(source(split, length, rng))
                filler = source_filler(split) if index % 2 else ruler_bytes.sentences
                document, _ = ruler_bytes.training_document(length - 2, rng, filler)
                name.with_suffix(".retrieval.txt").write_bytes(document)


def source(split: np.ndarray, length: int, rng: np.random.Generator) -> bytes:
    """``length - 2`` bytes of packed source from a random place: two tokens go around them."""
    text = source_filler(split)
    content = b""
    while len(content) < length - 2:
        content += text(rng, 2 * length)
    return content[: length - 2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.train_bundled.texts", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the texts")
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir(), "jspec-texts"))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    data = corpus.load_or_build(asked.state / "corpus", FULL.corpus_bytes, FULL.packages)
    write(asked.out, data, asked.seed)


if __name__ == "__main__":
    main()
