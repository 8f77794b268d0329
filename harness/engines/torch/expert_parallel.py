"""Expert parallelism: data-parallel ranks divide the experts and exchange tokens by two all-to-alls (arXiv 2006.16668).

Every rank sends each of its tokens to the ranks that have its experts, and receives the outputs. No token is dropped:
the ranks first tell each other how many they send, and the host waits for these numbers. A rank's gradients of its
experts are those of all tokens that it received.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor

from harness.layout.layer_spec import SHARD_DIM, layer_matrices
from harness.models.decoder import Decoder
from harness.models.grouped import copy_rows, sorted_places, sum_rows

ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]


def shard_experts(model: Decoder, mesh: DeviceMesh) -> None:
    """Shard the weights of all experts on the meta device in place: whole experts along ep, and each along tp."""
    axes = tuple(axis for axis in ("ep", "tp") if axis in (mesh.mesh_dim_names or ()) and mesh[axis].size() > 1)
    for block in model.layers_by_index().values():
        for matrix in layer_matrices(model.config):
            if not matrix.experts:
                continue
            along: dict[str, Placement] = {"ep": Shard(0), "tp": Shard(1 + SHARD_DIM[str(matrix.style)])}
            module = block.get_submodule(matrix.path)
            whole, placements = module.get_parameter("weight"), [along[axis] for axis in axes]
            module.weight = nn.Parameter(distribute_tensor(whole, mesh[axes], placements))


def exchange_tokens(model: Decoder, group: ProcessGroup) -> None:
    """Let the experts of every layer, of which this rank has a part, compute the tokens of all ranks, in place."""
    for block in model.layers_by_index().values():
        experts = block.get_submodule("mlp.experts")
        experts.forward = ExchangedExperts(experts.forward, group)  # type: ignore[method-assign]


def rows_by_rank(own: Tensor, others: Tensor) -> list[list[int]]:
    """Return the rows that go to every rank and come from it, by their numbers (ranks, experts); the host waits."""
    return torch.stack((own.sum(1), others.sum(1))).tolist()  # type: ignore[no-any-return]


class ExchangedExperts:
    """Experts that are divided among the ranks of a group, each of which passes rows of tokens for all of them."""

    def __init__(self, forward: ExpertsForward, group: ProcessGroup) -> None:
        self.forward = forward
        self.group = group

    def __call__(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Return the weighted outputs of this rank's rows (rows, hidden), which are sorted by expert.

        `counts` (experts,) has the number of rows of every expert, whichever rank has it.
        """
        own = counts.view(self.group.size(), -1)
        others = all_to_all_single(counts, None, None, self.group).view_as(own)  # of this rank's experts, by the sender
        sent, received = rows_by_rank(own, others)
        rows = all_to_all_single_autograd(rows, received, sent, self.group)
        weights = all_to_all_single_autograd(weights, received, sent, self.group)
        # Rows have arrived by sender, and are sorted by expert; each is one use of itself.
        expert = torch.arange(own.shape[1], device=rows.device).repeat(len(own))
        order = expert.repeat_interleave(others.flatten(), output_size=len(rows)).argsort(stable=True)
        place = sorted_places(order)
        outputs = self.forward(copy_rows(rows, order, place.unsqueeze(1)), weights[order], others.sum(0))
        returned = sum_rows(outputs, order, place.unsqueeze(1))
        return all_to_all_single_autograd(returned, sent, received, self.group)
