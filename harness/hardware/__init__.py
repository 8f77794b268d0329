"""This machine: its ranks and devices, their peak FLOP/s, and reports of the kernel and NVML."""
