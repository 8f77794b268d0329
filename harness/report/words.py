"""The words of a report for a reader without the documentation: its strategies, and the terms of its tables."""

from collections.abc import Iterator

from harness.config.comments import first_sentence
from harness.config.locations import conf_folders, files_in
from harness.report.document import BulletList, Section, section
from harness.report.view import View

_TERMS = {
    "rank": "one process of a training, which has one device",
    "micro-batch": "the sequences that a rank computes at once; the gradients of several add up to those of a step",
    "activations": "the results of the forward pass that are kept for the backward pass",
    "checkpointing": "activations are computed again in the backward pass instead of kept: nothing is saved to a disk",
    "model state": "parameters, gradients and what the optimizer keeps",
    "peak memory": "the most memory that a rank had allocated at one time",
    "exposed communication": "time in which a rank only waits for messages, because it has nothing else to compute",
    "bf16_mixed": "products are computed in 16 bit, while parameters and moments are kept in 32",
}


def words(view: View) -> list[Section]:
    """Return the section with a line for each strategy of the report and for each term."""
    return section("Words", BulletList([*_strategies(view), *_TERMS.items()])) if view.lines else []


def _strategies(view: View) -> Iterator[tuple[str, str]]:
    """Yield what the file of each strategy says of it; those of other folders than are at hand have no line."""
    files = files_in(conf_folders(), "strategy")
    for name in dict.fromkeys(str(line.row.get("strategy")) for line in view.lines):
        if name in files and (about := first_sentence(files[name].read_text(encoding="utf-8"))):
            yield name, about
