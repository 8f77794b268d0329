"""Print the command that replaces `python -m harness.status`."""

import sys

if __name__ == "__main__":
    sys.exit("python -m harness.status is now called: harness status, or python -m harness status")
