"""Which device a machine is, what it can do, and how other packages add theirs."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

from lf.devices.cpu import cpu
from lf.devices.cuda import cuda_capabilities, cuda_device, peak_flops
from lf.devices.detect import apply_env, detect, render_env, require
from lf.devices.device import Device, EnvVar
from lf.devices.kunlun import kunlun, kunlun_found

ROOT = Path(__file__).parents[1]


def package(folder: Path, name: str, text: str = "") -> None:
    (folder / f"{name}.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path, for packages that a test makes up."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def entry_point(site: Path, name: str, value: str) -> None:
    info = site / f"{name}_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[lf.devices]\n{name} = {value}\n")
    importlib.invalidate_caches()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a CUDA card")
def test_a_machine_without_accelerator_is_a_cpu() -> None:
    assert detect() is cpu
    assert detect("cpu") is cpu
    with pytest.raises(ValueError, match=r"device cuda: torch .* finds no CUDA card; .* or take device cpu"):
        cuda_device()


def test_the_cpu_tells_its_memory() -> None:
    before = cpu.memory()
    held = torch.ones(20_000_000)
    after = cpu.memory()
    assert before.total is not None
    assert before.used < before.total
    assert after.used - before.used > 0.9 * held.nbytes
    assert after.peak >= after.used
    cpu.synchronize()
    cpu.set_local_rank(3)
    assert torch.device(cpu.torch_type).type == "cpu"


def test_the_vendor_package_makes_a_kunlun_machine(site: Path) -> None:
    package(site, "torch_xmlir")
    assert detect() is kunlun
    assert detect("kunlun") is kunlun
    assert detect("cpu") is cpu
    assert (kunlun.torch_type, kunlun.backend) == ("cuda", "nccl")


def test_detecting_kunlun_loads_neither_torch_nor_the_vendor_package(tmp_path: Path) -> None:
    package(tmp_path, "torch_xmlir", "raise RuntimeError('loaded too early')")
    code = (
        "import sys; from lf.devices.detect import apply_env, detect; device = detect(); apply_env(device); "
        "print(device.name, 'torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["kunlun", "False"]


def test_kunlun_loads_the_vendor_runtime_before_it_takes_a_card(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(site, "torch_xmlir")
    order: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda rank: order.append((rank, "torch_xmlir" in sys.modules)))
    kunlun.set_local_rank(5)
    assert order == [(5, True)]
    with pytest.raises(ValueError, match="local rank 8 has no card: this host shows 8"):
        kunlun.set_local_rank(8)


@pytest.mark.skipif(kunlun_found(), reason="the machine has the vendor's runtime")
def test_kunlun_without_its_runtime_is_refused() -> None:
    with pytest.raises(ValueError, match=r"package torch_xmlir\) is not installed"):
        detect("kunlun")


@pytest.mark.parametrize("capability", ["fused_kernels", "transformer_engine"])
@pytest.mark.parametrize("device", [kunlun, cpu])
def test_what_a_device_lacks_is_refused(device: Device, capability: str) -> None:
    with pytest.raises(ValueError, match=f"{capability} is not available on {device.name} .* take bfloat16"):
        require(device, capability, "precision.params", "take bfloat16")
    require(device, "bf16", "precision.params", "take float32")


def test_the_kunlun_environment_is_printed_as_data() -> None:
    assert (
        render_env(kunlun.env)
        == """\
CUDA_DEVICE_MAX_CONNECTIONS=1      # starts kernels in the order of their calls
XMLIR_ENABLE_FAST_FC=true          # takes the fast bf16 path of linear layers
XMLIR_ENABLE_FAST_FC_FWD_OUT=true  # the same for their forward
XMLIR_ENABLE_FAST_FC_BWD_DW=true   # the same for the gradient of their weight
XMLIR_ENABLE_FAST_FC_BWD_DX=true   # the same for the gradient of their input
XMLIR_CUDNN_ENABLED=1              # has the convolutions that video patches need (conv3d)
XMLIR_PARALLEL_SAVE_MEMORY=false   # spends memory on speed
XMLIR_BATCH_PARALLEL=false         # keeps the fused bf16 casts, which true turns off
XMLIR_DIST_ASYNC_ISEND_IRECV=true  # sends between pipeline stages without waiting
BKCL_FORCE_L3_RDMA=0               # leaves on-chip memory alone, which may run out
BKCL_ALL_TO_ALL_OPT=1              # takes the all-to-all made for several machines
BKCL_RING_HOSTID_USE_RANK=1        # tells the hosts of a ring apart by rank"""
    )
    assert render_env(()) == ""


def test_the_environment_of_the_user_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = EnvVar(name="LF_TEST_MINE", value="theirs", why="a test")
    free = EnvVar(name="LF_TEST_FREE", value="theirs", why="a test")
    monkeypatch.setattr(os, "environ", {"LF_TEST_MINE": "mine"})
    assert apply_env(attrs.evolve(cpu, env=(mine, free))) == (free,)
    assert os.environ == {"LF_TEST_MINE": "mine", "LF_TEST_FREE": "theirs"}


@pytest.mark.parametrize("value", ["fake_chip:device", "fake_chip:make"])
def test_another_package_offers_a_device_by_entry_point(site: Path, value: str) -> None:
    package(
        site,
        "fake_chip",
        "import attrs\nfrom lf.devices.cpu import cpu\ndevice = attrs.evolve(cpu, name='fake-chip')\n"
        "def make():\n    return device\nwrong = 3\n",
    )
    entry_point(site, "fake", value)
    assert detect("fake").name == "fake-chip"
    entry_point(site, "broken", "fake_chip:wrong")
    with pytest.raises(ValueError, match="device broken: the entry point fake_chip:wrong gives int"):
        detect("broken")
    with pytest.raises(ValueError, match="device 'tpu' is not known; take one of cpu, cuda, kunlun, broken, fake"):
        detect("tpu")


@pytest.mark.parametrize(
    ("card", "bfloat16", "float8"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, None),
        ("NVIDIA A100 80GB PCIe", 312e12, None),
        ("NVIDIA H100 80GB HBM3", 989.5e12, 1979e12),
        ("NVIDIA H100 PCIe", 756.5e12, 1513e12),
        ("NVIDIA H200", 989.5e12, 1979e12),
        ("NVIDIA H200 NVL", 835.5e12, 1670.5e12),
        ("NVIDIA H800", 989.5e12, 1979e12),
        ("NVIDIA H20", 148e12, 296e12),
        ("NVIDIA B200", 2250e12, 4500e12),
        ("NVIDIA L40S", 362e12, 733e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 330.3e12),
    ],
)
def test_peaks_of_known_cards(card: str, bfloat16: float, float8: float | None) -> None:
    device = attrs.evolve(cpu, peak_flops=peak_flops(card))
    assert device.peak("bfloat16") == device.peak("float16") == bfloat16
    assert device.peak("float8") == float8
    assert 0 < device.peak("float32") < bfloat16


@pytest.mark.parametrize(
    "card",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A10G",
        "Tesla T4",
    ],
)
def test_the_peak_of_another_card_is_not_guessed(card: str) -> None:
    assert peak_flops(card) == ()
    assert cpu.peak("float32") is None


def test_capabilities_follow_compute_capability_and_packages(site: Path) -> None:
    assert "bf16" not in cuda_capabilities((7, 5))
    assert "bf16" in cuda_capabilities((8, 0))
    package(site, "transformer_engine", "raise RuntimeError('must not be imported')")
    assert "transformer_engine" in cuda_capabilities((9, 0))
    assert "transformer_engine" not in cuda_capabilities((7, 0))


def test_a_cuda_machine_is_described_by_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    device = detect()
    assert (device.name, device.torch_type, device.backend) == ("cuda", "cuda", "nccl")
    assert "bf16" in device.capabilities
    assert device.peak("bfloat16") == 989.5e12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_a_real_card() -> None:
    device = detect("cuda")
    device.set_local_rank(0)
    held = torch.ones(1_000_000, device="cuda")
    device.synchronize()
    memory = device.memory()
    assert held.nbytes <= memory.used <= memory.peak <= memory.total
