"""Which device this machine has, what it wants of the environment, and the refusal of what it cannot do."""

import importlib.metadata
import os
from collections.abc import Callable

from lf.devices.cpu import cpu
from lf.devices.cuda import cuda_device
from lf.devices.device import Device, EnvVar
from lf.devices.kunlun import VENDOR_PACKAGE, kunlun, kunlun_found

ENTRY_POINT_GROUP = "lf.devices"
"""Entry points in which other packages offer devices: each is a `Device`, or a function that returns one."""


def _kunlun() -> Device:
    if not kunlun_found():
        raise ValueError(
            f"device kunlun: the vendor's runtime (package {VENDOR_PACKAGE}) is not installed in this Python; "
            "install it, or take device cpu"
        )
    return kunlun


_BUILT_IN: dict[str, Callable[[], Device]] = {"cpu": lambda: cpu, "cuda": cuda_device, "kunlun": _kunlun}


def _from_entry_point(point: importlib.metadata.EntryPoint) -> Device:
    value = point.load()
    device = value if isinstance(value, Device) else value() if callable(value) else value
    if not isinstance(device, Device):
        raise ValueError(
            f"device {point.name}: the entry point {point.value} gives {type(device).__name__}; "
            "it must be an lf.devices.device.Device or a function that returns one"
        )
    return device


def detect(name: str = "") -> Device:
    """Returns the device with that name, or the best one this machine has: kunlun, then cuda, then cpu.

    Devices of other packages (entry points in `lf.devices`) are taken by name only. An unknown name, or a device that
    is not here, raises ValueError. torch is imported only where CUDA has to be asked for.
    """
    if name:
        if name in _BUILT_IN:
            return _BUILT_IN[name]()
        points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        if name in points.names:
            return _from_entry_point(points[name])
        known = ", ".join([*_BUILT_IN, *sorted(points.names)])
        raise ValueError(f"device {name!r} is not known; take one of {known}")
    if kunlun_found():
        return kunlun
    import torch

    return cuda_device() if torch.cuda.is_available() else cpu


def apply_env(device: Device) -> tuple[EnvVar, ...]:
    """Sets the variables that the device wants and the user has not set, and returns those it set.

    Call it before torch is imported: some runtimes read their environment only when they load.
    """
    missing = tuple(var for var in device.env if var.name not in os.environ)
    os.environ.update({var.name: var.value for var in missing})
    return missing


def early_env() -> tuple[EnvVar, ...]:
    """Sets what a vendor's runtime reads together with torch, and returns it. Scripts call it before anything else."""
    return apply_env(kunlun) if kunlun_found() else ()


def render_env(env: tuple[EnvVar, ...]) -> str:
    """Returns the variables as aligned lines `NAME=value  # why`, fit to be pasted into a shell."""
    pairs = [(f"{var.name}={var.value}", var.why) for var in env]
    width = max((len(pair) for pair, _ in pairs), default=0)
    return "\n".join(f"{pair:<{width}}  # {why}" for pair, why in pairs)


def require(device: Device, capability: str, path: str, cure: str) -> None:
    """Raises ValueError when the device lacks a capability that the setting at `path` needs; `cure` says what to do."""
    if capability not in device.capabilities:
        has = ", ".join(sorted(device.capabilities)) or "none of lf's optional features"
        raise ValueError(f"{capability} is not available on {device.name} (it has {has}), but {path} needs it; {cure}")
