"""What megatron-core 0.16.1 needs changed before lf can use it, as one table.

megatron-core believes in `torch.cuda` and in TransformerEngine. Each row of `TABLE` names a target, what takes its
place, why, and when: always (upstream bugs), without TransformerEngine, or on a CPU. `prepare_megatron` applies the
rows that a device needs, once a process, before the first Megatron module is built. It refuses another version of
megatron-core, and a target that is not there.

The largest CPU change is the proxy: inside megatron's own modules, and nowhere else, the name `torch` means a module in
which "cuda" is the CPU. Two changes are process-wide because they replace methods of torch classes: `Tensor.cuda` and
`Tensor.record_stream`, which can only raise on a CPU build, and stay on the CPU where a card is there but not used. A
third, `Tensor.type`, holds inside `cuda_type_names` alone.

megatron-core decorates small functions with torch.compile when it is imported, which importing any part of it does
already. Devices without fused kernels get the plain functions back.

Not needed, because lf does not use the code: the checkpoint writer's spawned manager and the optimiser state
dictionaries (lf saves its own checkpoints), the vocabulary-parallel loss that looks up a global group (lf has its own),
and fused losses that round the gradient to bfloat16.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from lf.devices.device import Device

VERSION = "0.16.1"
"""The megatron-core release that the table was written for."""

MODULES = (
    "distributed.distributed_data_parallel",
    "distributed.finalize_model_grads",
    "models.gpt.gpt_model",
    "models.gpt.moe_module_specs",
    "models.gpt.gpt_layer_specs",
    "optimizer",
    "optimizer.distrib_optimizer",
    "pipeline_parallel.bridge_communicator",
    "pipeline_parallel.schedules",
    "tensor_parallel.random",
    "transformer.attention",
    "transformer.moe.token_dispatcher",
    "transformer.multi_latent_attention",
    "transformer.multi_token_prediction",
)
"""Modules of megatron.core that lf builds on; importing them imports every module that the table touches."""


@attrs.frozen(kw_only=True)
class Row:
    """One change to megatron-core."""

    target: str
    """`module:attribute`, the module below `megatron.core` (or `torch:` for a process-wide change)."""
    make: Callable[[Any], Any]
    """Makes the replacement from the original; the original is None where the name may be missing."""
    why: str
    """What goes wrong without it."""
    when: Literal["always", "no_te", "cpu"]
    """Everywhere, on devices without TransformerEngine, or on CPUs."""
    missing: bool = False
    """Whether upstream may lack the name: the fault is then that the name is undefined."""


def _here(device: Any) -> Any:
    """Returns the device that stands for what megatron asked for: "cuda" and its numbers become the CPU."""
    name = str(device.type if isinstance(device, torch.device) else device)
    return torch.device("cpu") if isinstance(device, int) or name.startswith("cuda") else device


class _Stream:
    """A stream on which program order is the order."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Event") -> float:
        return (other.at - self.at) * 1e3


class _Nvtx:
    """Ranges for a profiler that is not there."""

    def range(self, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _cuda_namespace() -> types.ModuleType:
    """Returns what megatron sees as `torch.cuda` on a CPU."""
    namespace = _Fallback("torch.cuda", torch.cuda)
    idle = lambda *args, **kwargs: None  # noqa: E731
    zero = lambda *args, **kwargs: 0  # noqa: E731
    stream = _Stream()
    vars(namespace).update(
        Stream=_Stream,
        Event=_Event,
        nvtx=_Nvtx(),
        current_device=lambda: torch.device("cpu"),
        device_count=lambda: 1,
        is_available=lambda: False,
        is_current_stream_capturing=lambda: False,
        set_device=idle,
        synchronize=idle,
        empty_cache=idle,
        memory_allocated=zero,
        max_memory_allocated=zero,
        memory_reserved=zero,
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        stream=lambda s: contextlib.nullcontext(),
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        # torch.manual_seed also tells every accelerator that is not there, with a stack trace for each.
        manual_seed=torch.default_generator.manual_seed,
        manual_seed_all=torch.default_generator.manual_seed,
    )
    return namespace


class _Fallback(types.ModuleType):
    """A module whose missing names are those of another."""

    def __init__(self, name: str, real: Any) -> None:
        super().__init__(name)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones"),
    *("ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
)
"""Functions of torch that take a device."""


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


@functools.cache
def _proxy() -> types.ModuleType:
    """Returns the `torch` that megatron's modules see on a CPU."""
    proxy = _Fallback("torch", torch)
    vars(proxy).update({name: _on_cpu(getattr(torch, name)) for name in FACTORIES}, cuda=_cuda_namespace())
    return proxy


def _rotary(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Any = None, mscale: float = 1.0, **kw: Any) -> Tensor:
        from lf.models.layers.rope import rotate

        # A packed micro-batch has no batch dimension: [T, heads, D] against a table of [2, T, 1, 1, rot].
        return rotate(t.unsqueeze(1), freqs).squeeze(1) if cu_seqlens is not None else rotate(t, freqs)

    return apply


def _to_host(original: Callable[..., Any]) -> Callable[..., Any]:
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return move


def _uneven_gather(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def gather(x: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(x, group, output_split_sizes, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: x.shape[0]] = x
        out = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(out, padded, group=group)
        return torch.cat([t[:n] for t, n in zip(out, sizes, strict=True)])

    return gather


def _between_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    def exchange(out: Tensor, given: Tensor, *, group: Any, **kwargs: Any) -> Any:
        # A rank's share of a buffer is a view of it, so a rank alone has its result already.
        return None if group.size() == 1 else original(out, given, group=group, **kwargs)

    return exchange


def _frozen_linear(original: Any) -> Any:
    @functools.wraps(original)
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = original(input, weight, None, *args, **kwargs)
        return made if bias is None else made + bias

    return linear


def _checkpoint_init(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, fp8: Any = None) -> None:
        original(self, fp8 or None)

    return init


def _one_generator(original: types.ModuleType) -> types.ModuleType:
    # Here the CPU generator plays CUDA's; to megatron the CPU has none left, so it neither saves nor compares it.
    proxy = _Fallback("torch", original)
    vars(proxy).update(get_rng_state=lambda: torch.empty(0, dtype=torch.uint8), set_rng_state=lambda state: None)
    return proxy


def _l2_norm(original: Callable[..., Any]) -> Callable[..., tuple[Tensor, None]]:
    def norm(chunk: int, overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).reshape(1), None

    return norm


def _subgroups(original: types.ModuleType) -> types.ModuleType:
    proxy = _Fallback("torch.distributed", original)
    vars(proxy)["new_subgroups_by_enumeration"] = lambda ranks, backend=None, **kw: (
        original.new_subgroups_by_enumeration(ranks, **kw)
    )
    return proxy


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


TABLE: tuple[Row, ...] = (
    Row(
        target="transformer.attention:apply_rotary_pos_emb",
        make=_rotary,
        why="upstream scales rope by one hard-coded rule and makes cos and sin again in every layer; lf's table has "
        "one row a token, made once a micro-batch, for any scaling, packing and context parallelism",
        when="always",
    ),
    Row(
        target="tensor_parallel.layers:linear_with_frozen_weight",
        make=_frozen_linear,
        why="upstream gives the bias of a frozen weight no gradient, so a bias that is trained stays as it is",
        when="always",
    ),
    Row(
        target="tensor_parallel.random:CheckpointWithoutOutput.__init__",
        make=_checkpoint_init,
        why="the default fp8=False counts as set, and recompute then asks for TransformerEngine",
        when="always",
    ),
    Row(
        target="optimizer.distrib_optimizer:Adam",
        make=_constant(torch.optim.Optimizer),
        why="the class is checked only because of upstream's checkpoints; lf saves any element-wise optimiser",
        when="always",
    ),
    Row(
        target="transformer.moe.moe_utils:te_general_gemm",
        make=_constant(None),
        why="the router names it although the import that defines it has failed",
        when="no_te",
        missing=True,
    ),
    Row(
        target="optimizer.clip_grads:l2_norm_impl",
        make=_l2_norm,
        why="upstream's own waits for the device once a parameter, and TransformerEngine's, taken wherever the "
        "package is installed, runs on CUDA only",
        when="no_te",
    ),
    Row(
        target="transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        make=_to_host,
        why="as_numpy is skipped for tensors that are on the CPU already, and all_to_all then gets tensors as sizes",
        when="cpu",
    ),
    Row(
        target="transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        make=_to_host,
        why="the same function under the name that the dispatcher imported",
        when="cpu",
    ),
    Row(
        target="tensor_parallel.mappings:_gather_along_first_dim",
        make=_uneven_gather,
        why="gloo gathers pieces of one size only",
        when="cpu",
    ),
    Row(
        target="distributed.param_and_grad_buffer:dist_all_gather_func",
        make=_between_ranks,
        why="gloo copies the whole buffer even where one rank is alone",
        when="cpu",
    ),
    Row(
        target="distributed.param_and_grad_buffer:dist_reduce_scatter_func",
        make=_between_ranks,
        why="gloo copies the whole buffer even where one rank is alone",
        when="cpu",
    ),
    Row(
        target="tensor_parallel.random:_get_cuda_rng_state",
        make=_constant(lambda *args, **kwargs: torch.get_rng_state()),
        why="there is no CUDA generator",
        when="cpu",
    ),
    Row(
        target="tensor_parallel.random:_set_cuda_rng_state",
        make=_constant(lambda state, *args, **kwargs: torch.set_rng_state(state)),
        why="there is no CUDA generator",
        when="cpu",
    ),
    Row(
        target="tensor_parallel.random:torch",
        make=_one_generator,
        why="it saves the CPU generator beside CUDA's, which here are one, and warns at every fork that it has moved",
        when="cpu",
    ),
    Row(
        target="pipeline_parallel.bridge_communicator:dist",
        make=_subgroups,
        why="it asks for NCCL by name",
        when="cpu",
    ),
    Row(
        target="torch:Tensor.cuda",
        make=_constant(lambda self, *args, **kwargs: self),
        why="tied embeddings and context parallel rope call it; a CPU build can only raise",
        when="cpu",
    ),
    Row(
        target="torch:Tensor.record_stream",
        make=_constant(lambda self, stream: None),
        why="the overlapped expert schedule calls it with a stream; a CPU build can only raise",
        when="cpu",
    ),
)


def _resolve(target: str) -> tuple[Any, str]:
    """Returns the object that holds a target, and the target's last name."""
    module, _, path = target.partition(":")
    holder: Any = torch if module == "torch" else importlib.import_module(f"megatron.core.{module}")
    *parents, name = path.split(".")
    for parent in parents:
        holder = getattr(holder, parent)
    return holder, name


@functools.cache
def _apply(row: Row) -> None:
    """Makes one change, once a process."""
    fault = f"megatron-core has no {row.target}, which lf must change because {row.why}"
    try:
        holder, name = _resolve(row.target)
    except (ImportError, AttributeError) as error:
        raise ValueError(fault) from error
    if not row.missing and not hasattr(holder, name):
        raise ValueError(fault)
    setattr(holder, name, row.make(getattr(holder, name, None)))


def rows_for(device: Device) -> tuple[Row, ...]:
    """Returns the rows of the table that a device needs."""
    wanted = {"always"}
    if "transformer_engine" not in device.capabilities:
        wanted.add("no_te")
    if device.torch_type == "cpu":
        wanted.add("cpu")
    return tuple(row for row in TABLE if row.when in wanted)


@functools.cache
def prepare_megatron(device: Device) -> None:
    """Makes megatron-core usable on a device, once a process.

    Raises ValueError where its release does not fit, and where the process has it on another kind of device already.
    """
    found = importlib.metadata.version("megatron-core")
    if found != VERSION:
        raise ValueError(
            f"megatron-core {found} is installed, but lf is written for {VERSION}: pip install megatron-core=={VERSION}"
        )
    core = vars(importlib.import_module("megatron.core"))
    kind = core.setdefault("_lf_torch_type", device.torch_type)
    if kind != device.torch_type:
        raise ValueError(f"this process uses megatron-core on {kind}; start another one for {device.torch_type}")
    fused = "fused_kernels" in device.capabilities
    if not fused:
        importlib.import_module("megatron.core.jit").disable_jit_fuser()
    for name in MODULES:
        importlib.import_module(f"megatron.core.{name}")
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core"):
            if not fused:
                _uncompile(module)
            if device.torch_type == "cpu" and getattr(module, "torch", None) is torch:
                module.torch = _proxy()  # type: ignore[attr-defined]
    for row in rows_for(device):
        _apply(row)


def _uncompile(holder: Any) -> None:
    """Puts back the functions that torch.compile has wrapped, in a module and in the classes that it defines."""
    for name, value in list(vars(holder).items()):
        if isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
            setattr(holder, name, value._torchdynamo_orig_callable)
        elif isinstance(value, type) and value.__module__ == getattr(holder, "__name__", ""):
            _uncompile(value)


@contextlib.contextmanager
def cuda_type_names(device: Device) -> Iterator[None]:
    """Lets `tensor.type()` say `torch.cuda.FloatTensor` on a CPU, while megatron's optimiser sorts its parameters."""
    if device.torch_type != "cpu":
        yield
        return
    original = Tensor.type

    def named(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    Tensor.type = named  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Tensor.type = original  # type: ignore[method-assign]
