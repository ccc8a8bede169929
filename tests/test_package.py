"""What `pip install` brings: the packages that are imported, and the files that are read."""

import ast
import itertools
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Where a distribution has another name than what is imported.
IMPORTED_AS = {
    "lazy-loader": "lazy_loader",
    "orbax-checkpoint": "orbax",
    "jax-triton": "jax_triton",
    "google-tunix": "tunix",
}


@pytest.fixture(scope="module")
def project() -> dict:
    path = ROOT / "pyproject.toml"
    if not path.exists():
        pytest.skip("the tests run apart from the repository")
    return tomllib.loads(path.read_text())


def names(requirements: list[str]) -> set[str]:
    """What distributions such as ``jax[cuda13]>=0.11`` are imported as."""
    distributions = {r.partition(">")[0].partition("[")[0].strip() for r in requirements}
    return {IMPORTED_AS.get(name, name) for name in distributions}


def imported(folder: Path) -> set[str]:
    """Top packages that the files of a folder import, but the standard library and jspec."""
    modules = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(str(node.module).partition(".")[0])
    return modules - set(sys.stdlib_module_names) - {"jspec"}


def test_every_dependency_is_imported_and_every_import_is_a_dependency(project):
    needed = names(project["project"]["dependencies"])
    extras = project["project"]["optional-dependencies"]
    named = (extras[name] for name in ("cuda13", "bench", "eval", "tunix"))
    optional = names([*itertools.chain(*named)]) | {"triton"}
    imports = imported(ROOT / "jspec")
    assert needed <= imports
    assert imports <= needed | optional


def test_every_hint_installs_this_distribution_and_an_extra_that_there_is(project):
    """Another project holds the name jspec on the package index."""
    project = project["project"]
    assert project["name"] == "jspec-jax"
    extras = project["optional-dependencies"]
    itself = [r for extra in extras.values() for r in extra if r.startswith("jspec")]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    code = [path for room in ("jspec", "bench") for path in (ROOT / room).rglob("*.py")]
    hints = list(itself)
    for path in [*pages, *code, ROOT / ".ci" / "run"]:
        named = re.findall(r"'((?:jspec[\w-]*|\.)\[[\w,-]+\])'", path.read_text())
        # What an installed package prints is not read in a checkout.
        assert not path.is_relative_to(ROOT / "jspec") or all(x[0] != "." for x in named), path
        hints += named
    assert len(hints) > 8
    for hint in hints:
        name, _, named = hint.rstrip("]").partition("[")
        assert name in (".", "jspec-jax"), hint
        assert set(named.split(",")) <= set(extras), hint


def test_what_the_wheel_leaves_out_is_there_and_is_never_named(project):
    left_out = project["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]
    code = "".join(path.read_text() for path in (ROOT / "jspec").rglob("*.py"))
    for name in left_out:
        assert (ROOT / name).is_file()
        assert Path(name).name not in code
