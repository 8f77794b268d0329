"""Print the command that replaces `python -m harness.tracking`."""

import sys

if __name__ == "__main__":
    sys.exit("python -m harness.tracking is now called: harness sync, or python -m harness sync")
