"""The predicted step times of other stacks beside published ones, and faults that these figures must show."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median
from typing import Literal

import pytest

from harness.config.hardware import HardwareConfig
from harness.config.stack import StackConfig, StackTiming, load_stack
from harness.cost_model.fits import fit_verdict
from harness.cost_model.stack_memory import predict_highest_rank
from harness.cost_model.timing.collectives import RankGroup, all_reduce_seconds
from harness.cost_model.timing.kernels import kernel_rates
from harness.layout.layout import resolve_layout
from harness.layout.model_profile import parameter_count
from tests.support.published import DATA, PublishedRow, llm_foundry, modalities, vtrain
from tests.support.published.mapping import numbered_rows
from tests.support.published.step_times import cluster_hardware, row_hardware, row_timing, step_time
from tests.support.published.time_scores import CLEARLY_APART, ERROR, MEAN_ERROR, ORDER, REGRET, time_scores

Rows = Callable[[], Sequence[PublishedRow]]

SOURCES: dict[str, Rows] = {
    "llm-foundry": llm_foundry.rows,
    "llm-foundry, H100": llm_foundry.h100_rows,
    "Modalities": modalities.rows,
    "one node": vtrain.single_node_rows,
    "nodes": vtrain.multi_node_rows,
}

# The most, or for the order the least, that a figure of a source may be; a fit to half of the groups is held to more.
BOUNDS = {
    ("llm-foundry", ERROR): 0.06,
    ("llm-foundry, H100", ERROR): 0.06,
    ("Modalities", ERROR): 0.06,
    ("Modalities", MEAN_ERROR): 0.08,
    ("Modalities", ORDER): 0.95,
    ("one node", MEAN_ERROR): 0.10,
    ("one node", ORDER): 0.92,
    ("one node", REGRET): 0.05,
    ("nodes", MEAN_ERROR): 0.10,
    ("nodes", REGRET): 0.05,
}

Change = Callable[[PublishedRow, HardwareConfig, StackTiming], tuple[PublishedRow, HardwareConfig, StackTiming]]


def unchanged(
    row: PublishedRow, hardware: HardwareConfig, timing: StackTiming
) -> tuple[PublishedRow, HardwareConfig, StackTiming]:
    return row, hardware, timing


@lru_cache(maxsize=64)
def figures(source: str, change: Change = unchanged) -> dict[str, float]:
    """Return the figures of a source's rows, with a change of row, hardware or stack."""
    rows = SOURCES[source]()
    seconds = [step_time(*change(row, row_hardware(row), row_timing(row))).step_seconds for row in rows]
    return dict(time_scores(rows, seconds))


def broken_bounds(source: str, change: Change = unchanged) -> list[str]:
    """Return the figures of a source that exceed their bound, or fall below that of the order."""
    found = figures(source, change)
    return [
        figure
        for (name, figure), bound in BOUNDS.items()
        if name == source and (found[figure] < bound if figure == ORDER else found[figure] > bound)
    ]


@pytest.mark.parametrize("source", SOURCES)
def test_published_step_times_are_predicted(source: str) -> None:
    assert broken_bounds(source) == [], figures(source)


# --- Faults that these figures must show


def twice(key: str) -> Change:
    def faster(
        row: PublishedRow, hardware: HardwareConfig, timing: StackTiming
    ) -> tuple[PublishedRow, HardwareConfig, StackTiming]:
        values = {key: 2 * getattr(hardware, key)}
        return row, dataclasses.replace(hardware, **values), timing  # type: ignore[arg-type]

    return faster


def swap_tensor_and_data_parallelism(
    row: PublishedRow, hardware: HardwareConfig, timing: StackTiming
) -> tuple[PublishedRow, HardwareConfig, StackTiming]:
    """Divide matrices by a row's data-parallel ranks, and its batch by the tensor-parallel ones, where that can be."""
    strategy, train, layout = row.config.strategy, row.config.train, row.layout
    if train.global_batch % (train.micro_batch * layout.tp) or row.config.model.num_attention_heads % layout.dp:
        return row, hardware, timing
    data_parallel: Literal["ddp", "none"] = "ddp" if layout.tp > 1 else "none"
    other = dataclasses.replace(strategy, tp=layout.dp, dp_replicate=layout.tp, data_parallel=data_parallel)
    config = dataclasses.replace(row.config, strategy=other)
    return (
        dataclasses.replace(row, config=config, layout=resolve_layout(other, layout.world_size)),
        hardware,
        timing,
    )


def place_one_device_a_node(
    row: PublishedRow, hardware: HardwareConfig, timing: StackTiming
) -> tuple[PublishedRow, HardwareConfig, StackTiming]:
    return dataclasses.replace(row, gpus_per_node=1), hardware, timing


def without(key: str, value: object = 0) -> Change:
    def changed(
        row: PublishedRow, hardware: HardwareConfig, timing: StackTiming
    ) -> tuple[PublishedRow, HardwareConfig, StackTiming]:
        values = {key: value}
        return row, hardware, dataclasses.replace(timing, **values)  # type: ignore[arg-type]

    return changed


FAULTS: dict[str, tuple[str, Change]] = {
    "memory twice as fast": ("llm-foundry", twice("memory_bandwidth")),
    "memory twice as fast, H100": ("llm-foundry, H100", twice("memory_bandwidth")),
    "links between nodes twice as fast": ("Modalities", twice("inter_node_bandwidth")),
    "tensor and data parallelism swapped, one node": ("one node", swap_tensor_and_data_parallelism),
    "tensor and data parallelism swapped, nodes": ("nodes", swap_tensor_and_data_parallelism),
    "axes misplaced": ("nodes", place_one_device_a_node),
    "axes misplaced, FSDP": ("Modalities", place_one_device_a_node),
    "no launches": ("one node", without("kernels_per_layer")),
    "no overlap of FSDP": ("Modalities", without("prefetches_parameters", False)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_exceeds_a_bound(fault: str) -> None:
    source, change = FAULTS[fault]
    assert broken_bounds(source, change), (figures(source), figures(source, change))


# --- Single kernels and collectives


def product_error(hardware: HardwareConfig) -> float:
    """Return the median error of the rates of matrix products on A100 PCIe, which has 1,935 GB/s."""
    rates = kernel_rates(dataclasses.replace(hardware, memory_bandwidth=1.935e12), "bfloat16")
    errors = []
    for _, values in numbered_rows(DATA / "simumax_products_a100.csv"):
        m, n, k = (int(values[side]) for side in "mnk")
        efficiency = 2 * m * n * k / rates.product_seconds(m, n, k, 2) / 312e12
        errors.append(abs(efficiency / float(values["efficiency"]) - 1))
    return median(errors)


def all_reduce_error(hardware: HardwareConfig) -> float:
    """Return the median error of the bus bandwidths of all-reduces in a node of A100."""
    errors = []
    for _, values in numbered_rows(DATA / "nccl_all_reduce_a100.csv"):
        ranks, sent = int(values["gpus"]), int(values["bytes"])
        bandwidth = 2 * (ranks - 1) / ranks * sent / all_reduce_seconds(sent, RankGroup(ranks, 1), hardware)
        errors.append(abs(bandwidth / 1e9 / float(values["bus_gigabytes_per_second"]) - 1))
    return median(errors)


def test_products_and_collectives_of_a100_are_predicted() -> None:
    hardware = cluster_hardware("8xa100_80")
    assert product_error(hardware) <= 0.04
    assert all_reduce_error(hardware) <= 0.2
    faster = dataclasses.replace(hardware, peak_flops=624e12, intra_node_bandwidth=6e11)
    assert product_error(faster) > 0.04
    assert all_reduce_error(faster) > 0.2


# --- What the mappings say


def test_sharding_in_a_node_overtakes_where_it_does() -> None:
    """HYBRID_SHARD is faster than FULL_SHARD wherever the runs clearly say so, and from about as many GPUs on."""
    seconds: dict[tuple[str, int, int], dict[bool, tuple[float, float]]] = {}
    for row in modalities.rows():
        predicted = step_time(row, row_hardware(row), row_timing(row)).step_seconds
        key = (row.config.model.name, row.config.train.micro_batch, row.layout.world_size)
        seconds.setdefault(key, {})[row.layout.dp_replicate > 1] = (row.measured["step_seconds"], predicted)
    ratios = {
        key: [full / hybrid for full, hybrid in zip(pair[False], pair[True], strict=True)]
        for key, pair in seconds.items()
        if len(pair) == 2
    }
    assert len(ratios) == 16
    assert all(predicted > 1 for measured, predicted in ratios.values() if measured > CLEARLY_APART)
    for name, micro_batch in {key[:2] for key in ratios}:
        clear = [
            min(
                gpus
                for (*case, gpus), pair in ratios.items()
                if case == [name, micro_batch] and pair[which] > CLEARLY_APART
            )
            for which in (0, 1)
        ]
        assert clear[1] / clear[0] in ((1, 2) if name == "gpt_6.7b" else (1,)), (name, micro_batch, clear)


def test_models_have_the_published_sizes() -> None:
    """llm-foundry lists parameters; of Modalities' models operations per token follow from MFU and rate."""
    listed = dict(numbered_rows(DATA / llm_foundry.FILE))
    for row in llm_foundry.rows():
        assert parameter_count(row.config.model) == int(listed[row.row_number]["NumParams"])
    for row in modalities.rows():
        model, train = row.config.model, row.config.train
        layer = 12 * model.num_hidden_layers * model.hidden_size
        tokens = train.global_batch * train.seq_len / row.measured["step_seconds"] / row.layout.world_size
        operations = 6 * layer * model.hidden_size + layer * train.seq_len
        assert operations * tokens / 312e12 == pytest.approx(row.measured["mfu"], rel=0.02)


@pytest.mark.parametrize("source", ["llm-foundry", "llm-foundry, H100", "Modalities", "nodes"])
def test_rows_that_ran_are_not_said_to_exceed_a_device(source: str) -> None:
    rows = SOURCES[source]()
    verdicts = [verdict_of(row) for row in rows]
    assert verdicts.count("no") <= 0.03 * len(rows)


def test_state_that_exceeds_a_device_is_said_not_to_fit() -> None:
    """Each model of llm-foundry under FSDP on so few A100 of 40 GB that 16 bytes a parameter exceed them."""
    checked = 0
    for row in llm_foundry.rows():
        gpus = next((count for count in (4, 2, 1) if 16 * parameter_count(row.config.model) / count > 40 * 2**30), None)
        if gpus is None or row.cluster != "8xa100_40":
            continue
        strategy = dataclasses.replace(row.config.strategy, dp_shard=gpus)
        config = dataclasses.replace(row.config, strategy=strategy)
        fewer = dataclasses.replace(row, config=config, layout=resolve_layout(strategy, gpus))
        assert verdict_of(fewer) == "no"
        checked += 1
    assert checked > 20


def verdict_of(row: PublishedRow) -> str:
    """Return whether a row's highest rank is said to fit its device."""
    stack, hardware = cached_stack(row.stack), cluster_hardware(row.cluster)
    memory = predict_highest_rank(row.config, row.layout, stack, hardware.compute_capability)
    return fit_verdict(memory, hardware.memory_bytes, stack.memory).fits


@lru_cache(maxsize=8)
def cached_stack(name: str) -> StackConfig:
    """Return a stack, whose file is read once."""
    return load_stack(name)
