"""`jspec train-hash`: learn a model's hashes from texts, and say what they keep of attention."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import TaskID
from rich.table import Table

from jspec.cli.compile_cache import keep_programs
from jspec.cli.show import console, counted, counted_bars, environment, print_json
from jspec.extras import install
from jspec.models.bundled import bundled_path
from jspec.models.checkpoint import load_model
from jspec.models.files import read_file
from jspec.models.hashes import save_hashes
from jspec.models.hata_weights import read_hata_weights
from jspec.models.tokenizer import Tokenizer, load_tokenizer
from jspec.train.job import Job, Texts
from jspec.train.job import run as learn_hashes
from jspec.train.loss import HashTraining
from jspec.train.picture import draw_loss
from jspec.train.samples import MIN_TOKENS

FILE_LIMIT = 1 << 30  # bytes of a text
SUFFIXES = (".py", ".txt", ".md", ".rst")  # of the files of a folder that are read
# Folders that are not read; pydoc_data is the language reference, of which RULER makes its essays.
SKIPPED = ("site-packages", "test", "tests", "__pycache__", "pydoc_data")
USUAL_LENGTH = 32768  # most tokens of a text, unless the model's context is shorter
HELD_OUT = 10  # one text in so many, where none is named
REPORT_TEXTS = 32  # held-out texts at most; others are left out at random
LINE_SECONDS = 15.0  # between lines of progress where stderr is no terminal
STOPPED = 3  # the exit code after --minutes
# Options of learning that are not named.
DEFAULTS = {
    "bits": 128,
    "variant": "attention",
    "pairs": 200_000,
    "step_pairs": 98304,
    "epochs": 15,
}


class _TimeUpError(Exception):
    """``--minutes`` are over."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    begin = time.monotonic()
    if arguments.convert:
        return _convert(arguments)
    for option, default in DEFAULTS.items():
        if getattr(arguments, option) is None:
            setattr(arguments, option, default)
    for option in ("pairs", "step_pairs"):
        if getattr(arguments, option) < 1:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} {getattr(arguments, option)} must be at least 1")
    limit = arguments.minutes
    if limit is not None and limit <= 0:
        raise ValueError(f"--minutes {limit:g} must be above 0")
    settings = HashTraining(
        bits=arguments.bits,
        variant=arguments.variant,
        pairs=arguments.step_pairs,
        epochs=arguments.epochs,
        seed=_seed(arguments.seed),
    )
    if arguments.compile_cache:
        keep_programs()
    path = Path(arguments.model or bundled_path())
    tokenizer, model = load_tokenizer(path), load_model(path)
    length = _length(arguments.length, model.config.max_context)
    names = arguments.data or [sysconfig.get_path("stdlib")]
    learned = _texts(names, tokenizer, length, "--data")
    if arguments.held_out:
        held_out = _texts(arguments.held_out, tokenizer, length, "--held-out")
    else:
        held_out = learned[::HELD_OUT]
        learned = [text for index, text in enumerate(learned) if index % HELD_OUT]
    if not learned:
        raise ValueError(
            "--data has one text, which is held out for the report; give more files, or other "
            "ones by --held-out"
        )
    shuffled = np.random.default_rng(settings.seed).permutation(len(held_out))
    held_out = [held_out[index] for index in np.sort(shuffled[:REPORT_TEXTS])]
    texts = Texts(_enough(learned, arguments.pairs, settings.seed), held_out)
    job = Job(model, texts, Path(arguments.out), settings, arguments.compare)
    deadline = None if limit is None else begin + 60 * limit
    try:
        with _progress(deadline) as on_progress:
            report = learn_hashes(job, on_progress)
    except _TimeUpError:
        message = f"stopped after {limit:g} minutes; the same command goes on from there"
        console().print(message, soft_wrap=True)
        return STOPPED
    picture = _draw(job.out)
    if arguments.json:
        print_json(report | {"out": str(job.out), "environment": environment()})
    else:
        _show(report, job.out, picture)
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    """Write the hashes of a file of HATA's authors; returns the exit code."""
    for option in (*DEFAULTS, "held_out", "compare", "length"):
        if getattr(arguments, option) not in (None, [], False):
            name = option.replace("_", "-")
            raise ValueError(f"--{name} is for hashes that are learned; leave it out of --convert")
    file, out = Path(arguments.convert), Path(arguments.out)
    specs = load_model(Path(arguments.model or bundled_path())).config.layers
    hashes, random_layers = read_hata_weights(file, specs, _seed(arguments.seed))
    made = {"converted": file.name, "random_layers": random_layers}
    save_hashes(hashes, out, made)
    bits = next(w.shape[2] for w in hashes if w is not None)
    if arguments.json:
        print_json({"bits": bits, **made, "out": str(out), "environment": environment()})
        return 0
    missing = f"; layers {random_layers} have random ones" if random_layers else ""
    console().print(f"hashes of {bits} bits are in {out}{missing}", soft_wrap=True, markup=False)
    return 0


def _seed(seed: int) -> int:
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed {seed} must be in [0, 2**32)")
    return seed


def _length(asked: int | None, context: int) -> int:
    if asked is None:
        return min(context, USUAL_LENGTH)
    if not MIN_TOKENS <= asked <= context:
        raise ValueError(
            f"--length {asked} must be from {MIN_TOKENS} to the model's context of {context}"
        )
    return asked


def _texts(names: Sequence[str], tokenizer: Tokenizer, length: int, option: str) -> list[list[int]]:
    """Files as token ids, in pieces of at most ``length``; what is too short is left out.

    A folder is one text: its files with a suffix of `SUFFIXES`, one after the other.
    """
    prefix = _prefix_ids(tokenizer)
    size = length - len(prefix)
    pieces = []
    for name in names:
        path = Path(name)
        content = _content(path) if path.is_dir() else [read_file(path, FILE_LIMIT)]
        ids = [x for text in content for x in tokenizer.encode(text, special=False)]
        file_pieces = [prefix + ids[at : at + size] for at in range(0, len(ids), size)]
        pieces += [piece for piece in file_pieces if len(piece) >= MIN_TOKENS]
    if not pieces:
        raise ValueError(
            f"{option}: none of {len(names)} files has the {MIN_TOKENS} tokens that a text needs"
        )
    return pieces


def _content(folder: Path) -> Iterator[str]:
    """The texts in a folder, by name; those of packages installed into it, and tests, are not."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(x for x in folders if x not in SKIPPED and not x.startswith("."))
        for file in sorted(x for x in files if x.endswith(SUFFIXES)):
            yield read_file(Path(root, file), FILE_LIMIT).decode(errors="replace")


def _prefix_ids(tokenizer: Tokenizer) -> list[int]:
    """The special tokens before a text."""
    plain, whole = tokenizer.encode("a", special=False), tokenizer.encode("a")
    return whole[: whole.index(plain[0])]


def _enough(texts: list[list[int]], pairs: int, seed: int) -> list[list[int]]:
    """Texts in random order, until they give about ``pairs`` pairs of a query and a key."""
    chosen, total = [], 0.0
    for index in np.random.default_rng(seed).permutation(len(texts)):
        if total >= pairs:
            break
        chosen.append(texts[index])
        total += 0.75 * len(texts[index])  # a query stands in the second half
    return chosen


@contextlib.contextmanager
def _progress(deadline: float | None) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each thing that is done, on stderr; a line now and then where it is no terminal.

    ``deadline``: seconds of `time.monotonic` from which on it raises `_TimeUpError`, None for
    never.
    """
    with counted_bars(transient=False) as bars:
        tasks: dict[str, TaskID] = {}
        shown_at = time.monotonic()

        def on_progress(what: str, done: int, total: int) -> None:
            nonlocal shown_at
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            was_done = bars.tasks[tasks[what]].completed == total
            bars.update(tasks[what], completed=done)
            now = time.monotonic()
            ends = done == total and not was_done
            if bars.disable and (ends or now >= shown_at + LINE_SECONDS):
                shown_at = now
                print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)
            # All layers are learned before the report, which is not worth another run.
            if deadline is not None and now >= deadline and what != "compare":
                raise _TimeUpError

        yield on_progress


def _draw(out: Path) -> str:
    """Draw the loss into the folder of the hashes; returns a message for the user."""
    if find_spec("matplotlib") is None:
        return f"no picture of the loss: {install('bench')}"
    draw_loss(out / "curve.json", out / "curve.png")
    return f"the loss is in {out / 'curve.png'}"


def _show(report: dict[str, Any], out: Path, picture: str) -> None:
    shows = console()
    shows.print(
        f"{report['pairs']:,} pairs of {counted(report['texts'], 'text')}, "
        f"{report['seconds']['collect']:.0f} s to read and {report['seconds']['learn']:.0f} s to "
        f"learn; kept of attention in {counted(report['held_out'], 'held-out text')}:"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("method", no_wrap=True)
    table.add_column("bytes a key", justify="right")
    for budget in report["budgets"]:
        table.add_column(f"recall, mass at {budget:.1%}", justify="right")
    for row in sorted(report["methods"], key=lambda row: -row["mass"][0]):
        pairs = zip(row["recall"], row["mass"], strict=True)
        cells = [f"{recall:.3f}  {mass:.3f}" for recall, mass in pairs]
        table.add_row(row["name"], f"{row['bytes']:g}", *cells)
    shows.print(table)
    shows.print(f"hashes of {report['bits']} bits are in {out}; {picture}", soft_wrap=True)
