"""docs/RESULTS.md and its pictures, from the JSON under bench/results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.report import figures, glance, readme
from bench.report.questions import QUESTIONS, Question
from bench.report.runs import JOINED, Run, read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
DOCS = ROOT.parent / "docs"
README = ROOT.parent / "README.md"
HEAD = (
    "# Results\n\n"
    "Written by `python -m bench report` from `bench/results/`; edit neither by hand. A table "
    "shows the cases that answer its question; its command prints all rows. A file has the versions"
    " and the date of its run.{rest}\n"
)


def write(results: Path = RESULTS, docs: Path = DOCS, page: Path | None = None) -> None:
    """Write RESULTS.md and its pictures into ``docs``.

    Args:
        results: a folder with one of JSON files a machine. A suite's result is in ``SUITE.json``,
            those of further runs, of other cases, in ``SUITE.NAME.json``.
        docs: where to write.
        page: a README, whose part on real models is written too.
    """
    docs.mkdir(parents=True, exist_ok=True)
    runs = read(results)
    parts = [HEAD.format(rest=_rest(runs)), *glance.tables_of(runs, _titles())]
    parts += [part for question in QUESTIONS for part in _parts(question, runs, docs)]
    (docs / "RESULTS.md").write_text("\n".join(parts))
    if page is not None:
        page.write_text(readme.refreshed(page.read_text(), of_real(runs)))


def of_real(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """What real models show, by the name of a machine's folder, in the order of RESULTS.md."""
    return {run.machine: run.result for run in runs if run.suite == "real"}


def _titles() -> dict[str, str]:
    """The heading of each suite's first table; that of a table which names the suite first."""
    main = {question.suites[0] for question in QUESTIONS}
    titles, title = {}, ""
    for question in QUESTIONS:
        title = question.title or title
        for suite in question.suites:
            if suite == question.suites[0] or suite not in main:
                titles.setdefault(suite, title)
    return titles


def _parts(question: Question, runs: Sequence[Run], docs: Path) -> Iterator[str]:
    """Heading, words, pictures, table and command; nothing where no GPU has a result."""
    of_question = [run for suite in question.suites for run in runs if run.suite == suite]
    shown = _on_gpus(of_question)
    if not shown:
        return
    if question.title:
        yield f"## {question.title}\n"
    words = f"{question.words} All rows: `python -m bench show {_files(of_question)}`."
    yield " ".join([words, *_pictures(question, shown, docs)]) + "\n"
    yield question.table(shown)
    if question.notes is not None and (notes := question.notes(shown)):
        yield f"{notes}\n"


def _on_gpus(runs: Sequence[Run]) -> list[Run]:
    """The runs on GPUs; those on CPUs where there are no others."""
    return [run for run in runs if run.device != "cpu"] or list(runs)


def _pictures(question: Question, runs: Sequence[Run], docs: Path) -> Iterator[str]:
    """Links to what was drawn of the first run of a machine that has what the picture shows."""
    drawn: set[str] = set()
    for run in runs if question.has_picture else ():
        drawing = figures.FIGURES.get(run.suite)
        if drawing is None or run.machine in drawn or (drawn and not question.every_card):
            continue
        path = docs / f"{run.machine}-{drawing.name}.png"
        if figures.draw(run.result, path):
            drawn.add(run.machine)
            yield f"![{run.card}: {drawing.words}]({path.name})"


def _files(runs: Sequence[Run]) -> str:
    """The files of runs, as a shell with braces finds them."""
    by_place: dict[tuple[str, str], list[str]] = {}
    for suite in dict.fromkeys(run.suite for run in runs):
        of_suite = [run for run in runs if run.suite == suite]
        folders = list(dict.fromkeys(run.machine for run in of_suite))
        several = suite in JOINED or any(run.name for run in of_suite)
        place = (folders[0] if len(folders) == 1 else "*", "*json" if several else "json")
        by_place.setdefault(place, []).append(suite)
    files = []
    for (folder, ending), names in by_place.items():
        braces = f"{{{','.join(names)}}}" if len(names) > 1 else names[0]
        files.append(f"bench/results/{folder}/{braces}.{ending}")
    return " ".join(files)


def _rest(runs: Sequence[Run]) -> str:
    """The suites without a table."""
    titles = _titles()
    rest = sorted((run for run in runs if run.suite not in titles), key=lambda run: run.suite)
    return f" Other suites: `python -m bench show {_files(rest)}`." if rest else ""
