"""Peak FLOP/s of devices, by the exact name that CUDA reports."""

# FLOP/s of dense matrix products by torch's dtype, never the figure with sparsity, which is twice as high at 16 bit.
# The figure of float32 is without TF32, which is torch's default, and is given only if the datasheet is unambiguous: of
# B200 and GB200 NVIDIA publishes two. A dtype that a device does not compute in is missing: bfloat16 before Ampere.
# NVIDIA's figures are from the datasheets of A100, A800, H100, H800, H200, H20, GH200, L4, L40, L40S, A10, A10G, A30,
# A40, RTX A6000, RTX 6000 Ada, T4, V100 and V100S, of HGX B200 and B300 and GB200 and GB300 NVL72 (by their 8 and
# 72 GPUs), and for GeForce the whitepapers of GA102, AD102 and Blackwell, with 16-bit products accumulated in fp32.
# Datasheets from Hopper on print 16 bit with sparsity; the table has half of that. AMD's are from the datasheets of
# MI300X and MI325X, with float32 by matrix cores.
_A100 = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}

_H100_SXM = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12}

_H100_PCIE = {"bfloat16": 756e12, "float16": 756e12, "float32": 51e12}

_H100_NVL = {"bfloat16": 835e12, "float16": 835e12, "float32": 60e12}

_H20 = {"bfloat16": 148e12, "float16": 148e12, "float32": 44e12}

_GB200 = {"bfloat16": 2500e12, "float16": 2500e12}

_V100_SXM2 = {"float16": 125e12, "float32": 15.7e12}

_V100_PCIE = {"float16": 112e12, "float32": 14e12}

_MI300X = {"bfloat16": 1307e12, "float16": 1307e12, "float32": 163.4e12}

PEAKS = {
    "Tesla V100-SXM2-16GB": _V100_SXM2,
    "Tesla V100-SXM2-32GB": _V100_SXM2,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
    "Tesla V100S-PCIE-32GB": {"float16": 130e12, "float32": 16.4e12},
    "Tesla T4": {"float16": 65e12, "float32": 8.1e12},
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A800-SXM4-80GB": _A100,
    "NVIDIA A800 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H800": _H100_SXM,
    "NVIDIA H800 PCIe": _H100_PCIE,
    "NVIDIA H20": _H20,
    "NVIDIA H20-3e": _H20,
    "NVIDIA H200": _H100_SXM,
    "NVIDIA H200 NVL": _H100_NVL,
    "NVIDIA GH200 120GB": _H100_SXM,
    "NVIDIA GH200 480GB": _H100_SXM,
    "NVIDIA GH200 144G HBM3e": _H100_SXM,
    "NVIDIA B200": {"bfloat16": 2250e12, "float16": 2250e12},
    "NVIDIA B300 SXM6 AC": {"bfloat16": 2250e12, "float16": 2250e12, "float32": 75e12},
    "NVIDIA GB200": _GB200,
    "NVIDIA GB300": _GB200,
    "NVIDIA A10": {"bfloat16": 125e12, "float16": 125e12, "float32": 31.2e12},
    "NVIDIA A10G": {"bfloat16": 70e12, "float16": 70e12, "float32": 35e12},
    "NVIDIA A30": {"bfloat16": 165e12, "float16": 165e12, "float32": 10.3e12},
    "NVIDIA A40": {"bfloat16": 149.7e12, "float16": 149.7e12, "float32": 37.4e12},
    "NVIDIA RTX A6000": {"bfloat16": 154.8e12, "float16": 154.8e12, "float32": 38.7e12},
    "NVIDIA RTX 6000 Ada Generation": {"bfloat16": 364.2e12, "float16": 364.2e12, "float32": 91.1e12},
    "NVIDIA L4": {"bfloat16": 121e12, "float16": 121e12, "float32": 30.3e12},
    "NVIDIA L40": {"bfloat16": 181e12, "float16": 181e12, "float32": 90.5e12},
    "NVIDIA L40S": {"bfloat16": 362e12, "float16": 362e12, "float32": 91.6e12},
    "NVIDIA GeForce RTX 3090": {"bfloat16": 71e12, "float16": 71e12, "float32": 35.6e12},
    "NVIDIA GeForce RTX 4090": {"bfloat16": 165e12, "float16": 165e12, "float32": 82.6e12},
    "NVIDIA GeForce RTX 5090": {"bfloat16": 209.5e12, "float16": 209.5e12, "float32": 104.8e12},
    "AMD Instinct MI300X": _MI300X,
    "AMD Instinct MI325X": _MI300X,
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of one device in a dtype by torch's name, or None if this exact device is unknown.

    Drivers before 470 leave out the maker of the newer boards: A100-SXM4-40GB.
    """
    peaks = PEAKS.get(device_name) or PEAKS.get(f"NVIDIA {device_name}") or {}
    return peaks.get(dtype)
