"""GPUs by their names: the table of datasheets, the names that lead to it, and clusters of a name alone."""

from typing import Any

import pytest
import yaml

from harness.cli.main import main
from harness.config.devices import FIGURES, datasheets, device_named, with_datasheet
from harness.config.from_dict import from_dict
from harness.config.hardware import HardwareConfig
from harness.config.hydra import compose_values
from harness.config.locations import files_in
from harness.config.schema import ClusterConfig
from harness.util.text import UserError, parse_bytes

# What users type, with the device that it means.
NAMES = {
    "3090": "NVIDIA GeForce RTX 3090",
    "RTX 4090": "NVIDIA GeForce RTX 4090",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "A6000": "NVIDIA RTX A6000",
    "V100": "Tesla V100-SXM2-32GB",
    "T4": "Tesla T4",
    "A100": "NVIDIA A100-SXM4-80GB",
    "A100-PCIE-40GB": "NVIDIA A100-PCIE-40GB",
    "A100 PCIe 80GB": "NVIDIA A100 80GB PCIe",
    "A800": "NVIDIA A800-SXM4-80GB",
    "H100": "NVIDIA H100 80GB HBM3",
    "H100 SXM5": "NVIDIA H100 80GB HBM3",
    "h100-nvl": "NVIDIA H100 NVL",
    "H800": "NVIDIA H800",
    "H20": "NVIDIA H20",
    "GH200": "NVIDIA GH200 480GB",
    "B200": "NVIDIA B200",
    "GB200": "NVIDIA GB200",
    "B300": "NVIDIA B300 SXM6 AC",
    "L4": "NVIDIA L4",
    "L40": "NVIDIA L40",
    "L40S": "NVIDIA L40S",
    "MI300X": "AMD Instinct MI300X",
    "MI355X": "AMD Instinct MI355X",
}


@pytest.mark.parametrize(("name", "device"), NAMES.items(), ids=NAMES)
def test_a_name_leads_to_its_device(name: str, device: str) -> None:
    assert device_named(name) == device


def test_every_exact_name_leads_to_itself() -> None:
    assert {name: device_named(name) for name in datasheets()} == {name: name for name in datasheets()}
    assert device_named("A100-SXM4-40GB") == "NVIDIA A100-SXM4-40GB"  # as drivers before 470 name it


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RTX 4080", "NVIDIA GeForce RTX 4090"),
        ("H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3"),
        ("MI300A", "AMD Instinct MI300X"),
        ("", "a device such as RTX 4090"),
        ("gpu with a name that is like none of them", "a device such as RTX 4090"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, words: str) -> None:
    with pytest.raises(UserError, match=r"^cluster\.hardware\.device_name=.*has no datasheet here") as refusal:
        device_named(name)
    assert words in str(refusal.value) and str(refusal.value).isprintable()


def described(name: str, **keys: Any) -> HardwareConfig:
    """Return the hardware that conf/cluster/gpu.yaml describes with the name of a device and further keys."""
    cluster = yaml.safe_load(files_in("cluster")["gpu"].read_text())
    cluster["hardware"] |= {"device_name": name} | keys
    return from_dict(HardwareConfig, with_datasheet(cluster)["hardware"], "cluster.hardware")


@pytest.mark.parametrize("name", datasheets())
def test_every_device_has_all_figures_and_the_address_of_a_datasheet(name: str) -> None:
    """A figure in another unit, or one in both directions, would not be in these ranges."""
    sheet, hardware = datasheets()[name], described(name)
    assert all(address.startswith("https://") for address in hardware.sources) and hardware.sources
    assert 14 * 2**30 < hardware.memory_bytes < 300 * 2**30
    assert 2.5e11 < hardware.memory_bandwidth <= 8e12 and 1.5e10 < hardware.intra_node_bandwidth <= 9e11
    assert hardware.host_bandwidth and 1.5e10 < hardware.host_bandwidth <= 4.5e11
    # No device computes fewer operations than it reads bytes, nor a thousand times as many.
    assert 10 < sheet["flops"]["float16"] / hardware.memory_bandwidth < 600
    assert hardware.datasheet_only and str(sheet["like"]) in files_in("cluster")


AGREEING = [name for name in files_in("cluster") if name not in ("local", "slurm", "gpu")]


@pytest.mark.parametrize("name", AGREEING)
def test_the_files_of_clusters_agree_with_the_table(name: str) -> None:
    """A board whose name CUDA reports for two sizes of memory has the other figures of its own."""
    own = yaml.safe_load(files_in("cluster")[name].read_text())["hardware"]
    sheet = datasheets()[own["device_name"]]
    compared = ("intra_node_bandwidth",) if name == "8xh100_96" else FIGURES
    assert {key: own[key] for key in (*compared, "host_bandwidth")} == {
        key: sheet[key] for key in (*compared, "host_bandwidth")
    }
    assert own.get("compute_capability", 9) == int(sheet.get("capability", "9").partition(".")[0])


def test_null_alone_is_replaced() -> None:
    assert described("L4").memory == "22.0GiB" and described("L4", memory="12GiB").memory == "12GiB"
    for hardware in (None, {"device_name": "cpu", "memory": "8GiB"}, {"device_name": "cpu", "host_bandwidth": None}):
        cluster = {"name": "own", "hardware": hardware}
        assert with_datasheet(cluster) is cluster
    assert described("L4", host_bandwidth=1e9).host_bandwidth == 1e9


def test_a_composed_cluster_has_the_figures_and_the_exact_name() -> None:
    values = compose_values(
        "cluster=gpu", "cluster.hardware.device_name=3090", "cluster.gpus_per_node=2", primary="plan"
    )
    cluster = from_dict(ClusterConfig, values["cluster"], "cluster")
    assert cluster.hardware and cluster.name == cluster.hardware.device_name == "NVIDIA GeForce RTX 3090"
    assert cluster.hardware.memory_bytes == parse_bytes("23.6GiB")


@pytest.mark.parametrize("name", ["RTX 4090", "V100", "GB200", "MI355X"])
def test_a_plan_needs_the_name_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("model=tiny", "strategy=ddp", "cluster=gpu", "cluster.gpus_per_node=2", "plan.simulate=false")
    assert main(["plan", *settings, f"cluster.hardware.device_name={name}"]) == 0
    assert f"cluster={device_named(name)} is datasheet-only" in capsys.readouterr().out


def test_a_plan_for_an_unknown_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=tiny", "strategy=ddp", "cluster=gpu", "cluster.hardware.device_name=RTX 4080"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "RTX 4080 has no datasheet here" in line and "RTX 4090" in line
