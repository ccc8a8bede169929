"""Numbers of the command and of the simulator's files: odd ones are one line and exit code 2."""

import copy
import json
import math
import random

import pytest

from jspec.cli import main
from jspec.cli.arguments import command_parser, parse_arguments
from jspec.helix.simulator.shapes import DATA

ODD = (
    *("nan", "inf", "1e400", "-1e400", "-0", "-1", "0.5", "1e-400", "1e308", "9" * 30, "9" * 5000),
    *("0x10", "1__0", "_1", "\u0663", "\xb2", "", " ", "-", "1,5", "1e", "1\n", "1\x00", "\ud800"),
)
NEEDED = {"tune": ["--requests=r", "--out=o"], "train-hash": ["--data=d", "--out=o"]}


def numeric_options():
    """What comes before it, the option and its name, of each option that reads a number."""
    (commands,) = (x for x in command_parser()._actions if isinstance(x.choices, dict))
    for name, parser in commands.choices.items():
        groups = [([name, *NEEDED.get(name, [])], parser)]
        if name == "simulate":
            (kinds,) = (x for x in parser._actions if isinstance(x.choices, dict))
            groups = [([name, kind], kind_parser) for kind, kind_parser in kinds.choices.items()]
        for before, group in groups:
            before = [*before, "ruler"] if name == "eval" else before
            for action in group._actions:
                if action.type is not None:
                    yield before, action.option_strings[-1], action.dest


def test_an_odd_number_is_refused_in_one_line_or_read(capsys):
    rng, options = random.Random(0), list(numeric_options())
    assert len(options) > 30
    for before, option, name in options:
        for odd in ("--", *rng.sample(ODD, 5)):
            try:
                value = getattr(parse_arguments([*before, f"{option}={odd}"]), name)
            except SystemExit as end:
                code, value = end.code, None
            error = capsys.readouterr().err
            if value is None:
                assert (code, error.count("\n")) == (2, 1), (option, odd)
                continue
            (value,) = value if isinstance(value, list) else (value,)
            assert isinstance(value, int | float), (option, odd)
            assert odd != "--"


@pytest.mark.parametrize("kind", ["hardware", "models"])
def test_an_odd_file_is_refused_in_one_line_or_read(kind, tmp_path, capsys):
    rng, path = random.Random(0), tmp_path / "odd.json"
    texts = [file.read_text() for file in sorted((DATA / kind).iterdir(), key=str)]
    values = (None, True, 0, -1, 1e308, 5e-324, 10**400, 2**63, 0.5, "x" * 10000, [], {}, math.nan)
    for _ in range(100):
        fields = json.loads(rng.choice(texts))
        name = rng.choice(list(fields))
        fields[name] = copy.deepcopy(rng.choice(values))
        path.write_text(json.dumps(fields))
        option = "--hardware" if kind == "hardware" else "--model"
        code = main(["simulate", "roofline", option, str(path)])
        error = capsys.readouterr().err
        assert code == 0 or (code, error.count("\n")) == (2, 1), fields
        assert len(error) < 1100
