"""What is imported when: `jspec --help` waits for nothing, and every public name loads."""

import subprocess
import sys
from pathlib import Path

import pytest


def run(script: str) -> None:
    """Run a script in a process that has imported nothing yet."""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_help_does_not_import_jax():
    script = (
        "import sys\nfrom jspec.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    )
    run(script)


def test_import_touches_no_device():
    script = (
        "import jspec, sys\nassert 'jax' not in sys.modules\n"
        "jspec.generate, jspec.speculative_step, jspec.Decoder\n"
        "from jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized()"
    )
    run(script)


def test_public_names_load():
    import jspec

    for name in jspec.__all__:
        assert getattr(jspec, name) is not None
    assert set(jspec.__all__) <= set(dir(jspec))
    assert Path(jspec.__file__).with_name("py.typed").is_file()  # or type checkers see none of it
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = jspec.no_such_name
