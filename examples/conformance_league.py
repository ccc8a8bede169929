"""Verifiers of other projects, put through the sampling laws: a table of verdicts.

    python -m examples.conformance_league [--rows 20000]

A verifier whose packages or GPU are missing is a row that says so.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from jspec.conformance import LAWS, check, diagnosis
from jspec.conformance.verifier import VerifierError, guarded, load

VERIFIERS = {
    "jspec, token rule": "jspec.conformance.rules:token_rule",
    "jspec, block rule": "jspec.conformance.rules:block_rule",
    "rejection sampling in PyTorch": "examples.conformance_torch:verify",
    "transformers, assisted decoding": "examples.conformance_transformers:verify",
    "vLLM's algorithm": "examples.conformance_vllm:verify",
    "FlashInfer, chain sampling": "examples.conformance_flashinfer:verify",
}


QUICK = tuple(law for law in LAWS if law != "tail")  # which takes minutes in PyTorch on a CPU


def verdicts(rows: int, laws: tuple[str, ...]) -> Iterator[str]:
    """The lines of the table."""
    yield f"| verifier | version | {' | '.join(laws)} | verdict |"
    yield "|---" * (len(laws) + 3) + "|"
    for name, place in VERIFIERS.items():
        try:
            findings = list(check(guarded(load(place)), laws, rows=rows))
        except (ValueError, VerifierError) as error:
            yield f"| {name} | {' |' * len(laws)} | not run: {str(error).splitlines()[0]} |"
            continue
        cells = " | ".join(
            f"{x.p_value:.0e}" if x.holds else f"**{x.p_value:.0e}**" for x in findings
        )
        yield f"| {name} | {_version(place)} | {cells} | {diagnosis(findings) or 'lossless'} |"


def _version(place: str) -> str:
    name = place.partition(":")[0].rpartition("_")[2]
    package = {"vllm": "torch", "jspec.conformance.rules": "jspec"}.get(name, name)
    return f"{package} {importlib.import_module(package).__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=20_000, help="requests of each law")
    parser.add_argument("--laws", nargs="+", choices=tuple(LAWS), default=QUICK)
    settings = parser.parse_args()
    for line in verdicts(settings.rows, tuple(settings.laws)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
