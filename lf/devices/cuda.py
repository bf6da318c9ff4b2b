"""NVIDIA GPUs: what one can do is read from the card, what its peak is stands in a table."""

import importlib.util
import re

from lf.devices.device import Device, Memory

# Dense peaks in TFLOP/s as (bfloat16 and float16, float32, float8), None where the card has no such unit; the first
# pattern that matches the name of the card holds. float32 is without TF32, and tensor cores add up in float32.
# Sources: NVIDIA's data sheets (HGX B200, GB200, H200, H100, H800, H20, A100, A800, A40, A10, L40S, L4; those of Hopper
# and Blackwell print the figure with 2:4 sparsity, halved here), and NVIDIA's architecture white papers: Hopper for
# H100 PCIe, Ada (appendix A) for RTX 4090, RTX Blackwell for RTX 5090.
_PEAKS: tuple[tuple[str, float, float, float | None], ...] = (
    (r"\bGB200\b", 2500.0, 80.0, 5000.0),
    (r"\bB200\b", 2250.0, 75.0, 4500.0),
    (r"\bH[12]00 NVL\b", 835.5, 60.0, 1670.5),
    (r"\bH[18]00 PCIe\b", 756.5, 51.2, 1513.0),
    (r"\b(GH200|H200|H100|H800)\b", 989.5, 67.0, 1979.0),
    (r"\bH20\b", 148.0, 44.0, 296.0),
    (r"\bA[18]00\b", 312.0, 19.5, None),
    (r"\bA40\b", 149.7, 37.4, None),
    (r"\bA10\b", 125.0, 31.2, None),
    (r"\bL40S\b", 362.0, 91.6, 733.0),
    (r"\bL4\b", 121.0, 30.3, 242.5),
    (r"\bRTX 5090$", 209.5, 104.8, 419.0),
    (r"\bRTX 4090$", 165.2, 82.6, 330.3),
)


def peak_flops(card: str) -> tuple[tuple[str, float], ...]:
    """Returns the dense peaks in FLOP/s by dtype name of a card (`torch.cuda.get_device_name()`), empty if unknown."""
    if " MIG " in card:
        return ()  # A slice of a card has a share of the peak that its name does not tell.
    for pattern, half, single, eighth in _PEAKS:
        if re.search(pattern, card):
            rows = (("bfloat16", half), ("float16", half), ("float32", single), ("float8", eighth))
            return tuple((dtype, peak * 1e12) for dtype, peak in rows if peak)
    return ()


def cuda_capabilities(compute: tuple[int, int]) -> frozenset[str]:
    """Returns what a card of a compute capability can do with the packages that are installed here."""
    found = set()
    if compute >= (8, 0):
        found.add("bf16")
        if importlib.util.find_spec("triton"):
            found.add("fused_kernels")
        if importlib.util.find_spec("transformer_engine"):
            found.add("transformer_engine")
    return frozenset(found)


def cuda_memory() -> Memory:
    """Returns what torch's allocator holds on this process's device, in bytes."""
    import torch

    return Memory(
        used=torch.cuda.memory_allocated(),
        peak=torch.cuda.max_memory_allocated(),
        total=torch.cuda.mem_get_info()[1],
    )


def cuda_synchronize() -> None:
    """Waits for all work queued on this process's device."""
    import torch

    torch.cuda.synchronize()


def cuda_set_local_rank(rank: int) -> None:
    """Binds this process to the card with that number; raises ValueError when the host has fewer."""
    import torch

    cards = torch.cuda.device_count()
    if rank >= cards:
        raise ValueError(
            f"local rank {rank} has no card: this host shows {cards}; start at most {cards} processes on it "
            f"(torchrun --nproc-per-node {cards})"
        )
    torch.cuda.set_device(rank)


def cuda_device() -> Device:
    """Returns the device of this machine's NVIDIA GPUs, described by the card in use; ValueError when there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            f"device cuda: torch {torch.__version__} finds no CUDA card; check nvidia-smi and CUDA_VISIBLE_DEVICES, "
            "install a CUDA build of torch, or take device cpu"
        )
    return Device(
        name="cuda",
        torch_type="cuda",
        backend="nccl",
        capabilities=cuda_capabilities(torch.cuda.get_device_capability()),
        peak_flops=peak_flops(torch.cuda.get_device_name()),
        memory=cuda_memory,
        synchronize=cuda_synchronize,
        set_local_rank=cuda_set_local_rank,
    )
