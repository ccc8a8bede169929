"""`python -m jspec.cli`: the same as the `jspec` command."""

import sys

from jspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
