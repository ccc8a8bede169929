"""Hints that install packages: a command that pip takes as it is printed."""

import importlib
import re
import shlex
import tomllib
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from jspec import extras

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.mark.parametrize("extra", ["cuda12", "cuda13", "cuda13-build"])
def test_a_hint_names_the_packages_of_an_extra(extra):
    if not PROJECT.exists():
        pytest.skip("the tests run apart from the repository")
    expected = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"][extra]
    begin, *packages = re.split(r"(?<=install) ", extras.install(extra))
    assert begin == "pip install"
    result = {str(Requirement(package)) for package in shlex.split(packages[0])}
    assert result == {str(Requirement(line.partition(";")[0])) for line in expected}


def test_an_older_python_is_told_what_the_packages_need(monkeypatch):
    command = extras.install("cuda13")
    monkeypatch.setattr(extras, "GPU_PYTHON", (3, 0))
    assert extras.install_gpu("cuda13") == command
    monkeypatch.setattr(extras, "GPU_PYTHON", (3, 99))
    said = "make an environment of Python 3.99 or newer with jspec, and there "
    assert extras.install_gpu("cuda13") == said + command


def test_sources_that_pip_does_not_know_are_installed_where_they_are(monkeypatch):
    def unknown(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", unknown)
    assert extras.install("cuda13") == "pip install -e '.[cuda13]' in jspec's folder"


@pytest.mark.skipif(find_spec("tunix") is not None, reason="Tunix is installed")
def test_an_import_without_tunix_says_what_it_needs():
    with pytest.raises(ImportError, match=r"needs Tunix \(No module named 'tunix'\); pip install"):
        importlib.import_module("jspec.tunix")
