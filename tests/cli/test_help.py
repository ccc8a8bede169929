"""`--help` of every command."""

from jspec.cli.arguments import command_parser


def parsers(parser, name=()):
    yield " ".join(name), parser
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for command, inner in action.choices.items():
                yield from parsers(inner, (*name, command))


def test_the_help_of_each_command_fits_100_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    names = []
    for name, parser in parsers(command_parser()):
        names.append(name)
        for line in parser.format_help().splitlines():
            assert len(line) <= 100, f"{name}: {line}"
    assert {"", "eval", "simulate pareto"} <= set(names)
