"""Models, configurations and counters of operations and bytes that the tests of formulas share."""

import dataclasses
import weakref
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import GraphExecGroup
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from harness.config.command import read_run_config
from harness.config.from_dict import from_dict
from harness.config.model import ModelConfig
from harness.config.schema import CheckpointingConfig, PrecisionConfig, RunConfig
from harness.layout.layout import Layout, resolve_layout
from harness.layout.partition import Stage, split_into_stages, whole_model
from harness.layout.state_widths import StateWidths
from harness.measure.activations import ActivationMeter
from harness.models.activation_checkpoint import apply_checkpointing
from harness.models.build import build_model
from harness.models.decoder import Decoder, loss_function
from harness.models.init_weights import materialize
from harness.probe import Listener, Probe

# torch's counter does not know the attention kernel of CPUs, which does the same operations as the kernels it knows.
CPU_KERNEL = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A counter that adds up torch's formulas as FlopCounterMode does, without its hooks.

    Those hooks fail when a backward runs in two halves.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.formulas = FlopCounterMode(display=False, custom_mapping=CPU_KERNEL).flop_registry
        self.flops: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in self.formulas:
            self.flops += self.formulas[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def micro_batches(config: RunConfig) -> list[Tensor]:
    train = config.train
    size = (train.micro_batch, train.seq_len)
    return [torch.zeros(size, dtype=torch.int64) for _ in range(train.global_batch // train.micro_batch)]


def part_of(config: RunConfig, stage: Stage) -> Decoder:
    """Return the model or a stage of it, built under a FakeTensorMode for a CPU's kernels without memory or work."""
    part = Decoder(config.model, stage)
    apply_checkpointing(part, config.checkpointing, Probe())
    return part


def counted(config: RunConfig) -> tuple[int, int]:
    """Return the operations of the forwards and of the backwards of one step in one process."""
    forward, backward = Operators(), Operators()
    with FakeTensorMode():
        model = part_of(config, whole_model(config.model))
        for batch in micro_batches(config):
            with forward:
                loss = loss_function(model(batch), batch)
            with backward:
                loss.backward()  # type: ignore[no-untyped-call]
    return forward.flops, backward.flops


def alone(config: RunConfig) -> Layout:
    return resolve_layout(config.strategy, 1)


def counted_in_stages(config: RunConfig, layout: Layout) -> int:
    """Return the operations of one micro-batch through all stages.

    Each backward runs in torch's halves, except that of the first stage.
    """
    batch = micro_batches(config)[0]
    size = (*batch.shape, config.model.hidden_size)
    with Operators() as operators:
        for stage in split_into_stages(config.model, layout):
            part = part_of(config, stage)
            stage_input = batch.clone() if stage.holds_embedding else torch.zeros(size, requires_grad=True)
            output = loss_function(part(stage_input), batch) if stage.holds_head else part(stage_input)
            back = None if stage.holds_head else [torch.zeros(size)]
            if stage.holds_embedding or layout.schedule != "zero_bubble":
                stage_backward([output], back or [None], [stage_input])
            else:
                _, groups = stage_backward_input([output], back, [stage_input], part.parameters())
                with GraphExecGroup():
                    stage_backward_weight(part.parameters(), groups)
    return operators.flops


FP32 = PrecisionConfig("fp32", "float32", "float32", "float32", "float32")

BF16 = PrecisionConfig("bf16_mixed", "bfloat16", "float32", "float32", "float32")

ADAM_FP32 = StateWidths(parameters=4, frozen=4, gradients=4, masters=0, gathered=4)


def model_named(name: str) -> ModelConfig:
    path = Path(__file__).parents[2] / "conf" / "model" / f"{name}.yaml"
    model: ModelConfig = from_dict(ModelConfig, yaml.safe_load(path.read_text()), "model")
    return model


def shaped(name: str = "tiny", **sizes: object) -> ModelConfig:
    return dataclasses.replace(model_named(name), **sizes)  # type: ignore[arg-type]


def run(model: ModelConfig, precision: PrecisionConfig = FP32, checkpointing: str = "none", **train: int) -> RunConfig:
    batches = {"global_batch": 4096, "micro_batch": 1, "seq_len": 128, "steps": 1, "warmup_steps": 1, "seed": 0}
    adam = {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "gradient_clipping": 1.0}
    values = {
        "name": "test",
        "results_dir": "results",
        "model": dataclasses.asdict(model),
        "strategy": {"name": "zero", "dp_shard": -1},
        "checkpointing": {"name": checkpointing},
        "precision": dataclasses.asdict(precision),
        "data": {"name": "synthetic", "kind": "synthetic"},
        "cluster": {"name": "local"},
        "train": batches | adam | train,
        "proof": {},
        "tracking": {"name": "none"},
    }
    return read_run_config(values)


def layout_of(config: RunConfig, stage: int, world_size: int, data_parallel: str = "none") -> Layout:
    return resolve_layout(
        dataclasses.replace(config.strategy, zero_stage=stage, data_parallel=data_parallel), world_size
    )


def built(model: ModelConfig, dtype: torch.dtype, checkpointing: str = "none", stage: Stage | None = None) -> nn.Module:
    module = build_model(model, stage)
    apply_checkpointing(module, CheckpointingConfig(checkpointing), Probe())
    materialize(module, model, 0, torch.device("cpu"), dtype)
    return module


class Live(TorchDispatchMode):
    """A counter of the bytes of storages that operators made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, object] = {}
        self.now_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # dispatched again as the plain operators it consists of
        known = {tensor.untyped_storage()._cdata for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):  # DTensor asks for shapes beforehand
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in known | self.alive.keys():
                self.watch(storage, storage._cdata, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return result

    def watch(self, storage: torch.UntypedStorage, key: int, size_bytes: int) -> None:
        def gone(_: object) -> None:
            del self.alive[key]
            self.now_bytes -= size_bytes

        self.alive[key] = weakref.ref(storage, gone)
        self.now_bytes += size_bytes


LONG = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128}

# --- what cannot fit is refused

PREPARED = [model_named(name) for name in ("tiny", "125m", "350m", "1b", "7b")]


class Hearing(Listener):
    """A listener that tells the meter of second forwards, and of tensors saved outside autograd."""

    def __init__(self, meter: ActivationMeter) -> None:
        self.meter = meter

    def recompute(self) -> AbstractContextManager[None]:
        return self.meter.recompute()

    def saved_for_recompute(self, tensor: Tensor) -> None:
        self.meter.watch(tensor)
