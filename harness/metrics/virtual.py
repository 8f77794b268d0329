"""The columns of a virtual run's row: the memory and the computing of its rank as measured, and an estimated step."""

from collections.abc import Sequence

from harness.cost_model.timing.step_time import StepTime
from harness.layout.layout import Layout
from harness.metrics.disturbance import disturbance_text
from harness.metrics.step_time import EXPOSED, median_step_seconds, step_seconds, step_time_columns
from harness.records.rank_report import RankReport
from harness.records.schema import Cells

# The parts of a step that mean the same in a virtual run as in a real one.
MEASURED = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "other_seconds")


def virtual_columns(layout: Layout, ranks: Sequence[RankReport], predicted: StepTime | None) -> Cells:
    """Return the times of the ranks that ran alone, and the step time with the communication that is predicted.

    A virtual run has no step_seconds and no throughput, as it did not run the whole step. What its stand-ins for
    collectives took is left out. `predicted` is None where the hardware is not known.
    """
    measured = step_time_columns(layout, ranks)
    stand_ins = measured[EXPOSED]  # None where the steps were not traced
    columns: Cells = {name: measured[name] for name in MEASURED}
    columns |= {
        "skipped_steps": max(rank.skipped_steps for rank in ranks),
        "noise_warning": disturbance_text(step_seconds(ranks), [rank.host_usage for rank in ranks]),
    }
    if predicted is None:
        return columns
    communication = sum(predicted.exposed_communication_seconds.values()) + predicted.bubble_seconds
    alone = median_step_seconds(ranks) - (stand_ins if isinstance(stand_ins, float) else 0.0)
    return columns | {
        "predicted_communication_seconds": communication,
        "estimated_step_seconds": alone + communication,
    }
