"""The reference of a run: the finished run that it is compared with, or the reason why there is none."""

from dataclasses import dataclass

from harness.records.rank_report import RankReport
from harness.records.schema import Cells
from harness.runner.plan import Plan


@dataclass(frozen=True)
class Reference:
    """The finished run that another run is compared with, or a note that says why there is none.

    A single process that keeps all activations counts as right. The training of any other layout is compared in its
    turn, with fewer layers, with the reference `shallower`: a chain that ends at such a process.
    """

    note: str  # what a run is compared with and how far back that reaches, or why it is compared with nothing
    plan: Plan | None = None  # None where there is no such run
    report: RankReport | None = None  # what its ranks report together
    seconds: float = 0.0  # how long it ran, with all runs of its chain
    shallower: "Reference | None" = None  # what the same layout was compared with on fewer layers
    failure: Cells | None = None  # status and reason of a row that cannot be proven because the reference failed

    @property
    def proven_layers(self) -> int | None:
        """The number of layers that the single process at the end of the chain trained; None without a reference."""
        if self.shallower is not None:
            return self.shallower.proven_layers
        return None if self.plan is None else self.plan.config.model.num_hidden_layers

    @property
    def columns(self) -> Cells:
        """The columns of a row that is compared with this."""
        columns: Cells = {"reference": self.note}
        if self.plan is not None:
            columns |= {"reference_layers": self.proven_layers, "reference_seconds": self.seconds}
        return columns


def chain_text(plan: Plan, single: Plan) -> str:
    """Return how a layout was compared with a single process that trained fewer layers."""
    layers, all_layers = single.config.model.num_hidden_layers, plan.config.model.num_hidden_layers
    return f"compared on {layers} of {all_layers} layers with {single.run_id}"
