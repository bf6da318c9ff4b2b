"""The CPU as a device: every path of lf runs on it, slowly and with equal numbers."""

import os
import resource
import sys

from lf.devices.device import Device, Memory


def _memory() -> Memory:
    # getrusage counts in bytes on macOS and in KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Memory(peak=peak, total=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


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
