"""Training measurements that others have published, as configurations and layouts of this project."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.config.schema import RunConfig
from harness.layout.layout import Layout

DATA = Path(__file__).resolve().parents[2] / "data" / "published"


@dataclass(frozen=True)
class PublishedRow:
    """One measurement: what was trained, on what, and the figures that were published for it."""

    source: str  # the name of the file in tests/data/published
    row_number: int  # the line in that file, of which the header is line 1
    group: str  # the model and the number of devices; groups are fitted and reported as a whole
    config: RunConfig
    layout: Layout
    cluster: str  # the name of a file in conf/cluster
    nodes: int
    gpus_per_node: int  # of those that train
    stack: str  # the name of a file in conf/stack
    measured: Mapping[
        str, float
    ]  # by names with units, such as step_seconds; figures that were not published are missing
    status: str = "ok"  # how the run ended: ok, or as the source names it
    # figures of the cluster's hardware that were others where the row was measured, such as inter_node_bandwidth
    hardware_changes: Mapping[str, float] = field(default_factory=dict)
