"""The Megatron path's process groups, contexts, wrapped models and optimisers, all as explicit values."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lf.devices.device import Device
from lf.models.spec import Ctx, Layout, Part, Placed, named_tensors
from lf.parallel.config import MegatronParallel
from lf.parallel.groups import megatron_globals, place, process_groups
from lf.parallel.mcore_compat import cuda_type_names, prepare_megatron


def make_context(cfg: MegatronParallel, layout: Layout, device: Device, dtype: torch.dtype) -> Ctx:
    """Returns the context of this rank; torch.distributed must be up, with one process too."""
    prepare_megatron(device)
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from lf.models.layers.megatron import provider

    layout = place(layout, dist.get_rank())
    # megatron's dropout draws from named states, which must exist; the step seeds them for each micro-batch.
    model_parallel_cuda_manual_seed(0, tp_rank=layout.tp_rank, ep_rank=layout.ep_rank, etp_rank=layout.etp_rank)
    return Ctx(
        device=device,
        dtype=dtype,
        layout=layout,
        groups=process_groups(layout),
        layers=provider(device, dtype),
        options=_recompute(cfg),
    )


def _recompute(cfg: MegatronParallel) -> tuple[tuple[str, Any], ...]:
    if cfg.recompute == "full":
        return (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
    if cfg.recompute == "selective":
        return (("recompute_granularity", "selective"), ("recompute_modules", list(cfg.recompute_modules)))
    return ()


def chunk_contexts(ctx: Ctx) -> tuple[Ctx, ...]:
    """Returns the context of each model chunk of this pipeline stage."""
    layout = ctx.layout
    return tuple(
        attrs.evolve(
            ctx,
            chunk=chunk,
            pre=layout.pp_rank == 0 and chunk == 0,
            post=layout.pp_rank == layout.pp - 1 and chunk == layout.vpp - 1,
        )
        for chunk in range(layout.vpp)
    )


def wrap(model: Any, ctx: Ctx, *, overlap: bool) -> Any:
    """Returns the model inside megatron-core's DistributedDataParallel, which sums gradients in fp32."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    # Experts have data parallel ranks even where the rest has none: tensor parallel ranks that hold the same ones.
    shared = max(ctx.groups.dp_cp.size(), ctx.groups.expt_dp.size())
    overlap = overlap and shared > 1
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        average_in_collective=False,
    )
    return DistributedDataParallel(
        model.config, config, model, disable_bucketing=ctx.chunk > 0, pg_collection=ctx.groups
    )


def distributed_optimizer(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    groups: Sequence[dict[str, Any]],
    chunks: Sequence[Any],
    ctx: Ctx,
) -> Any:
    """Returns megatron-core's DistributedOptimizer around the optimiser that `make` builds from parameter groups.

    Each data parallel rank keeps the fp32 main weights and the state of its share of every gradient bucket.
    """
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    # megatron keeps the groups it is given and puts its shards into them.
    given = [part for group in groups for part in _by_type(group)]
    config = OptimizerConfig(
        use_distributed_optimizer=True,
        bf16=ctx.dtype == torch.bfloat16,
        params_dtype=ctx.dtype,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
    )
    with cuda_type_names(ctx.device):
        optimizer = DistributedOptimizer(
            make(given),
            config,
            None,
            None,
            model_chunks=list(chunks),
            # Each buffer knows the ranks that share it, so experts, which other ranks share, need no second optimiser;
            # megatron-core wants one buffer for each dtype and key, and uses the key for nothing else.
            per_model_buffers=dict(enumerate(held for chunk in chunks for held in _buffers(chunk))),
            data_parallel_group=ctx.groups.intra_dp_cp,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=ctx.groups.mp.rank(),
            distributed_optimizer_instance_id=0,
        )
    optimizer.grad_stats_parallel_group = ctx.groups.intra_dist_opt
    optimizer.tp_group = ctx.groups.tp
    return optimizer


def _by_type(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a parameter group in groups of one type each: megatron-core loses the order of one that has two."""
    pairs = list(zip(group["params"], group["names"], strict=True))
    kinds = dict.fromkeys(param.dtype for param, _ in pairs)
    split = [[pair for pair in pairs if pair[0].dtype == kind] for kind in kinds]
    return [{**group, "params": [param for param, _ in own], "names": [name for _, name in own]} for own in split]


def _buffers(chunk: Any) -> list[Any]:
    return [held for held in (chunk.buffers, chunk.expert_parallel_buffers) if held]


def owned_range(optimizer: Any, param: Tensor) -> tuple[int, int, nn.Parameter] | None:
    """Returns which elements [start, stop) of a flattened parameter this rank updates, and the fp32 shard it updates.

    None where the rank owns nothing of it.
    """
    if param not in optimizer.model_param_gbuf_map:
        return None
    span = optimizer._get_model_param_range_map(param)["param"]
    group, index = optimizer.model_param_group_index_map[param]
    return span.start, span.end, optimizer.optimizer.param_groups[group]["params"][index]


def placements(model: Any, ctx: Ctx) -> list[tuple[Tensor, Placed]]:
    """Returns each parameter and persistent buffer with its place in the global tensors.

    The places are read from the module's own `sharded_state_dict`.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    metadata = {"non_homogeneous_layers": True, "dp_cp_group": ctx.groups.dp_cp}
    with megatron_globals(ctx):
        state = model.sharded_state_dict(metadata=metadata)
    rows: dict[str, int] = getattr(model, "unpadded", {})
    found = []
    for name, tensor in named_tensors(model).items():
        entry = state[name]
        pieces = _tensors(entry.build(), ShardedTensor) if isinstance(entry, ShardedTensorFactory) else [entry]
        found.append((tensor, _placed(pieces, rows.get(name))))
    return found


def _tensors(tree: Any, kind: type) -> list[Any]:
    if isinstance(tree, kind):
        return [tree]
    items: Iterable[Any] = tree.values() if isinstance(tree, dict) else tree
    return [leaf for item in items for leaf in _tensors(item, kind)]


def _placed(pieces: list[Any], rows: int | None) -> Placed:
    """Returns the place of a tensor from megatron's pieces; `rows` are those of the global tensor without padding."""
    parts, local = [], 0
    shape = tuple(pieces[0].global_shape)
    if rows is not None:
        shape = (rows, *shape[1:])
    for piece in pieces:
        at = tuple(piece.global_offset)[len(piece.global_offset) - len(shape) :]
        size = tuple(min(n, whole - first) for n, whole, first in zip(piece.local_shape, shape, at, strict=True))
        if min(size, default=1) > 0:
            parts.append(Part(at=at, local=(local, *[0] * (len(shape) - 1))[: len(shape)], size=size))
        local += piece.local_shape[0] if shape else 1
    # The last number of a replica id is the data parallel rank; the distributed optimiser splits that axis itself.
    replica = pieces[0].replica_id
    assert isinstance(replica, tuple)
    return Placed(name=pieces[0].key, shape=shape, parts=tuple(parts), owner=not any(replica[:-1]), replica=replica[-1])
