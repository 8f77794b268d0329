"""The program of a Ray job on each of its nodes, which ends with the worker of Ray that started it.

Its arguments are those of harness.sweep.jobs.node.
"""

import signal
import sys

from harness.util.parent_death import die_with_parent

if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)

    from harness.sweep.jobs.node import main  # takes seconds, in which the worker may end
    from harness.util.text import run_command

    sys.exit(run_command(main))
