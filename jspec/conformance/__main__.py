"""``python -m jspec.conformance``."""

import sys

from jspec.conformance.command import main

if __name__ == "__main__":
    sys.exit(main())
