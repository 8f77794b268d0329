"""Print the command that replaces `python -m harness.export`."""

import sys

if __name__ == "__main__":
    sys.exit("python -m harness.export is now called: harness export, or python -m harness export")
