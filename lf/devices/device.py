"""The Device record: what lf has to know about a kind of accelerator, as data and a few functions."""

from collections.abc import Callable

import attrs


@attrs.frozen(kw_only=True)
class Memory:
    """Memory of one device, in bytes."""

    used: int
    """Allocated now."""
    peak: int
    """Most that was allocated since the start."""
    total: int | None
    """What the device has, None when it cannot be told."""


@attrs.frozen(kw_only=True)
class EnvVar:
    """An environment variable that a device wants, printed at the start."""

    name: str
    """The variable."""
    value: str
    """What it is set to unless the user has set it."""
    why: str
    """One clause: what it does."""


@attrs.frozen(kw_only=True)
class Device:
    """A kind of device. `cpu`, `cuda` and `kunlun` are values of this type; entry points in `lf.devices` add more."""

    name: str
    """What lf calls it."""
    torch_type: str
    """What torch calls it: the string of `torch.device`."""
    backend: str
    """Collective backend of torch.distributed."""
    capabilities: frozenset[str] = frozenset()
    """What it can do: `bf16`, `fused_kernels`, `transformer_engine`."""
    peak_flops: tuple[tuple[str, float], ...] = ()
    """Dense peak in FLOP/s by dtype name; empty where it is not known."""
    env: tuple[EnvVar, ...] = ()
    """Environment that the device wants."""
    memory: Callable[[], Memory]
    """Reads the memory of this process's device."""
    synchronize: Callable[[], None]
    """Waits until the device has done what was asked of it."""
    set_local_rank: Callable[[int], None]
    """Binds this process to the device with that number on this host."""

    def peak(self, dtype: str) -> float | None:
        """Returns the dense peak in FLOP/s for a dtype name (`bfloat16`), None where it is not known."""
        return dict(self.peak_flops).get(dtype)
