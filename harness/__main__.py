"""Start the command line: `python -m harness` does what the console script `harness` does."""

import sys

from harness.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
