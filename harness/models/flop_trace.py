"""The FLOPs of one sequence through a library's model, counted on fake tensors by the module that runs them."""

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from harness.models.decoder import loss_function
from harness.models.layer_trace import run_on_fakes
from harness.tensors.flops import ATTENTION_FLOPS, operator_flops

# FLOPs by the path of the innermost module that runs them, and whether they are of a fused kernel of attention.
FlopsOfModules = Counter[tuple[str, bool]]


class FlopCounterMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that adds up FLOPs by the same formulas as the profiled step of a run.

    torch.utils.flop_counter.FlopCounterMode lacks the formula of attention on a CPU (see harness.tensors.flops).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paths = {module: path for path, module in model.named_modules()}
        self.inside = [""]  # the paths of the modules whose forward runs, outermost first
        self.flops: FlopsOfModules = Counter()

    def enter(self, module: nn.Module, *_: Any) -> None:
        """Count for this module from now on."""
        self.inside.append(self.paths.get(module, self.inside[-1]))  # a function may be a module outside the model

    def leave(self, *_: Any) -> None:
        """Count for the module around the last one from now on."""
        self.inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = run_on_fakes(func, args, kwargs)
        key = self.inside[-1], getattr(func, "_overloadpacket", None) in ATTENTION_FLOPS
        self.flops[key] += operator_flops(func, args, kwargs or {}, result)
        return result


def count_flops(model: nn.Module, seq_len: int) -> tuple[FlopsOfModules, int]:
    """Return the FLOPs of one sequence: of forward by module, and of forward and backward."""
    tokens = torch.zeros((1, seq_len), dtype=torch.int64)
    with FlopCounterMode(model) as counter:
        hooks = (register_module_forward_pre_hook(counter.enter), register_module_forward_hook(counter.leave))
        loss = loss_function(model(tokens), tokens)
        forward = counter.flops.copy()
        loss.backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    return forward, counter.flops.total()
