"""The table of devices' peak FLOP/s: which boards it names, and what holds for every figure."""

import pytest

from harness.hardware.peak_flops import peak_flops, peaks

# Names as CUDA reports them, with what the devices compute in.
ALL, NO_BF16, NO_FP32 = ("float32", "float16", "bfloat16"), ("float32", "float16"), ("float16", "bfloat16")

BOARDS = {
    **dict.fromkeys(("NVIDIA GH200 480GB", "NVIDIA GH200 120GB", "NVIDIA H20", "NVIDIA H800"), ALL),
    **dict.fromkeys(("NVIDIA B300 SXM6 AC", "NVIDIA A800-SXM4-80GB", "NVIDIA A30", "NVIDIA A10G"), ALL),
    **dict.fromkeys(("NVIDIA RTX A6000", "NVIDIA RTX 6000 Ada Generation"), ALL),
    **dict.fromkeys(("A100-SXM4-40GB", "A100-PCIE-40GB"), ALL),  # as old drivers name them
    **dict.fromkeys(("Tesla T4", "Tesla V100-SXM2-16GB", "Tesla V100-PCIE-32GB"), NO_BF16),
    **dict.fromkeys(("NVIDIA GB200", "NVIDIA GB300"), NO_FP32),
}


@pytest.mark.parametrize(("name", "dtypes"), BOARDS.items(), ids=BOARDS)
def test_a_board_that_users_have_is_known(name: str, dtypes: tuple[str, ...]) -> None:
    assert {dtype for dtype in ALL if peak_flops(name, dtype)} == set(dtypes)


def test_both_kinds_of_16_bit_are_equally_fast() -> None:
    """A figure with sparsity beside one without would not be."""
    assert all(figures.get("bfloat16", figures["float16"]) == figures["float16"] for figures in peaks().values())
