"""Print the command that replaces `python -m harness.report`."""

import sys

if __name__ == "__main__":
    sys.exit("python -m harness.report is now called: harness report, or python -m harness report")
