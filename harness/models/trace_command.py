"""A process that traces one Hugging Face model: values of a model as JSON on standard input, the filled ones out.

`harness plan` starts it, so that it never imports torch itself.
"""

import json
import sys

from harness.models.hf import fill_model_config
from harness.util.errors import run_command


def trace() -> None:
    """Print the values of the model on standard input, filled in from its trace. Raises UserError if there is none."""
    request = json.load(sys.stdin)
    print(json.dumps(fill_model_config(request["model"], request["seq_len"])))


if __name__ == "__main__":
    sys.exit(run_command(trace))
