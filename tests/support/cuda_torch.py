"""A stand-in for the CUDA build of torch on a machine with a GPU and without a CUDA toolkit: the CPU build, patched.

Copied as sitecustomize.py into an environment, it makes every process of it that imports torch see one GPU.
"""

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace


def patch(torch: ModuleType) -> None:
    """Make torch say what its CUDA build says of one GPU."""
    properties = SimpleNamespace(major=9, minor=0, name="NVIDIA H100 80GB HBM3", multi_processor_count=132)
    torch.version.cuda = "12.8"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.nccl.version = lambda: (2, 26, 2)


class Finder:
    """A finder that patches torch after its import."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module):
                execute(module)
                patch(module)

            spec.loader.exec_module = execute_and_patch
        return spec


sys.meta_path.insert(0, Finder())
