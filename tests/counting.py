"""Counts what a real step on this rank holds and sends, for comparison with its plan."""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lf
from lf.models import spec
from lf.models.media import Media
from lf.models.vision.memory import Alive
from lf.models.vlm import Vlm
from tests.cases import megatron
from tests.vlm_cases import even_rows

SCALARS = 64
"""Bytes of a call up to which it is no traffic: sums of losses, weights and norms."""

OPS = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}
"""torch's collectives: what they are called in a plan, and which argument has the bytes that count."""


class _Kept:
    """A tensor that the forward has kept; it goes when the backward has used it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Calls(TorchDispatchMode):
    """Counts the collectives of a block by group and kind."""

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.names = names
        self.found: dict[tuple[str, str], list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::") and name.removeprefix("c10d::") in OPS:
            op, at = OPS[name.removeprefix("c10d::")]
            group = next(arg for arg in args if _is_group(arg))
            size = _bytes(args[at])
            # Interleaved stages send through the group of all ranks; sums over other groups are counts of tokens.
            axis = self.names.get(dist.ProcessGroup.unbox(group).group_name, "")
            if op == "send":
                axis = "pp" if axis in ("pp", "world") else "replica"
            if size > SCALARS and axis not in ("", "world") and not _is_object(args[at]):
                entry = self.found.setdefault((axis, op), [0, 0])
                entry[0] += 1
                entry[1] += size
        return func(*args, **(kwargs or {}))


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and value._type().qualified_name().endswith("c10d.ProcessGroup")


def _is_object(value: Any) -> bool:
    """Returns whether a pickled object is sent."""
    return any(t.dtype == torch.uint8 for t in tree_leaves(value))


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(_bytes(each) for each in value)


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return {at: size for at, size in found.items() if size}


@contextmanager
def kept_bytes(weights: Sequence[Tensor]) -> Iterator[Callable[[], int]]:
    """Counts the storages that forwards keep at once, most of all times; weights do not count."""
    from lf.train import decoupled
    from lf.train import megatron_step as step

    own, alive, most = _storages(weights), weakref.WeakSet[_Kept](), 0
    forward, begin = step.forward, decoupled.begin

    def pack(tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        alive.add(kept)
        return kept

    def watched(function: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            out = function(*args, **kwargs)
        found = _storages([kept.tensor for kept in alive])
        most = max(most, sum(size for at, size in found.items() if at not in own))
        return out

    step.forward = functools.partial(watched, forward)
    decoupled.begin = functools.partial(watched, begin)
    try:
        yield lambda: most
    finally:
        step.forward, decoupled.begin = forward, begin


def counted(run: lf.Run, length: int, documents: int, micro: int, media: tuple[Media, ...] = ()) -> dict[str, Any]:
    """Returns the bytes of parameters, gradients, optimiser and kept activations of one step, and its collectives."""
    engine, ctx, apart = engine_of(run)
    copy = [p.data for each in apart if each.chunk is None for p in each.encoder.parameters()]
    chunks, batches = engine.state.chunks, batches_of(run, length, micro, media)
    if documents > 1:
        rows = run.parallel.micro_batch
        batches = [{**batch, "lengths": (length // documents,) * documents * rows} for batch in batches]
    weights = [p for chunk in chunks for p in chunk.module.parameters()]
    pictures = [batch["patches"] for batch in batches if "patches" in batch]
    with kept_bytes([*weights, *copy, *pictures]) as kept, Calls(group_names(ctx, apart)) as calls:
        _, metrics = engine.step(engine.state, batches)
    held = _storages([p.data for p in weights])
    optimizer = engine.state.optimizer.optimizer
    main = [p.data for group in optimizer.param_groups for p in group["params"]]
    state = [t for kept_ in optimizer.state.values() for t in kept_.values() if isinstance(t, Tensor)]
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return {
        "elements": sum(p.numel() for p in weights if p.requires_grad),
        "parameters": sum(_storages([*(p.data for p in weights), *copy]).values()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(t.nbytes for t in state)
        + sum(size for at, size in _storages(main).items() if at not in held and not _inside(at, held)),
        "activations": kept(),
        "traffic": {key: tuple(value) for key, value in calls.found.items()},
        "media_flops": metrics.media_flops,
    }


def engine_of(run: lf.Run) -> tuple[Any, Any, list[Any]]:
    """Returns the engine and the context of this rank, and what encodes apart on it, if something does."""
    from lf.train import decoupled

    made, apart = [], decoupled.apart

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made.append(apart(*args, **kwargs))
        return made[-1]

    decoupled.apart = recorded
    try:
        engine, ctx = megatron(run)
    finally:
        decoupled.apart = apart
    return engine, ctx, made


def batches_of(run: lf.Run, length: int, micro: int, media: tuple[Media, ...]) -> list[spec.Batch]:
    """Returns micro-batches of random rows; with `media` each row has these."""
    rows, cfg = run.parallel.micro_batch, run.model
    assert cfg is not None
    if not media:
        return [spec.fake_batch(cfg, rows, length, at) for at in range(micro)]
    assert isinstance(cfg, Vlm)
    made = even_rows(cfg, rows * micro, length, media)
    return [spec.collate(cfg, made[at : at + rows], made[0]) for at in range(0, len(made), rows)]


def group_names(ctx: Any, apart: Sequence[Any]) -> dict[str, str]:
    """Returns the axis of each process group of this rank that has several ranks."""
    names = {"tp": "tp", "cp": "cp", "pp": "pp", "dp_cp": "dp", "expt_dp": "expert dp", "ep": "ep", "embd": "ends"}
    names |= {"expt_tp": "etp", "tp_ep": "etp*ep", "mp": "mp"}
    groups = {axis: getattr(ctx.groups, name) for name, axis in names.items() if getattr(ctx.groups, name)}
    found = {group.group_name: axis for axis, group in groups.items() if group.size() > 1}
    found |= {each.replica.share.group.group_name: "apart" for each in apart if each.replica.share is not None}
    return {dist.group.WORLD.group_name: "world", **found}  # type: ignore[union-attr]


def most_alive(run: lf.Run, length: int, micro: int, media: tuple[Media, ...] = ()) -> int:
    """Returns the most bytes that a step makes and has alive at once; weights, gradients and state do not count."""
    engine, _ = megatron(run)
    batches = batches_of(run, length, micro, media)
    # The first step makes the optimiser's state.
    engine.step(engine.state, batches)
    with Alive() as live:
        engine.step(engine.state, batches)
    return live.most


def _inside(at: int, held: dict[int, int]) -> bool:
    return any(start <= at < start + size for start, size in held.items())
