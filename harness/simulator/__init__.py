"""One rank of any world, played on the CPU as if its tensors were on a CUDA device."""
