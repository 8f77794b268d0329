"""The formulas of a step's operations compared with torch's own counter on the real model, and device peaks by name."""

import dataclasses

import pytest

from harness.config.devices import datasheets
from harness.cost_model.flops import executed_flops, model_flops, operations, recomputed_flops
from harness.hardware.machine import peak_flops
from harness.layout.layout import resolve_layout
from harness.layout.model_profile import parameter_count
from harness.layout.partition import split_into_stages
from harness.layout.state_widths import StateWidths
from harness.metrics.columns import attention_kernels
from harness.proof.step import flops_problems
from harness.records.rank_report import FUSED_KERNELS, ProfiledStep, RankReport
from tests.support.commands import compose_config, compose_layout, long
from tests.support.models import alone, counted, counted_in_stages

SHORT = ("strategy=single", "model.num_hidden_layers=2", "train.global_batch=2")

SIZES = {
    "tiny": [],
    "no groups": ["model.num_key_value_heads=4"],
    "one group": ["model.num_key_value_heads=1", "model.vocab_size=1000", "model.intermediate_size=100"],
    "tied": ["model.tie_word_embeddings=true", "train.micro_batch=2"],
    "one layer": ["model.num_hidden_layers=1", "train.seq_len=300"],
    "gpt": ["model=gpt_tiny", "model.num_key_value_heads=2"],
    "larger": ["model=125m", "train.seq_len=512"],
}

CASES = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)

ATTENTION = pytest.mark.parametrize("attention", ["flash", "eager"])

RECOMPUTED = ("tiny", "one group", "gpt")  # one of each way to run a layer twice


@CASES
@ATTENTION
def test_operations_of_forward_and_backward_equal_torchs_count(sizes: list[str], attention: str) -> None:
    config = compose_config(*SHORT, *sizes, f"model.attention={attention}")
    forward, backward = counted(config)
    assert forward == pytest.approx(model_flops(config) / 3, rel=1e-9)
    executed = forward + backward
    assert executed == executed_flops(config, alone(config)) >= model_flops(config)
    # A fused kernel's backward makes the scores again, which MFU leaves out.
    assert (executed == model_flops(config)) is (attention == "eager")


@pytest.mark.parametrize("name", [name if name in RECOMPUTED else long(name) for name in SIZES])
@ATTENTION
def test_recomputed_operations_equal_torchs_count(name: str, attention: str) -> None:
    sizes = SIZES[name]
    config = compose_config(*SHORT, *sizes, f"model.attention={attention}", "checkpointing=full")
    plain = dataclasses.replace(config, checkpointing=dataclasses.replace(config.checkpointing, name="none"))
    executed = sum(counted(config))
    additional = executed - sum(counted(plain))
    assert additional == recomputed_flops(config, alone(config)) > 0 == recomputed_flops(plain, alone(plain))
    assert executed == executed_flops(config, alone(config))
    assert model_flops(config) == model_flops(plain)
    # An engine whose second forward does not stop early runs the whole layer again, never the head.
    with_last_projection = recomputed_flops(config, alone(config), recomputes_last_projection=True)
    assert additional < with_last_projection == operations(config).layers < model_flops(config) / 3


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("pp", [2, 4])
def test_operations_of_pipeline_stages_equal_torchs_count(schedule: str, checkpointing: str, pp: int) -> None:
    overrides = ["strategy=pp_1f1b", f"strategy.schedule={schedule}", f"checkpointing={checkpointing}"]
    config, layout = compose_layout(pp, *overrides, "train.global_batch=1", f"world_size={pp}")
    assert counted_in_stages(config, layout) == executed_flops(config, layout)
    if checkpointing == "full":
        single = recomputed_flops(config, alone(compose_config("strategy=single")))
        first = split_into_stages(config.model, layout)[0].layers / config.model.num_hidden_layers
        assert recomputed_flops(config, layout) == single * (2 - first if schedule == "zero_bubble" else 1)


def test_operations_are_the_same_under_every_layout() -> None:
    config = compose_config("checkpointing=full")
    strategies = ("single", "ddp", "zero3", "fsdp_full_shard", "tp", "tp_sp", "pp_gpipe", "pp_interleaved")
    layouts = (resolve_layout(compose_config(f"strategy={name}").strategy, 2) for name in strategies)
    assert len({executed_flops(config, layout) for layout in layouts}) == 1


@pytest.mark.parametrize("name", ["tiny", "1b", "8b", "70b"])
def test_model_flops_equal_palms_formula(name: str) -> None:
    """N is the parameters of matrices that multiply, and attention adds 12 L h s."""
    config = compose_config(f"model={name}", "train.seq_len=100")
    model = config.model
    norms = model.hidden_size * (2 * model.num_hidden_layers + 1)
    looked_up = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    palm = 6 * (parameter_count(model) - norms - looked_up) + 12 * model.num_hidden_layers * model.hidden_size * 100
    assert model_flops(config) == palm * config.train.global_batch * 100


@pytest.mark.parametrize("checkpointing", ["none", "attention"])
@pytest.mark.parametrize(
    ("overrides", "observed", "counts"),
    [
        ("model=gpt_tiny model.dropout=0.1", "flash", "model=gpt_tiny model.dropout=0"),  # cuda: its kernels drop
        ("model=gpt_tiny model.dropout=0.1", "composed", "model=gpt_tiny model.dropout=0.1"),  # cpu
        ("model=gpt_tiny model.dropout=0", "flash", "model=gpt_tiny model.dropout=0"),
        ("model=tiny", "flash", "model=tiny"),
        ("model=tiny", "composed", "model=tiny model.attention=eager"),  # cuda: math for grouped heads in fp32
        ("model=tiny precision=bf16_mixed", "cudnn", "model=tiny"),
        ("model=tiny model.num_key_value_heads=4", "efficient", "model=tiny model.num_key_value_heads=4"),
        ("model=tiny model.attention=eager", "composed", "model=tiny model.attention=eager"),
    ],
)
def test_the_proof_expects_the_operations_of_the_observed_kernel(
    overrides: str, observed: str, counts: str, checkpointing: str
) -> None:
    """The run did torch's count of a CPU's equivalent kernel; another kernel's count would be an error."""
    both = (*SHORT, "train.seq_len=256", f"checkpointing={checkpointing}")
    config = compose_config(*both, *overrides.split())
    executed = sum(counted(compose_config(*both, *counts.split())))
    problems = [
        flops_problems(
            *(config, alone(config), StateWidths(4, 4, 4, 8, 4)),
            [RankReport(profiled=ProfiledStep(flops=executed, attention_kernels=[kernel]))],
        )
        for kernel in (observed, "composed" if observed in FUSED_KERNELS else "flash")
    ]
    assert [len(list(each)) for each in problems] == [0, 1]


def test_attention_without_a_fused_kernel_is_composed_in_compiled_code_and_unknown_elsewhere() -> None:
    """With dropout a CPU has no fused kernel, and the compiler hides the composed one in generated kernels."""
    ranks = [RankReport(profiled=ProfiledStep(attention_kernels=[]))]
    dropped = ("model=gpt_tiny", "model.dropout=0.1", "model.attention=flash")
    assert attention_kernels(compose_config(*dropped, "train.compile=true"), ranks) == ["math"]
    assert attention_kernels(compose_config(*dropped), ranks) == []


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        *(("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA H100 80GB HBM3", 989)),
        *(("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA B200", 2250), ("NVIDIA L40S", 362)),
        *(("NVIDIA GeForce RTX 4090", 165), ("AMD Instinct MI300X", 1307)),
    ],
)
def test_peaks_are_the_published_dense_ones(name: str, teraflops: int) -> None:
    assert peak_flops(name, "bfloat16") == peak_flops(name, "float16") == teraflops * 1e12


FLOPS = [device["flops"] for device in datasheets().values()]


def test_an_unknown_device_has_no_peak() -> None:
    for name in ("cpu", "", "NVIDIA H100", "nvidia h200", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H200 NVL 2"):
        assert peak_flops(name, "bfloat16") is None
    assert peak_flops("NVIDIA H200", "float64") is None and peak_flops("NVIDIA B200", "float32") is None
    # No figure may be one with sparsity or TF32: fp32 without matrix cores is far below 16 bit.
    assert all(flops.get("float32", 0) <= flops["float16"] / 1.9 for flops in FLOPS)


# Names as CUDA reports them, with what the devices compute in.
ALL, NO_BF16, NO_FP32 = ("float32", "float16", "bfloat16"), ("float32", "float16"), ("float16", "bfloat16")

BOARDS = {
    **dict.fromkeys(("NVIDIA GH200 480GB", "NVIDIA GH200 120GB", "NVIDIA H20", "NVIDIA H800"), ALL),
    **dict.fromkeys(("NVIDIA B300 SXM6 AC", "NVIDIA A800-SXM4-80GB", "NVIDIA A30", "NVIDIA A10G"), ALL),
    **dict.fromkeys(("NVIDIA A100-SXM-64GB", "NVIDIA RTX A6000", "NVIDIA RTX 6000 Ada Generation"), ALL),
    **dict.fromkeys(("A100-SXM4-40GB", "A100-PCIE-40GB"), ALL),  # as old drivers name them
    **dict.fromkeys(("Tesla T4", "Tesla V100-SXM2-16GB", "Tesla V100-PCIE-32GB"), NO_BF16),
    **dict.fromkeys(("NVIDIA GB200", "NVIDIA GB300"), NO_FP32),
}


@pytest.mark.parametrize(("name", "dtypes"), BOARDS.items(), ids=BOARDS)
def test_a_board_that_users_have_is_known(name: str, dtypes: tuple[str, ...]) -> None:
    assert {dtype for dtype in ALL if peak_flops(name, dtype)} == set(dtypes)


def test_both_kinds_of_16_bit_are_equally_fast() -> None:
    """A figure with sparsity beside one without would not be."""
    assert all(flops.get("bfloat16", flops["float16"]) == flops["float16"] for flops in FLOPS)


def test_every_device_of_nvidia_has_a_compute_capability() -> None:
    assert [name for name, device in datasheets().items() if ("capability" in device) == name.startswith("AMD")] == []
