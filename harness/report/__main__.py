"""Say what `python -m harness.report` is called now."""

import sys

if __name__ == "__main__":
    sys.exit("python -m harness.report is now called: harness report, or python -m harness report")
