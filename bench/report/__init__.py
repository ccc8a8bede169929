"""docs/RESULTS.md and its pictures, from the JSON under bench/results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.report import branches, comparison, exact, figures, papers, readme, rollouts, simulated
from bench.report.markdown import Line, refreshed, table
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


def write(
    results: Path = RESULTS,
    docs: Path = DOCS,
    page: Path | None = None,
    pages: Path | None = None,
) -> None:
    """Write RESULTS.md and its pictures into ``docs``.

    Args:
        results: a folder with one of JSON files a machine. A suite's result is in ``SUITE.json``,
            those of further runs, of other cases, in ``SUITE.NAME.json``.
        docs: where to write.
        page: a README, whose part on real models is written too.
        pages: the folder of `pages_of`, whose tables are written too, with their pictures.
    """
    docs.mkdir(parents=True, exist_ok=True)
    runs = read(results)
    parts = [HEAD.format(rest=_rest(runs)), *_glances(runs)]
    parts += [part for question in QUESTIONS for part in _parts(question, runs, docs)]
    (docs / "RESULTS.md").write_text("\n".join(parts))
    if pages is not None:
        for family in comparison.FAMILIES:
            comparison.draw(family, runs, pages / comparison.picture_of(family))
        rollouts.draw(runs, pages / rollouts.PICTURE)
        for name, tables in pages_of(results, runs).items():
            path = pages / name
            path.write_text(refreshed(path.read_text(), tables))
    if page is not None:
        real = [run for run in runs if run.suite == "real"]
        page.write_text(readme.refreshed(page.read_text(), real))


def pages_of(results: Path, runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """The tables of each page whose prose is written by hand."""
    return {
        "comparison.md": comparison.tables(runs),
        "drafting.md": {"trees": branches.timed(runs), "branches": branches.branches(results)},
        "exact.md": exact.tables(runs),
        "papers.md": papers.tables(runs),
        "rollouts.md": rollouts.tables(runs),
        "simulator.md": simulated.tables(results),
    }


def _glances(runs: Sequence[Run]) -> Iterator[str]:
    """The first tables: the headlines of every GPU, and a line for the CPU."""
    for device in dict.fromkeys(run.device for run in runs):
        lines, title, of_device = [], "", [run for run in runs if run.device == device]
        for question in QUESTIONS:
            title = question.title or title
            link = f"[{title}](#{anchor(title)})"
            for case, result, compared in question.headlines(of_device):
                words = {"": link, "case": case, "result": result, "compared with": compared}
                lines.append(Line(words))
        if device == "cpu" and lines:
            cases = (list(line.cells.values())[1:] for line in lines)
            words = [f"{case}: {x} ({compared or 'no rival'})" for case, x, compared in cases]
            yield f"## At a glance: CPU\n\n{'; '.join(words)}.\n"
        elif lines:
            yield f"## At a glance: {device}\n\n{table(lines, 4)}"


def anchor(heading: str) -> str:
    """What a link to a heading ends with, as GitHub and MkDocs make it."""
    letters = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return letters.replace(" ", "-")


def _parts(question: Question, runs: Sequence[Run], docs: Path) -> Iterator[str]:
    """Heading, words, pictures, table and command; nothing where nothing was measured.

    CPUs are left out where there are GPUs.
    """
    every = [run for suite in question.suites for run in runs if run.suite == suite]
    shown = [run for run in every if run.device != "cpu"] or every
    rows = table(question.rows(shown), question.labels)
    if not rows:
        return
    if question.title:
        yield f"## {question.title}\n"
    words = f"{question.words} All rows: `python -m bench show {_files(every)}`."
    pictures = [] if question.picture is None else _pictures(question.picture, shown, docs)
    yield " ".join([words, *pictures]) + "\n"
    yield rows
    if question.notes is not None and (notes := question.notes(shown)):
        yield f"{notes}\n"


def _pictures(picture: figures.Picture, runs: Sequence[Run], docs: Path) -> Iterator[str]:
    """Links to what was drawn of the first run of a machine that has what the picture shows."""
    drawn: set[str] = set()
    for run in runs:
        if run.machine in drawn or (drawn and not picture.every_card):
            continue
        path = docs / f"{run.machine}-{picture.name}.png"
        if figures.draw(picture, run, path):
            drawn.add(run.machine)
            yield f"![{run.card}: {picture.words}]({path.name})"


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
    suites = {suite for question in QUESTIONS for suite in question.suites}
    rest = sorted((run for run in runs if run.suite not in suites), key=lambda run: run.suite)
    return f" Other suites: `python -m bench show {_files(rest)}`." if rest else ""
