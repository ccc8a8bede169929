"""The arguments of the `jspec` command."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jspec import __version__
from jspec.checks import suggestion
from jspec.cli.errors import one_line

PROMPTS = ("prompt", "prompt_file", "demo", "requests")  # options that name prompts
# Of jspec.eval.metrics, those that any text can be scored by.
METRICS = ("recall", "contains", "exact", "f1", "f1_zh", "rouge_l", "rouge_l_zh", "count")
METRICS += ("code_similarity", "choice")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"jspec: error: {one_line(message):.300}; see {self.prog} --help\n")

    # It has overloads, of which the command uses none.
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Report an unknown argument from the subcommand that got it, which knows its options."""
        values, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = unknown[0].partition("=")[0]
            meant = suggestion(option, self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown):.200}{meant}")
        return values, unknown


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command; bad ones end the process with one line and exit code 2."""
    parser = command_parser()
    argv = sys.argv[1:] if argv is None else argv
    # argparse drops ``--`` there, and gives an empty list in place of a number.
    if empty := next((item for item in argv if re.fullmatch("--[a-z-]+=--", item)), None):
        parser.error(f"argument {empty.partition('=')[0]}: '--' is no value")
    arguments = parser.parse_args(argv)
    stdin = getattr(arguments, "stdin", None)
    if stdin not in (None, "-"):
        parser.error(f"{stdin!r}: a prompt needs --prompt TEXT, a file --prompt-file F")
    if stdin is not None:
        others = [name for name in PROMPTS if getattr(arguments, name) not in (None, False)]
        if others:
            option = others[0].replace("_", "-")
            parser.error(f"- reads the prompt from stdin; leave out --{option}")
    return arguments


def command_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jspec", description="Fast, lossless long-context decoding in JAX.")
    parser.add_argument("--version", action="version", version=f"jspec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="continue text, speculatively"))
    _add_tune(commands.add_parser("tune", help="find the ratio and gamma of a sparse drafter"))
    _add_eval(commands.add_parser("eval", help="how well the model answers with each policy"))
    _add_train_hash(
        commands.add_parser("train-hash", help="learn the hashes of the policy hata from texts")
    )
    _add_simulate(
        commands.add_parser("simulate", help="what Helix and its rivals could serve, by a model")
    )
    doctor = commands.add_parser("doctor", help="say what runs here, and what to do about the rest")
    doctor.add_argument("--only", metavar="OPERATION", help="the backends of one operation alone")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _up_to(limit: int) -> Callable[[str], int]:
    """A reader of whole numbers whose absolute value is at most ``limit``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number") from None
        if abs(value) > limit:
            raise argparse.ArgumentTypeError(f"{text} must be at most {limit}")
        return value

    return read


_integer = _up_to(2**31 - 1)
_seed = _up_to(2**32 - 1)
_count = _up_to(10**6)  # of things that a run makes one by one


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number")
    return value


def _gamma(text: str) -> int | str:
    try:
        return text if text == "auto" else _integer(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or auto") from None


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    # `parse_arguments` checks it: argparse takes the value of an unknown option for it, and must
    # name that option first.
    add("stdin", nargs="?", metavar="-", help="read the prompt from stdin")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    prompt.add_argument("--prompt-file", metavar="F", help="read the prompt from a file")
    prompt.add_argument(
        "--demo", action="store_true", help="ask about a document that ships with jspec"
    )
    prompt.add_argument(
        "--requests",
        metavar="FILE.jsonl",
        help="JSON lines, - for stdin: "
        '{"id": ..., "prompt": ... or "messages": [...], "max_new_tokens": ..., ...}',
    )
    add(
        "--output",
        metavar="FILE.jsonl",
        help="what came of --requests, one JSON object a line; written when all is done",
    )
    add("--draft-model", metavar="DIR", help="the draft model of --draft model")
    add(
        "--draft",
        metavar="NAME[:SETTING=VALUE,...]",
        help="where draft tokens come from: ngram (earlier text; default), suffix (the same "
        "by matches of any length), model (a second one), none (plain decoding), or a policy, over "
        "which the model drafts: dense, streaming, exact_topk, hata, hata_off, quest, loki, "
        "magicpig, vegas, specextend, sparsespec. 'FIRST > POLICY; SETTING=VALUE,...' "
        "is a chain",
    )
    add(
        "--policy",
        metavar="NAME[:SETTING=VALUE,...]",
        help="have the model itself read only what a policy selects: not lossless; no draft",
    )
    add(
        "--gamma",
        type=_gamma,
        metavar="N",
        help="the largest number of tokens that a step drafts, or auto, by measured times and "
        "acceptance; auto is the default where it changes no token of a seed",
    )
    add("--settings", metavar="FILE.json", help="draft and gamma, as jspec tune writes them")
    rules = "how a sampled draft is verified: token by token, or as a block; default %(default)s"
    add("--rule", choices=("token", "block"), default="token", help=rules)
    add(
        "--exact",
        choices=("no", "tokens", "bits"),
        help="tokens: the greedy tokens of plain decoding, whatever drafts; bits: however prompts "
        "are prefilled, too; on an NVIDIA GPU; no, the default: up to near-ties",
    )
    _add_decoding(parser)
    add(
        "--hosts",
        metavar="coordinator=IP:PORT,processes=N,index=N",
        help="decode --helix on the devices of N processes, all started with the same command but "
        "for index, or auto: under Slurm and Open MPI (docs/helix.md)",
    )
    add("--compare", action="store_true", help="also decode plainly: identical? how much faster?")
    add("--json", action="store_true", help="print one JSON object instead of text and table")
    _add_compile_cache(parser)


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    """The model, and the settings of requests that do not name their own.

    `jspec.SamplingParams` bounds the numbers of a request.
    """
    add = parser.add_argument
    add("--chat", action="store_true", help="a prompt is a user's message: take the chat template")
    add("--system", metavar="TEXT", help="the system message of --chat")
    add("--batch", type=_integer, default=8, metavar="N", help="requests at once; default 8")
    add("--model", metavar="PATH", help="model directory or GGUF file (default: bundled)")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="default 256")
    add("--temperature", type=float, default=0.0, metavar="X", help="0 (default) is greedy")
    add("--top-k", type=int, default=0, metavar="N", help="0 (default) or -1 is off")
    add("--top-p", type=float, default=1.0, metavar="X", help="1 (default) is off")
    add("--min-p", type=float, default=0.0, metavar="X", help="0 (default) is off")
    off = "(default) is off"
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help=f"1 {off}")
    add("--frequency-penalty", type=float, default=0.0, metavar="X", help=f"0 {off}")
    add("--presence-penalty", type=float, default=0.0, metavar="X", help=f"0 {off}")
    add("--min-new-tokens", type=int, default=0, metavar="N", help="without an end; default 0")
    add("--seed", type=_seed, metavar="N", help="keys every random number; default a fresh one")
    add(
        "--ignore-eos",
        action="store_true",
        help="continue after the model's end tokens; --stop still ends the text",
    )
    add("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable")
    add(
        "--backend",
        action="append",
        default=[],
        metavar="[OPERATION=]NAME",
        help="as in verify_greedy=cuda, or triton for every operation that can; default the "
        "fastest here (jspec doctor lists them)",
    )
    add(
        "--helix",
        metavar="kvp=N,tpa=N",
        help="share each row among kvp x tpa devices, by positions and by heads (docs/helix.md)",
    )
    add("--devices", type=_integer, metavar="N", help="on N virtual CPU devices, to try --helix on")
    add(
        "--context",
        type=_integer,
        metavar="N",
        help="the largest number of tokens, prompt and output",
    )


def _add_tune(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", required=True, metavar="FILE.jsonl", help="requests to decode, a sample")
    add("--out", required=True, metavar="DIR", help="the folder to write, which must not exist")
    add(
        "--draft",
        default="vegas",
        metavar="NAME[:SETTING=VALUE,...]",
        help="the policy that drafts, without its budget or window; default vegas",
    )
    add(
        "--ratio",
        type=_finite,
        action="append",
        metavar="X",
        help="of the context that drafts read; repeatable; default 0.01 to 0.1",
    )
    add(
        "--gamma",
        type=_integer,
        action="append",
        metavar="N",
        help="draft tokens a step; repeatable; default 3 to 12",
    )
    _add_decoding(parser)
    parser.set_defaults(draft_model=None, rule="token", exact=None)
    add("--json", action="store_true", help="print one JSON object instead of a table")
    _add_compile_cache(parser)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "tasks",
        metavar="ruler|ruler-bytes|FILE.jsonl",
        help="RULER's tasks, jspec's six for byte-level models, or a file of LongBench, "
        "LongBench-v2, RULER or your own",
    )
    add("--model", metavar="PATH", help="model directory or GGUF file (default: bundled)")
    add(
        "--policy",
        action="append",
        metavar="NAME[:SETTING=VALUE,...]",
        help="what the model reads; repeatable; default dense",
    )
    add(
        "--budget",
        action="append",
        default=[],
        metavar="M",
        help="of each policy, in positions or as a ratio of the length; repeatable",
    )
    add("--draft", action="store_true", help="policies draft, and the model stays lossless")
    add("--length", type=_integer, default=4096, metavar="N", help="tokens; default 4096")
    add("--examples", type=_count, default=10, metavar="N", help="of each task; default 10")
    add("--only", metavar="TASK,...", help="some of the tasks, as in niah_single_1,vt")
    add("--chat", action="store_true", help="apply the model's chat template")
    add(
        "--qa",
        action="append",
        default=[],
        metavar="FILE",
        help="SQuAD's or HotpotQA's JSON, for RULER's qa_1 or qa_2; repeatable",
    )
    add("--seed", type=_seed, default=0, metavar="N", help="of the first example; default 0")
    add("--batch", type=_integer, default=8, metavar="N", help="questions at once; default 8")
    add(
        "--metric",
        choices=METRICS,
        metavar="NAME",
        help=f"of FILE.jsonl: {', '.join(METRICS)}; default: that of the benchmark",
    )
    add(
        "--max-new-tokens",
        type=_integer,
        metavar="N",
        help="of FILE.jsonl; default: that of the benchmark, else 128",
    )
    add("--heatmap", metavar="FILE.png", help="also draw needles by depth at up to --length tokens")
    add("--answers", action="store_true", help="put the answers into --json")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    _add_compile_cache(parser)


def _add_train_hash(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="PATH", help="model directory or GGUF file (default: bundled)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="FILE",
        help="texts to learn from, or folders of them; default the source of Python's library",
    )
    source.add_argument(
        "--convert",
        metavar="FILE",
        help="the matrices that HATA's authors released, as safetensors, in place of learning",
    )
    add("--out", required=True, metavar="DIR", help="the folder to write, which must not exist")
    add(
        "--held-out",
        nargs="+",
        default=[],
        metavar="FILE",
        help="texts of the report, or folders of them, of which 32 pieces are read; default one "
        "piece in ten of --data, which is not learned from",
    )
    add("--bits", type=_integer, metavar="R", help="32, 64, 128 (default) or 256")
    add(
        "--variant",
        metavar="NAME",
        help="of the loss: attention (default: jspec's own), paper (Eq. 9 of HATA) or authors "
        "(what its authors released)",
    )
    add("--compare", action="store_true", help="learn by the other variants too, for the report")
    add(
        "--pairs",
        type=_integer,
        metavar="N",
        help="pairs of a query and a key in a layer, about, of a query a text; default 200000",
    )
    add(
        "--step-pairs",
        type=_integer,
        metavar="N",
        help="pairs of a step of SGD, about; default 98304, and a CPU may well take 8192",
    )
    add("--epochs", type=_integer, metavar="N", help="rounds of 20 steps; default 15")
    add(
        "--length",
        type=_integer,
        metavar="N",
        help="most tokens of a text; default 32768 or the model's context",
    )
    add(
        "--minutes",
        type=_finite,
        metavar="N",
        help="stop after so many, with exit code 3; the same command goes on from there",
    )
    add("--seed", type=_seed, default=0, metavar="N", help="of every random choice; default 0")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    _add_compile_cache(parser)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    roofline = kinds.add_parser("roofline", help="times to read a layer's cache and weights")
    roofline.add_argument("--batch", type=_integer, default=8, metavar="N", help="rows; default 8")
    pareto = kinds.add_parser("pareto", help="tokens a second of a GPU against those of a row")
    paper = kinds.add_parser("paper", help="the ratios of the Helix paper's figures 5 to 7")
    for kind in (pareto, paper):
        kind.add_argument(
            "--gpus", type=_integer, default=64, metavar="N", help="at most; default 64"
        )
    pareto.add_argument("--fine", action="store_true", help="16 batch sizes an octave, not one")
    pareto.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="also show how the ratios depend on a constant; repeatable",
    )
    measured = kinds.add_parser("measured", help="predictions of what the bench measured")
    measured.add_argument("results", nargs="+", metavar="FILE", help="of python -m bench helix")
    for kind in (paper, measured):
        kind.set_defaults(png=None)
    for kind in (roofline, pareto):
        help = "that ships with jspec, or a config.json or its folder"
        kind.add_argument("--model", metavar="NAME", help=help)
    for kind in (roofline, pareto, paper):
        add = kind.add_argument
        add("--context", default="1M", metavar="N", help="positions, as in 1M (default)")
    for kind in (roofline, pareto, paper, measured):
        add = kind.add_argument
        add("--hardware", default="gb200", metavar="NAME", help="gb200 (default), h200, h100, FILE")
        add(
            "--set",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="a constant, as in collective_us=4; --json says what there is, and its source",
        )
        add(
            "--calibrate",
            action="append",
            default=[],
            metavar="FILE",
            help="fit constants to a --json of python -m bench helix; "
            "repeatable; --set goes before it",
        )
        add(
            "--calibrated-on",
            metavar="NAME",
            help="the machine of --calibrate, whose rates become shares; default --hardware",
        )
    hopb = kinds.add_parser("hopb", help="messages of some rows while others attend")
    hopb.add_argument("--requests", type=_integer, default=8, metavar="N", help="rows; default 8")
    hopb.add_argument("--compute", type=_finite, default=16, metavar="X", help="of all; default 16")
    hopb.add_argument(
        "--message", type=_finite, default=9.6, metavar="X", help="of all; default 9.6"
    )
    hopb.add_argument(
        "--fixed", type=_finite, default=0, metavar="X", help="of a message; default 0"
    )
    for kind in (roofline, pareto, hopb):
        kind.add_argument("--png", metavar="FILE.png", help="also draw it")
    for kind in (roofline, pareto, paper, hopb, measured):
        kind.add_argument("--csv", metavar="FILE.csv", help="also write every row")
        kind.add_argument("--json", action="store_true", help="print one JSON object, no table")


def _add_compile_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-compile-cache",
        dest="compile_cache",
        action="store_false",
        help="keep no compiled programs in the cache folder for the next run",
    )
