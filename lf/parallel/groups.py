"""Process groups of a layout as one explicit value, and the one place that lends them to megatron-core's globals."""

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch.distributed as dist

from lf.models.spec import Ctx, Layout

_DENSE = {
    "tp": ["tp"],
    "cp": ["cp"],
    "dp": ["dp"],
    "pp": ["pp"],
    "dp_cp": ["cp", "dp"],
    "tp_cp": ["tp", "cp"],
    "mp": ["tp", "pp"],
    "tp_dp_cp": ["tp", "cp", "dp"],
    "intra_dist_opt": ["tp", "cp", "dp", "pp"],
}
_EXPERT = {
    "expt_tp": ["etp"],
    "ep": ["ep"],
    "expt_dp": ["edp"],
    "tp_ep": ["etp", "ep"],
    "tp_ep_pp": ["etp", "ep", "pp"],
}


def expert_dp(layout: Layout) -> int:
    """Returns how many ranks hold the same expert weights."""
    return layout.dp * layout.tp * layout.cp // (layout.ep * layout.etp)


def place(layout: Layout, rank: int) -> Layout:
    """Returns the layout with the place of a rank: tensor parallel ranks are neighbours, pipeline stages farthest."""
    tp_rank, rest = rank % layout.tp, rank // layout.tp
    cp_rank, rest = rest % layout.cp, rest // layout.cp
    dp_rank, pp_rank = rest % layout.dp, rest // layout.dp
    etp_rank, rest = rank % layout.etp, rank // layout.etp
    return attrs.evolve(
        layout,
        tp_rank=tp_rank,
        cp_rank=cp_rank,
        dp_rank=dp_rank,
        pp_rank=pp_rank,
        etp_rank=etp_rank,
        ep_rank=rest % layout.ep,
    )


def process_groups(layout: Layout) -> Any:
    """Returns megatron-core's ProcessGroupCollection of a layout.

    Every rank of the world calls it, with torch.distributed up.
    """
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.process_groups_config import ProcessGroupCollection

    dense = HyperCommGrid([layout.tp, layout.cp, layout.dp, layout.pp], ["tp", "cp", "dp", "pp"])
    expert = HyperCommGrid([layout.etp, layout.ep, expert_dp(layout), layout.pp], ["etp", "ep", "edp", "pp"])
    groups = ProcessGroupCollection()
    for name, axes in _DENSE.items():
        setattr(groups, name, dense.create_pg(axes))
    for name, axes in _EXPERT.items():
        setattr(groups, name, expert.create_pg(axes))
    groups.embd = _ends(layout)
    groups.pos_embd = None
    groups.intra_dp_cp = groups.dp_cp
    groups.intra_expt_dp = groups.expt_dp
    return groups


def _ends(layout: Layout) -> Any:
    """Returns the group of the first and last pipeline stage, which share a tied embedding; None in between."""
    mine = None
    stride = layout.tp * layout.cp * layout.dp
    for first in range(stride):
        ranks = sorted({first, first + stride * (layout.pp - 1)})
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


_GLOBALS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EMBEDDING_GROUP": "embd",
}
"""megatron.core.parallel_state's variables and the groups that they stand for."""


@contextlib.contextmanager
def megatron_globals(ctx: Ctx) -> Iterator[None]:
    """Lends a component's groups to megatron-core's global state, which a part of its code still reads."""
    from megatron.core import parallel_state

    groups, vpp = ctx.groups, ctx.layout.vpp
    lent: dict[str, Any] = {variable: getattr(groups, name) for variable, name in _GLOBALS.items()}
    lent["_PIPELINE_GLOBAL_RANKS"] = dist.get_process_group_ranks(groups.pp)
    lent["_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"] = dist.get_process_group_ranks(groups.tp)
    lent["_EMBEDDING_GLOBAL_RANKS"] = [] if groups.embd is None else dist.get_process_group_ranks(groups.embd)
    lent["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = vpp if vpp > 1 else None
    before = {variable: getattr(parallel_state, variable) for variable in lent}
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    vars(parallel_state).update(lent)
    try:
        yield
    finally:
        vars(parallel_state).update(before)
