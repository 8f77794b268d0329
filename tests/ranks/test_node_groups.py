"""What a step sends between nodes: simulated ranks send it in groups of ranks, whose places say what leaves a node."""

import pytest

from harness.config.stack import load_stack
from harness.cost_model.ring import LAYOUT
from harness.hardware.machine import described_cluster
from harness.planner.space import predict
from harness.records.rank_report import RankReport
from harness.simulator.process import StepRequest
from tests.support.commands import compose_layout, long
from tests.support.simulated_steps import simulate_steps

DEVICES = 4  # of each of two nodes

SETTINGS = (
    *("model=1b", "model.num_hidden_layers=2", "precision=bf16_mixed", "data=synthetic", "train.global_batch=8"),
    *("train.seq_len=256", "cluster=8xh100", "cluster.nodes=2", f"cluster.gpus_per_node={DEVICES}"),
)


def leaving(report: RankReport) -> float:
    """Return the bytes of the first rank that leave its node, as the mean of the node: around a ring, or to each."""
    result = 0.0
    for traffic in report.profiled.communication:
        ranks = sorted(traffic.group_ranks)
        inside = [rank for rank in ranks if rank < DEVICES]
        if traffic.operation == "all_to_all":
            share = (len(ranks) - len(inside)) / max(1, len(ranks) - 1)
        else:
            following = [ranks[(place + 1) % len(ranks)] for place in range(len(inside))]
            share = sum(rank >= DEVICES for rank in following) / len(inside)
        result += traffic.bytes_sent * share * (traffic.purpose == LAYOUT)
    return result


@pytest.mark.parametrize(
    "strategy",
    [
        "zero3_plus_plus strategy.secondary_shards=4",
        long("cp_ulysses strategy.cp=8 strategy.data_parallel=fsdp strategy.zero_stage=3 model.num_key_value_heads=8"),
        long("fsdp_hybrid_shard strategy.dp_shard=4 strategy.dp_replicate=2"),
        long("fsdp_tp strategy.tp=2 strategy.dp_shard=4"),
        long("fsdp_full_shard strategy.secondary_shards=2"),
    ],
)
def test_simulated_ranks_send_as_much_between_nodes_as_planned(strategy: str) -> None:
    config, layout = compose_layout(8, *f"strategy={strategy}".split(), *SETTINGS)
    (report,) = simulate_steps([StepRequest(config, layout)])
    assert report.status == "ok", report.reason
    prediction = predict(config, layout, described_cluster(config.cluster), load_stack("harness"))
    assert leaving(report) == pytest.approx(prediction.between_nodes_bytes, rel=1e-3)
