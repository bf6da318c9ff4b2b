"""Counts what a real step on this rank holds and sends, for comparison with its plan."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import lf
from lf.models import spec
from tests.cases import megatron

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
            axis = "pp" if op == "send" else self.names.get(dist.ProcessGroup.unbox(group).group_name, "")
            if size > SCALARS and axis:
                entry = self.found.setdefault((axis, op), [0, 0])
                entry[0] += 1
                entry[1] += size
        return func(*args, **(kwargs or {}))


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and value._type().qualified_name().endswith("c10d.ProcessGroup")


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
    import lf.train.megatron_step as step

    own, alive, most = _storages(weights), weakref.WeakSet[_Kept](), 0
    original = step.forward

    def pack(tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        alive.add(kept)
        return kept

    def forward(*args: Any) -> Any:
        nonlocal most
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            out = original(*args)
        found = _storages([kept.tensor for kept in alive])
        most = max(most, sum(size for at, size in found.items() if at not in own))
        return out

    step.forward = forward
    try:
        yield lambda: most
    finally:
        step.forward = original


def counted(run: lf.Run, length: int, documents: int, micro: int) -> dict[str, Any]:
    """Returns the bytes of parameters, gradients, optimiser and kept activations of one step, and its collectives."""
    engine, ctx = megatron(run)
    assert run.model is not None
    rows, chunks = run.parallel.micro_batch, engine.state.chunks
    batches = [spec.fake_batch(run.model, rows, length, at) for at in range(micro)]
    if documents > 1:
        batches = [{**batch, "lengths": (length // documents,) * documents * rows} for batch in batches]
    weights = [p for chunk in chunks for p in chunk.module.parameters()]
    names = {"tp": "tp", "cp": "cp", "pp": "pp", "dp_cp": "dp", "expt_dp": "expert dp", "ep": "ep", "embd": "ends"}
    names |= {"expt_tp": "etp", "tp_ep": "etp*ep"}
    groups = {getattr(ctx.groups, name).group_name: axis for name, axis in names.items() if getattr(ctx.groups, name)}
    with kept_bytes(weights) as kept, Calls(groups) as calls:
        engine.step(engine.state, batches)
    held = _storages([p.data for p in weights])
    optimizer = engine.state.optimizer.optimizer
    main = [p.data for group in optimizer.param_groups for p in group["params"]]
    state = [t for kept_ in optimizer.state.values() for t in kept_.values() if isinstance(t, Tensor)]
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return {
        "elements": sum(p.numel() for p in weights if p.requires_grad),
        "parameters": sum(held.values()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(t.nbytes for t in state)
        + sum(size for at, size in _storages(main).items() if at not in held and not _inside(at, held)),
        "activations": kept(),
        "traffic": {key: tuple(value) for key, value in calls.found.items()},
    }


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that a block makes and has alive at once, most of all times."""

    def __init__(self) -> None:
        super().__init__()
        self.known = WeakIdKeyDictionary()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _each_storage((args, kwargs)):
            self.known.setdefault(storage, None)
        out = func(*args, **(kwargs or {}))
        for storage in _each_storage(out):
            if storage not in self.known:
                self.known[storage] = None
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage.nbytes())
        return out

    def _gone(self, size: int) -> None:
        self.now -= size


def _each_storage(tree: Any) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def most_alive(run: lf.Run, length: int, micro: int) -> int:
    """Returns the most bytes that a step makes and has alive at once; weights, gradients and state do not count."""
    engine, _ = megatron(run)
    assert run.model is not None
    batches = [spec.fake_batch(run.model, run.parallel.micro_batch, length, at) for at in range(micro)]
    # The first step makes the optimiser's state.
    engine.step(engine.state, batches)
    with Live() as live:
        engine.step(engine.state, batches)
    return live.most


def _inside(at: int, held: dict[int, int]) -> bool:
    return any(start <= at < start + size for start, size in held.items())
