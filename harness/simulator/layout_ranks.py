"""The simulated ranks of one layout, whose steps are timed together."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.records.rank_report import RankReport
from harness.simulator.chrome_trace import trace_events, write_trace
from harness.simulator.process import StepRequest
from harness.simulator.rank import Progress, simulate_rank
from harness.simulator.stage_times import with_stage_waits
from harness.simulator.step_timing import TimedStep


def simulate_ranks_of_layout(
    requests: Sequence[StepRequest],
    report_progress: Progress = lambda phase, step: None,
    on_report: Callable[[RankReport], None] = lambda report: None,
    trace: Path | None = None,
) -> list[RankReport]:
    """Return the reports of ranks of one configuration and layout, and write a trace of their steps to a file.

    `on_report` is called with every report as soon as it exists, when the rank's step does not wait for other stages.
    """
    timed: list[TimedStep] = []
    reports = []
    for request in requests:
        reports.append(simulate_rank(request, report_progress, timed.append))
        on_report(reports[-1])
    if not timed:
        return reports
    config, layout = requests[0].config, requests[0].layout
    steps = with_stage_waits(layout, layout.grad_accumulation_steps(config.train), timed)
    if trace is not None:
        write_trace(trace, [event for step in steps for event in trace_events(step.rank, step.launches, step.schedule)])
    times = {step.rank: step.summary for step in steps}
    return [dataclasses.replace(report, simulated_time=times.get(report.rank)) for report in reports]
