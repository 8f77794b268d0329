"""Every kind of checkpointing: what it runs again, keeps and fills, compared with torch and on real ranks."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config.from_dict import from_dict
from harness.config.schema import CheckpointingConfig, PrecisionConfig, RunConfig
from harness.cost_model.flops import (
    attention_product_flops,
    model_flops,
    operations,
    recomputed_flops,
    recomputed_layers,
)
from harness.cost_model.memory import estimate_memory, saved_bytes
from harness.engines.deepspeed import compatibility
from harness.layout.layer_spec import projection_flops
from harness.layout.partition import split_into_stages
from harness.measure.activations import ActivationMeter
from harness.models import activation_checkpoint
from harness.models.activation_checkpoint import apply_checkpointing
from harness.models.build import build_model
from harness.models.decoder import loss_function
from harness.models.init_weights import materialize
from harness.probe import Probe
from harness.util.text import UserError
from tests.support.capacity import capacity_problem
from tests.support.commands import assert_not_proven, assert_ok, compose_config, compose_layout, long, run_with
from tests.support.models import (
    ADAM_FP32,
    BF16,
    FP32,
    LONG,
    Hearing,
    Live,
    alone,
    counted,
    counted_in_stages,
    layout_of,
    model_named,
    run,
    shaped,
)

EVERY_SECOND = "selective checkpointing.saved_products=every_second"

KINDS = {  # by what is typed behind `checkpointing=`
    "selective": CheckpointingConfig("selective"),
    EVERY_SECOND: CheckpointingConfig("selective", saved_products="every_second"),
    "attention": CheckpointingConfig("attention"),
    "every_n": CheckpointingConfig("every_n", 2),
}

KINDS_AND_ENDS = KINDS | {"none": CheckpointingConfig("none"), "full": CheckpointingConfig("full")}

KIND = pytest.mark.parametrize("kind", KINDS)

ATTENTION = pytest.mark.parametrize("attention", ("flash", "eager"))


@KIND
@ATTENTION
def test_recomputed_operations_are_those_torch_counts(kind: str, attention: str) -> None:
    config = compose_config(
        "strategy=single", "train.global_batch=2", *f"checkpointing={kind}".split(), f"model.attention={attention}"
    )
    plain = dataclasses.replace(config, checkpointing=CheckpointingConfig("none"))
    more = sum(counted(config)) - sum(counted(plain))
    layers, full = (
        config.model.num_hidden_layers,
        dataclasses.replace(config, checkpointing=CheckpointingConfig("full")),
    )
    products = projection_flops(config.model, config.train.global_batch * config.train.seq_len)
    expected = {
        "selective": 0,
        EVERY_SECOND: layers * sum(products[name] for name in ("k_proj", "o_proj", "up_proj")),
        "attention": layers * attention_product_flops(config) * (2 if attention == "flash" else 1),
        "every_n": recomputed_flops(full, alone(full)) // 2,
    }
    assert more == recomputed_flops(config, alone(config)) == expected[kind] < operations(config).layers
    assert model_flops(config) == model_flops(plain)


@pytest.mark.parametrize(
    ("dropout", "recomputed"), ((0.0, ("k_proj", "o_proj")), (0.1, ("k_proj", "o_proj", "down_proj")))
)
def test_every_second_product_is_counted_with_biases_too(dropout: float, recomputed: tuple[str, ...]) -> None:
    """The last of a GPT layer's six products runs again only where dropout follows it."""
    overrides = ("strategy=single", "train.global_batch=2", "model=gpt_tiny", f"model.dropout={dropout}")
    config = compose_config(*overrides, *f"checkpointing={EVERY_SECOND}".split())
    more = sum(counted(config)) - sum(counted(compose_config(*overrides)))
    products = projection_flops(config.model, config.train.global_batch * config.train.seq_len)
    expected = config.model.num_hidden_layers * sum(products[name] for name in recomputed)
    assert more == recomputed_flops(config, alone(config)) == expected


@pytest.mark.parametrize("kind", ("attention", "every_n"))
def test_a_split_backward_recomputes_the_counted_operations(kind: str) -> None:
    """An inner stage runs its layers twice more, but attention's core once, because its second half has no weights."""
    config, layout = compose_layout(
        2,
        *("strategy=pp_zero_bubble", f"checkpointing={kind}", "train.global_batch=1", "world_size=2"),
        "strategy.layers_per_stage=[2,2]",
    )
    plain = dataclasses.replace(config, checkpointing=CheckpointingConfig("none"))
    more = counted_in_stages(config, layout) - counted_in_stages(plain, layout)
    assert more == recomputed_flops(config, layout)
    calls = [recomputed_layers(config, layout, stage) for stage in split_into_stages(config.model, layout)]
    assert calls == {"attention": [2, 2], "every_n": [1, 2]}[kind]


def trained(config: RunConfig) -> tuple[int, int]:
    """Run one micro-batch; return the peak bytes saved for backward and the peak bytes alive beside the weights."""
    probe, dtype = Probe(), getattr(torch, config.precision.compute)
    module = build_model(config.model)
    apply_checkpointing(module, config.checkpointing, probe)
    materialize(module, config.model, 0, torch.device("cpu"), dtype)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)  # accumulated into, so counted by neither side
    tokens = torch.zeros(config.train.micro_batch, config.train.seq_len, dtype=torch.int64)
    with Live() as live:
        loss_function(module(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    with ActivationMeter(module).measure() as meter, probe.listen(Hearing(meter)):
        loss_function(module(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    return meter.peak_bytes, live.peak_bytes


@KIND
@ATTENTION
@pytest.mark.parametrize("sizes", ({"intermediate_size": 768}, LONG), ids=("mlp", "long"))
@pytest.mark.parametrize("precision", (FP32, BF16), ids=lambda precision: precision.name)
def test_saved_and_peak_bytes_are_as_predicted(
    kind: str, attention: str, sizes: dict[str, int], precision: PrecisionConfig
) -> None:
    """Predictions are within 1 % of the saved bytes, tensor by tensor, and within 5 % of the peak bytes alive."""
    seq_len, layers = (256, 2) if sizes is LONG else (64, 3)
    model = shaped(attention=attention, num_hidden_layers=layers, **sizes)
    config = run(model, precision, micro_batch=2, global_batch=4, seq_len=seq_len)
    config = dataclasses.replace(config, checkpointing=KINDS[kind])
    layout = layout_of(config, 0, 1)
    saved, alive = trained(config)
    assert saved_bytes(config, layout, "cpu", 0)[0] == pytest.approx(saved, rel=0.01)
    at_peak = estimate_memory(config, layout, ADAM_FP32).at_peak
    transient = sum(size for name, size in at_peak.items() if name not in ("parameters", "gradients", "optimizer"))
    tokens = 8 * 2 * seq_len  # from outside
    assert transient - tokens == pytest.approx(alive, rel=0.05)


def test_a_forward_of_a_layer_saves_every_second_product() -> None:
    """Attention's own products are not counted."""
    aten, mode = torch.ops.aten, activation_checkpoint.SavedOperatorsMode(None, KINDS[EVERY_SECOND])
    operators = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.add.Tensor, aten.mm.default)
    assert [mode.saves(operator) for operator in operators] == [True, True, False, False, True]


def test_products_that_are_not_counted_anew_in_every_layer_save_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer has seven products, so that a count that goes on saves the even ones of the second layer."""
    config = run(shaped(num_hidden_layers=3), micro_batch=2, global_batch=4, seq_len=64)
    config = dataclasses.replace(config, checkpointing=KINDS[EVERY_SECOND])
    expected = saved_bytes(config, layout_of(config, 0, 1), "cpu", 0)[0]
    assert trained(config)[0] == pytest.approx(expected, rel=0.01)
    constructed = itertools.count()  # two for each layer

    class Continued(activation_checkpoint.SavedOperatorsMode):
        def __init__(self, *values: Any) -> None:
            super().__init__(*values)
            self.products = 7 * (next(constructed) // 2)

    monkeypatch.setattr(activation_checkpoint, "SavedOperatorsMode", Continued)
    assert trained(config)[0] < 0.95 * expected


def test_more_recomputation_saves_less_for_backward() -> None:
    config = run(model_named("7b"), BF16)
    kinds = [CheckpointingConfig("none"), *(KINDS[k] for k in ("attention", "every_n", "selective", EVERY_SECOND))]
    saved = [
        saved_bytes(dataclasses.replace(config, checkpointing=kind), layout_of(config, 3, 2), "cuda", 0)[0]
        for kind in (*kinds, CheckpointingConfig("full"))
    ]
    assert saved[0] > saved[1] > saved[3] > saved[4] > saved[5] and saved[0] > saved[2] > saved[5]


def test_selective_checkpointing_is_a_remedy_where_it_is_enough() -> None:
    config = run(model_named("1b"), BF16, micro_batch=8, global_batch=8, seq_len=2048)
    layout = layout_of(config, 0, 1)

    def offered(kind: str, current: str = "none") -> str:
        other, configured = (
            dataclasses.replace(config, checkpointing=KINDS_AND_ENDS[name]) for name in (kind, current)
        )
        enough = estimate_memory(other, layout, ADAM_FP32, "cuda")
        return capacity_problem(
            *(configured, layout, ADAM_FP32),
            available_bytes=enough.peak_bytes + enough.process_bytes,
            ranks_on_host=1,
            device="cuda",
            models=[],
        )

    assert "checkpointing=selective" in offered("selective") and "checkpointing=full" in offered("selective")
    assert "checkpointing=selective" not in offered("full") and "checkpointing=full" in offered("full")
    assert "checkpointing.saved_products=every_second" in offered(EVERY_SECOND, "selective")


@pytest.mark.parametrize(
    "values",
    (
        *({"name": "full", "every": 2}, {"name": "every_n", "every": 1}, {"name": "every_n", "every": 0}),
        *({"name": "half"}, {"name": "full", "saved_products": "every_second"}),
        {"name": "selective", "saved_products": "every_third"},
    ),
)
def test_invalid_checkpointing_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"checkpointing.*choose"):
        from_dict(CheckpointingConfig, values, "checkpointing")


BIASED = ("strategy=zero3", "model=gpt_tiny", "checkpointing=selective")


@pytest.mark.long
def test_biases_added_twice_are_an_error(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = "+strategy.options.memory_efficient_linear=false"
    assert run_with(results, *BIASED, own).row["status"] == "ok"
    monkeypatch.setattr(compatibility, "replaces_linear_function", lambda *_: False)
    assert_not_proven(run_with(results, *BIASED), "gradient deviates")


# Layers are gathered by operators of their own, others in the second forward than in the first one.
GATHERED_AHEAD = (
    "zero3_tuned checkpointing=selective strategy.options.stage3_prefetch_bucket_size=50000"
    " strategy.options.stage3_max_live_parameters=200000 strategy.options.stage3_max_reuse_distance=0"
    " strategy.options.stage3_param_persistence_threshold=0"
)

STRATEGIES = ("ddp", "zero1", "zero3", "fsdp_full_shard", "tp", "tp_sp", "pp_1f1b")


@pytest.mark.parametrize(
    "overrides",
    [
        GATHERED_AHEAD,
        *(long(f"{strategy} checkpointing={kind}") for strategy, kind in itertools.product(STRATEGIES, KINDS)),
    ],
)
def test_every_kind_is_proven_in_every_layout(results: Path, overrides: str) -> None:
    row = run_with(results, *f"strategy={overrides}".split()).row
    assert_ok(row)
    assert row["activation_bytes"] == pytest.approx(row["predicted_activation_bytes"], rel=0.03)
