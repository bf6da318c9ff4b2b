"""lf's step beside a plain loop of megatron-core's own modules, and the layouts of two processes beside one."""

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import attrs
import torch
import torch.distributed as dist

import lf
from lf.devices.cpu import cpu
from lf.models.decoder import Attention, DecoderConfig, Mlp
from lf.models.spec import Batch, Ctx, fake_batch
from lf.train.comm import process_group
from lf.train.ranks import start_ranks
from lf.train.state import Engine
from scripts.benchmarks.layouts import LAYOUTS, Layout, compare_layouts
from scripts.benchmarks.ratios import DisagreementError, Ratio, Sizes, Step, head, measure, peer_model, show, summarise


@attrs.frozen(kw_only=True)
class Megatron(Sizes):
    """Trains equal models in lf and in a plain loop around megatron-core's GPTModel, in turn, and compares their speed.

    The peer has megatron-core's local layer spec, the one that needs no TransformerEngine, and torch's own data
    parallelism where there are several processes. Both sides have the same weights, rows, fp32, fused AdamW and
    clipping. Exit code 1 when they disagree about the first step.
    """

    processes: tuple[int, ...] = (1, 2)
    """Data parallel processes; empty leaves megatron-core's modules out."""
    layouts: tuple[Layout, ...] = LAYOUTS
    """Layouts of two processes that are compared with one process; empty leaves them out."""


def lf_engine(run: lf.Run) -> tuple[Engine, Ctx]:
    """Returns lf's engine on the Megatron path, and its context; torch.distributed must be up."""
    from lf.parallel.config import megatron_part, resolve
    from lf.parallel.megatron import make_context
    from lf.train.megatron_step import megatron_engine

    parallel = megatron_part(run.parallel)
    assert parallel is not None
    assert run.model is not None
    ctx = make_context(parallel, resolve(run.parallel, dist.get_world_size()), cpu, torch.float32)
    return megatron_engine(run, run.model, ctx), ctx


def lf_side(run: lf.Run) -> tuple[Step, Engine, Ctx]:
    """Returns lf's step on the Megatron path, with its engine and context; torch.distributed must be up."""
    engine, ctx = lf_engine(run)
    state = engine.state

    def step(batch: Batch) -> tuple[float, float]:
        nonlocal state
        state, metrics = engine.step(state, [batch])
        return metrics.loss, metrics.grad_norm

    return step, engine, ctx


def plain_model(cfg: DecoderConfig, ctx: Ctx) -> Any:
    """Returns megatron-core's GPTModel of a dense decoder with its local layer spec."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from lf.parallel.groups import megatron_globals

    a, mlp = cfg.attention, cfg.mlp
    assert isinstance(a, Attention)
    assert isinstance(mlp, Mlp)
    config = TransformerConfig(
        num_layers=cfg.layers,
        hidden_size=cfg.hidden,
        ffn_hidden_size=mlp.width,
        num_attention_heads=a.heads,
        num_query_groups=a.kv_heads,
        kv_channels=a.head_dim,
        qk_layernorm=a.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=cfg.norm.eps,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # The fused kernels of megatron-core are CUDA's.
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=a.qk_norm, normalization="RMSNorm")
    with megatron_globals(ctx):
        return GPTModel(
            config,
            spec,
            cfg.vocab,
            cfg.max_length,
            share_embeddings_and_output_weights=cfg.tied,
            position_embedding_type="rope",
            rotary_base=int(cfg.rope.theta),
            pg_collection=ctx.groups,
        )


def plain_side(run: lf.Run, engine: Engine, ctx: Ctx) -> Step:
    """Returns a plain training step of megatron-core's model with the weights that an engine of lf has."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.transformer import attention

    from lf.models.spec import named_tensors
    from lf.parallel.groups import megatron_globals
    from lf.train.optim import make_optimizer, param_groups

    assert isinstance(run.model, DecoderConfig)
    bare = plain_model(run.model, ctx)
    (chunk,) = engine.state.chunks
    ours, theirs = named_tensors(chunk.module), named_tensors(bare)
    if ours.keys() != theirs.keys():
        raise DisagreementError(f"only one side has {', '.join(sorted(ours.keys() ^ theirs.keys())[:5])}")
    with torch.no_grad():
        for name, tensor in theirs.items():
            tensor.copy_(ours[name])
    world = dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(bare) if world > 1 else bare
    optimizer = make_optimizer(run.optim, param_groups(bare.named_parameters(), run.optim))

    def step(batch: Batch) -> tuple[float, float]:
        tokens = batch["tokens"]
        # lf has put its own rotation into megatron-core's attention; the peer has megatron-core's.
        with megatron_globals(ctx), mock.patch.object(attention, "apply_rotary_pos_emb", apply_rotary_pos_emb):
            losses = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None, labels=batch["labels"])
            loss = losses.mean()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(bare.parameters(), run.optim.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if world > 1:
            dist.all_reduce(total)
        return float(total) / world, float(norm)

    return step


def compare(args: Megatron) -> Iterator[Ratio]:
    """Gives the ratio of each case on the processes that are up; each of them has rows of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for family in args.families:
        model = peer_model(family, args)
        for length in args.lengths:
            rows = max(1, args.tokens // length)
            run = lf.Run(
                model=model,
                data=lf.TextData(paths=("unused",)),
                batch=rows * world,
                parallel=lf.MegatronParallel(micro_batch=rows),
            )
            ours, engine, ctx = lf_side(run)
            theirs = plain_side(run, engine, ctx)
            batches = [fake_batch(model, rows, length, seed * world + rank) for seed in range(1 + args.pairs)]
            pairs = measure(ours, theirs, batches, f"{family} at {length} on {world}")
            yield summarise(pairs, family, length, rows * world)


def one_rank(args: Megatron, unused: list[str]) -> int:
    """Measures on this rank, prints on the first, and returns the exit code."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, (args.threads or torch.get_num_threads()) // world))
    try:
        with process_group(cpu) as comm:
            if comm.rank == 0 and not args.json:
                threads = f"{torch.get_num_threads()} threads each, {args.tokens} tokens a step and process"
                print(f"fp32 on a CPU, {world} processes, {threads}, {args.pairs} pairs")
                head(args.json)
            for ratio in compare(args):
                if comm.rank == 0:
                    show(ratio, args.json)
    except DisagreementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def compare_with_megatron(args: Megatron) -> int:
    """Compares lf with megatron-core's own modules, then its layouts with one process; returns the exit code."""
    work = functools.partial(one_rank, args)
    codes = [work([]) if world == 1 else start_ranks(work, [], world) for world in args.processes]
    return max([*codes, show_layouts(args)])


def show_layouts(args: Megatron) -> int:
    """Measures and prints what each layout costs; returns the exit code."""
    if not args.layouts:
        return 0
    torch.set_num_threads(args.threads or torch.get_num_threads())
    if not args.json:
        print("layouts of two processes (lf) beside one process (peer) with as many threads as both")
    head(args.json)
    try:
        for ratio in compare_layouts(args.layouts, args):
            show(ratio, args.json)
    except DisagreementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
