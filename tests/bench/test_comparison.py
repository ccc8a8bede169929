"""The page that compares backends, from results whose times are known and from committed ones."""

import re

import pytest

from bench import report
from bench.report import code, comparison, whole
from bench.report.markdown import BEGIN, END, refreshed
from bench.report.runs import Run, read
from jspec.ops import operations

CEILINGS = [
    {"operation": "ceilings", "name": work, "checked": True}
    | {"case": {"work": work, "bytes": 2**30, "l2": "warm"}}
    | {"bytes": 10**9, "device_ns": [1_000_000] * 3}  # 1 TB/s
    for work in ("read", "copy")
]
CASE = {
    "B": 4,
    "S": 131072,
    "T": 1,
    "heads": "32/8",
    "H": 128,
    "cache": "bfloat16",
    "lengths": "full",
}


def row(name, microseconds, **rest):
    line = {"operation": "attention", "case": CASE, "name": name, "checked": True}
    line |= {"device_ns": [1000 * microseconds] * 3, "bytes": 10**8, "backend": True}
    return line | rest


def run(*rows, suite="attention", date="2026-01-01", device="NVIDIA H100 80GB HBM3"):
    machine = {"device": device, "date": date}
    return Run("h100", suite, "", {"machine": machine, "ceilings": CEILINGS, "rows": list(rows)})


def words(text):
    return " ".join(text.split())


def lines(text):
    """The cells of a table's lines."""
    table = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_a_line_has_every_backend_the_best_rival_and_reasons():
    refused = {"operation": "attention", "case": CASE, "name": "cuda", "checked": None}
    refused["reason"] = "H=128 is not 64"
    rows = [row("triton", 200), row("pallas", 125), row("xla", 1000), row("xla_blocked", 500)]
    text = comparison.operations(
        "attention", [run(*rows, refused, row("fa3", 100), row("cudnn", 250))]
    )
    title = "`attention`, long-context attention: heads=32/8, H=128. Not timed on an H100: "
    assert f"{title}B=4, S=128K, T=10; B=8, S=32K, T=1." in words(text)
    (cells,) = lines(text)
    assert cells[:4] == ["4", "128K", "1", "H100"]
    assert cells[4:] == ["**125 (80%)**", "[1]", "200 (50%)", "500 (20%)", "100, fa3"]
    assert "[1] H=128 is not 64" in text
    assert words(text).count("Not measured.") == len(comparison.FAMILIES["attention"]) - 1


def test_what_all_lines_share_stands_above_the_table():
    refused = {"name": "pallas", "checked": None, "reason": "no 8 bits"}
    case = CASE | {"cache": "float8_e4m3fn"}
    rows = [
        row(name, time, case=case | {"T": t})
        for t in (1, 10)
        for name, time in {"cuda": 200, "triton": 100 + 10 * t}.items()
    ]
    rows += [{"operation": "attention", "case": case | {"T": t}} | refused for t in (1, 10)]
    text = comparison.operations("attention", [run(*rows)])
    sentences = "Timed on an H100 only. Without pallas: no 8 bits. Without xla: not timed."
    assert sentences in words(text)
    assert "| T | cuda | triton |" in text  # two equal times are no constant column
    assert lines(text) == [["1", "200 (50%)", "110 (91%)"], ["10", "200 (50%)", "200 (50%)"]]
    other = [row(name, 100, case=case) for name in ("cuda", "triton")]
    text = comparison.operations("attention", [run(*rows), run(*other, device="NVIDIA H200")])
    assert "Not timed on an H200: T=10." in words(text)
    assert [cells[:2] for cells in lines(text)] == [["1", "H100"], ["", "H200"], ["10", "H100"]]


def test_of_several_runs_that_with_most_backends_stands_and_others_fill_gaps():
    old = run(row("pallas", 150), row("triton", 160), row("xla", 900), date="2026-01-02")
    late = run(row("triton", 170), row("cuda", 140), date="2026-01-03")
    (_, point), *_ = comparison.points(comparison.FAMILIES["attention"][0], CASE, [late, old])
    times = {column: timed and timed.time for column, timed in point.timed.items()}
    assert times == {"pallas": 150, "cuda": 140, "triton": 160, "xla": 900}
    wrong = run(row("triton", 1, checked=False), date="2026-01-04")
    (_, same), *_ = comparison.points(comparison.FAMILIES["attention"][0], CASE, [late, old, wrong])
    assert same.timed == point.timed


def test_answers_are_ratios_to_the_fastest_backend_over_all_cases_and_cards():
    other, single = {"case": CASE | {"T": 10}}, {"case": CASE | {"B": 8, "S": 32768}}
    rows = [row("triton", 200), row("pallas", 250), row("xla", 900), row("fa3", 100)]
    rows += [row("pallas", 10, **single), row("triton", 20, **single)]
    late = [row("triton", 300, **other), row("cuda", 200, **other), row("xla", 500, **other)]
    runs = [run(*rows), run(*late, device="NVIDIA H200")]
    (cells,) = lines(comparison.answers(runs))
    span = ["1.25*", "1.00*", "1.00 to 1.50", "2.50 to 4.50"]
    assert cells == ["long-context attention", "triton", *span]
    near = [row("triton", 300), row("pallas", 309), row("xla", 312)]
    (cells,) = lines(comparison.answers([run(*near)]))
    assert cells[1:] == ["triton, pallas", "1.03", "-", "1.00", "1.04"]
    steps = [step("default", 8), step("pallas", 10), step("cuda", 8), step("xla", 20)]
    (cells,) = lines(comparison.answers([run(*steps, suite="decode")]))
    assert cells == ["a step of m", "cuda", "1.25", "1.00", "-", "2.50"]
    assert "not measured" in comparison.answers([])


def test_scans_compare_the_naive_kernel_with_the_ballot_kernel():
    case = {"B": 32, "gamma": 128, "alpha": 0.9, "order": "drawn"}

    def scan(name, microseconds, **rest):
        return row(name, microseconds, operation="acceptance_scan", case=case, **rest)

    rows = [scan("cuda_naive", 25), scan("cuda", 1.25), scan("xla", 5)]
    (cells,) = lines(comparison.scans([run(*rows, suite="verify")]))
    assert cells == ["25.0", "1.25", "20.00x"]
    assert "not measured" in comparison.scans([run(*rows[1:], suite="verify")])


def step(name, milliseconds, **rest):
    case = {"model": "m", "B": 4, "S": 8192, "draft": "vegas", "sampling": "greedy"}
    line = {"operation": "backend", "case": case, "name": name, "checked": "2 layers"}
    return line | {"step_ns": [1_000_000 * milliseconds] * 3, "over_floor": 1.25} | rest


def test_scans_are_in_the_order_of_gamma_and_alpha():
    cases = [{"B": 32, "gamma": g, "alpha": a} for g, a in ((128, 0.9), (8, 0.9), (8, 0.3))]
    rows = [
        row(name, 1, operation="acceptance_scan", case=case)
        for case in cases
        for name in ("cuda_naive", "cuda")
    ]
    text = comparison.scans([run(*rows, suite="verify")])
    assert text.startswith("B=32, card=H100.\n")
    assert [cells[:2] for cells in lines(text)] == [["8", "0.3"], ["", "0.9"], ["128", "0.9"]]


def test_the_packing_of_a_path_is_timed_in_a_loop():
    """A call by itself copies the caches, which hides how much longer XLA takes."""
    (entry,) = (x for x in comparison.FAMILIES["packing"] if x.operation == "pack_path")
    loops = {"cuda": [20_000] * 3, "xla": [200_000] * 3, "pallas": None}
    rows = [
        row(name, 500, operation="pack_path", case=dict(entry.cases[0]))
        | ({} if step is None else {"step_ns": step})
        for name, step in loops.items()
    ]
    ((_, point),) = comparison.points(entry, entry.cases[0], [run(*rows, suite="pack")])
    assert point.times == {"cuda": 20, "xla": 200}


def test_steps_say_what_another_backend_ran():
    choice = {"operation": "linear", "backend": "xla", "reason": "it has no backend pallas"}
    rows = [step("default", 8), step("pallas", 9, backends=[choice])]
    text = whole.steps([run(*rows, suite="decode")])
    (cells,) = lines(text)
    assert "**m, random weights**, greedy:" in text
    assert cells[:2] == ["B=4, S=8K, vegas", "H100"]
    assert cells[2:] == ["8.00 (80%)", "9.00 (80%)", *["-"] * 3]
    assert "- pallas: `linear` by xla\n" in text
    assert "not measured" in whole.steps([run(step("default", 8), suite="decode")])
    refused = {"operation": "backend", "case": rows[0]["case"], "name": "xla", "checked": None}
    refused |= {"reason": "it needs 161.6 GB", "memory": {"peak_bytes": 161.6e9}}
    (cells,) = lines(whole.steps([run(*rows, refused, suite="decode")]))
    assert cells[-1] == "162 GB"
    wrong = refused | {"checked": False}
    (cells,) = lines(whole.steps([run(*rows, wrong, suite="decode")]))
    assert cells[-1] == "-"
    # No line for a card that has room for none.
    assert "not measured" in whole.steps([run(refused, suite="decode")])


def test_real_steps_by_backend_are_of_one_day():
    """The last with more than the default, which is faster since."""

    def timed(ms, day, backends):
        case = {"model": "m", "B": 1, "S": 4096, "sampling": "greedy", "backends": backends}
        common = {"operation": "real", "name": "none", "checked": True, "date": day, "case": case}
        return common | {"step_ns": [ms * 10**6] * 3}

    first = [timed(9, "1", "default"), timed(8, "1", "cuda")]
    second = [timed(6, "2", "default"), timed(7, "2", "cuda")]
    rows = [timed(5, "3", "default"), *second, *first]
    (cells,) = lines(whole.steps([run(*rows, suite="real")]))
    assert cells[2:5] == ["6.00", "-", "7.00"]


def test_steps_with_trees_say_what_packing_takes_and_what_fell_back():
    def timed(name, ms, by, sampling="greedy", **rest):
        case = {"model": "m", "B": 12, "S": 2048, "gamma": 15, "sampling": sampling}
        common = {"operation": "real", "name": name, "checked": True, "date": "1"}
        common |= {"case": case | {"backends": by}, "step_ns": [ms * 10**6] * 3}
        return common | {"floors_ns": {"verification": 10**6}} | rest

    def tree(ms, by, packing, **rest):
        parts = {"packing": packing * 10**3, "verification": 10**6}
        return timed("ngram-tree", ms, by, parts_ns=parts, **rest)

    old = "jax-triton is too old"
    fallback = {"operation": "pack_path", "backend": "cuda", "reason": old}
    taken = {"operation": "verify_tree", "backend": "triton", "reason": None}
    other = {"operation": "linear", "backend": "xla", "reason": "of a chain"}
    rows = [
        tree(4, "default", 20),
        tree(5, "cuda", 20),
        tree(8, "triton", 0, backends=[fallback, taken]),
        timed("ngram-1", 3, "default", backends=[other]),
        timed("ngram-1", 4, "cuda"),
        timed("vegas", 9, "cuda"),
        timed("ngram-tree", 1, "cuda", "t0.8"),
    ]
    text = whole.steps([run(*rows, suite="real")])
    vegas, chain, branching = lines(text)
    assert "**m, real texts**, greedy, H100:" in text
    assert vegas[0] == "B=12, S=2K, vegas(15)"
    assert chain == ["B=12, S=2K, ngram-1(15)", "3.00 (33%)", "-", "4.00 (25%)", "-", "-"]
    assert branching[0] == "B=12, S=2K, ngram-tree(15)"
    assert branching[1:] == ["4.00 (25%)", "-", "5.00 (20%)", "8.00 (12%)", "-"]
    assert "Share of packing in B=12, S=2K, ngram-tree(15): default: 0.50%, cuda: 0.40%.\n" in text
    assert text.endswith(f"backend:\n\n- triton: `pack_path` by cuda ({old})\n")
    only_default = [run(rows[0], rows[3], suite="real")]
    assert whole.steps(only_default) == "Steps by backend: not measured.\n"


def test_sharded_attention_is_by_kernel_and_by_exchange():
    def attend(microseconds, **case):
        base = {"B": 8, "S": 131072, "heads": "128/8", "T": 1, "kvp": 2, "tpa": 1, "latent": 0}
        base |= {"strategy": "helix", "overlap": 1, "kernel": "default", "exchange": "xla"}
        line = {"operation": "attend", "case": base | case, "name": "helix", "checked": True}
        return line | {"step_ns": [1000 * microseconds] * 3}

    rows = [
        attend(60),
        attend(50, exchange="cuda"),
        attend(70, kernel="triton"),
        attend(9, overlap=2),
    ]
    four = [attend(30, kvp=4), attend(20, kvp=4, exchange="pallas")]
    text = whole.sharded([run(*rows, *four, suite="helix")])
    assert text.startswith("TPA=1, B=8, S=128K, heads=128/8, T=1.\n")
    kernel, exchange = (lines(table) for table in text.split("\n\n")[1:])
    assert kernel[0] == ["KVP=2", "H100", "-", "-", "70.0", "-"]
    assert exchange == [
        ["KVP=2", "H100", "60.0", "-", "50.0"],
        ["KVP=4", "H100", "30.0", "20.0", "-"],
    ]


def test_a_picture_has_a_bar_for_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    assert not comparison.draw("attention", [], path)
    assert not path.exists()
    assert comparison.draw("attention", [run(row("triton", 200), row("fa3", 100))], path)
    assert path.stat().st_size > 1000


def test_the_operations_of_the_page_exist():
    known = {operation.name: operation for operation in operations()}
    for entry in (entry for family in comparison.FAMILIES.values() for entry in family):
        backends = set(known[entry.operation].backends)
        assert not set(entry.without) & backends


def test_lines_of_code_are_without_comments_and_docstrings():
    python = '"""Doc.\n\nmore\n"""\nimport x  # y\n\n# c\ndef f(a,\n      b):\n    """D."""\n'
    python += '    s = """a\n    b"""\n'
    assert code.python_lines(python) == 5
    assert code.c_lines("// a\nint x; // b\n/* c\n d */\n\nint y;\n") == 2
    counts = code.lines_of_code()
    assert set(counts) == set(comparison.FAMILIES)
    assert all(of_family[backend] > 50 for of_family in counts.values() for backend in of_family)


def test_every_kernel_file_is_counted():
    """But for those of operations that the page does not have."""
    others = "all_to_all|mosaic|append(_kernel)?$|route|grouped|mxfp4|collisions|key_scores"
    others += "|weights|call$"
    counted = {
        path
        for of_family in code.FILES.values()
        for globs in of_family.values()
        for path in code._paths(globs)
    }
    for folder in ("pallas", "triton"):
        for path in (code.JSPEC / folder).glob("*.py"):
            if path.stem != "__init__" and not re.match(others, path.stem):
                assert path in counted, path


def test_the_committed_page_is_that_of_the_results():
    page = (report.DOCS / "comparison.md").read_text()
    written = refreshed(page, comparison.tables(read(report.RESULTS)))
    # Lines of code change with every kernel, and the page is written with the next results.
    before, after = (text.partition("## What a kernel costs")[0] for text in (page, written))
    assert before.replace("not written", "not measured") == after.replace(
        "not written", "not measured"
    )
    assert set(re.findall(r"<!-- table ([a-z ]+):", page)) == set(comparison.TABLES)
    assert max(map(len, page.splitlines())) <= 100
    for picture in re.findall(r"\]\((.*?\.png)\)", page):
        assert (report.DOCS / picture).exists()


def test_a_table_that_there_is_none_of_is_an_error():
    page = f"{BEGIN.format('songs')}\n{END}\n"
    with pytest.raises(ValueError, match="there is no table 'songs'; there are verification,"):
        refreshed(page, comparison.tables([]))
