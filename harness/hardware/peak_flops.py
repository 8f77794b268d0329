"""Peak FLOP/s of devices, by the exact name that CUDA reports."""

# FLOP/s of dense matrix products by torch's dtype, never the figure with sparsity, which is twice as high at 16 bit.
# The figure of float32 is without TF32, which is torch's default, and is given only if the datasheet is unambiguous.
# NVIDIA's figures are from the datasheets of A100, H100, H200, L4, L40 and L40S, A10, A40 and HGX B200, and for GeForce
# the whitepapers of GA102, AD102 and Blackwell, with 16-bit products accumulated in fp32. Datasheets from Hopper on
# print 16 bit with sparsity; the table has half of that. AMD's are from the datasheets of MI300X and MI325X, with
# float32 by matrix cores.
_A100 = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}

_H100_SXM = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12}

_H100_NVL = {"bfloat16": 835e12, "float16": 835e12, "float32": 60e12}

_MI300X = {"bfloat16": 1307e12, "float16": 1307e12, "float32": 163.4e12}

PEAKS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": {"bfloat16": 756e12, "float16": 756e12, "float32": 51e12},
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H200": _H100_SXM,
    "NVIDIA H200 NVL": _H100_NVL,
    "NVIDIA B200": {"bfloat16": 2250e12, "float16": 2250e12},
    "NVIDIA A10": {"bfloat16": 125e12, "float16": 125e12, "float32": 31.2e12},
    "NVIDIA A40": {"bfloat16": 149.7e12, "float16": 149.7e12, "float32": 37.4e12},
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
    """Return the peak FLOP/s of one device in a dtype by torch's name, or None if this exact device is unknown."""
    return PEAKS.get(device_name, {}).get(dtype)
