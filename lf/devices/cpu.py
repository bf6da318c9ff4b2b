"""The CPU as a device: every path of lf runs on it, slowly and with equal numbers."""

import os
import resource
import sys
from pathlib import Path

from lf.devices.device import Device, Memory


def _memory() -> Memory:
    page = os.sysconf("SC_PAGE_SIZE")
    # getrusage counts in bytes on macOS and in KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    statm = Path("/proc/self/statm")
    used = int(statm.read_text().split()[1]) * page if statm.exists() else peak
    return Memory(used=used, peak=max(peak, used), total=os.sysconf("SC_PHYS_PAGES") * page)


def _synchronize() -> None:
    """Nothing is asynchronous here."""


def _set_local_rank(rank: int) -> None:
    """All processes share the CPU."""


cpu = Device(
    name="cpu",
    torch_type="cpu",
    backend="gloo",
    capabilities=frozenset({"bf16"}),
    memory=_memory,
    synchronize=_synchronize,
    set_local_rank=_set_local_rank,
)
"""The CPU; memory is that of the process (resident set), total that of the machine."""
