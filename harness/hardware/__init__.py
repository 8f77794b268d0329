"""What this machine offers: ranks, devices, peak FLOP/s, and what the kernel and NVML report."""
