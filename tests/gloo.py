"""One gloo device for all process groups of a test process.

torch makes a device for each group, and the thread of a device wakes a hundred times a second for as long as anything
holds the group: a session that makes hundreds of groups would do little else.
"""

import datetime
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroupGloo


class _OneDevice:
    """Stands where torch looks for the class."""

    def __init__(self) -> None:
        self.device: Any = None

    def __call__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> ProcessGroupGloo:
        if self.device is None:
            self.device = ProcessGroupGloo.create_device(interface="lo")
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [self.device], timeout
        return ProcessGroupGloo(store, rank, size, options)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, ProcessGroupGloo)


def share_device() -> None:
    """Makes every gloo group of this process use one device."""
    if c10d.ProcessGroupGloo is ProcessGroupGloo:
        c10d.ProcessGroupGloo = _OneDevice()  # type: ignore[misc,assignment]
