"""lf's diffusion transformers beside a plain loop of diffusers' own, packed rows beside padded ones, and context
parallel processes beside one."""

import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import attrs
import numpy as np
import torch
from torch import Tensor, nn

import lf
from lf.devices.cpu import cpu
from lf.models import spec, weights
from lf.models.diffusion.flow import noisy
from lf.models.diffusion.latent import LatentModel, fake_rows, latents_of
from lf.models.diffusion.packed import patchify
from lf.models.diffusion.qwen_image import QwenImage
from lf.models.diffusion.wan import Wan
from lf.models.spec import Batch, Ctx
from lf.train.comm import process_group
from lf.train.fsdp_step import torch_engine
from lf.train.optim import make_optimizer, param_groups
from lf.train.state import Published, initial_value
from lf.train.step import to_device
from scripts.benchmarks.layouts import measure_run, ranks
from scripts.benchmarks.pi05 import line
from scripts.benchmarks.ratios import DisagreementError, Ratio, Step, measure, summarise, timed

Kind = Literal["wan", "qwen_image"]


@attrs.frozen(kw_only=True)
class DiffusionBench:
    """Trains equal models in lf and in a plain loop of diffusers' modules, in turn, and compares their speed.

    Both sides have the same weights, rows of one size, draws, fp32, SDPA, fused AdamW and clipping. Then lf trains on
    rows of mixed sizes, packed, in turn with the same rows filled up to the largest one, and in two processes that
    share their sequence, in turn with one. Exit code 1 when both sides disagree about the first step.
    """

    kinds: tuple[Kind, ...] = ("wan", "qwen_image")
    """Families."""
    layers: int = 4
    """Blocks."""
    heads: int = 6
    """Heads, each 64 wide."""
    size: tuple[int, int, int] = (3, 16, 16)
    """Patches of a row along frames, rows and columns; Qwen-Image has one frame of as many tokens."""
    rows: int = 2
    """Rows of a step."""
    text: int = 64
    """Embeddings of a caption."""
    cp: tuple[Literal["gather", "ulysses"], ...] = ("gather", "ulysses")
    """Ways of context parallel attention that two processes are measured with, beside one; empty leaves them out."""
    pairs: int = 5
    """Timed pairs of steps."""
    threads: int = 0
    """Threads of torch; 0 leaves torch's own choice."""
    json: bool = False
    """Print a JSON line a case in place of the table."""


def model_of(kind: Kind, args: DiffusionBench) -> LatentModel:
    """Returns the model that is measured."""
    sizes: dict[str, Any] = {"layers": args.layers, "heads": args.heads, "head_dim": 64, "text": args.text}
    if kind == "wan":
        return Wan(**sizes, mlp=args.heads * 256, text_dim=512)
    return QwenImage(**sizes, text_dim=512, axes=(16, 24, 24))


def rows_of(cfg: LatentModel, grids: list[tuple[int, int, int]], seed: int) -> list[dict[str, Any]]:
    """Returns random rows of these many patches, with captions of full length."""
    rng, patch = np.random.default_rng(seed), cfg.space.patch
    made = fake_rows(cfg.space, len(grids), seed, tokens=1)
    for row, grid in zip(made, grids, strict=True):
        size = (cfg.space.channels, *(n * p for n, p in zip(grid, patch, strict=True)))
        row["latents"] = torch.from_numpy(rng.standard_normal(size).astype(np.float32))
    return made


def grid_of(kind: Kind, args: DiffusionBench) -> tuple[int, int, int]:
    """Returns the patches of a row."""
    frames, rows, columns = args.size
    return (frames, rows, columns) if kind == "wan" else (1, rows * frames, columns)


def mixed(kind: Kind, args: DiffusionBench) -> list[tuple[int, int, int]]:
    """Returns the patches of rows of four sizes, as buckets have them: the largest, wide, high and short."""
    f, y, x = grid_of(kind, args)
    return [(f, y, x), (f, max(1, y // 2), x), (f, y, max(1, x // 2)), (max(1, f // 3), max(1, y // 2), x)]


def bench_run(cfg: LatentModel, rows: int) -> lf.Run:
    """Returns the run whose step is measured."""
    data = lf.TextData(paths=("unused",))
    return lf.Run(model=cfg, data=data, batch=rows, parallel=lf.TorchParallel(micro_batch=rows))


def first_weights(cfg: LatentModel) -> dict[str, Tensor]:
    """Returns weights by canonical name, random in all layers: the last would say nothing at first."""
    model = spec.build_model(cfg, Ctx(device=cpu, meta=True))
    gen, made = torch.Generator().manual_seed(0), {}
    for name, param in model.named_parameters():
        like = torch.empty(param.shape)
        drawn = initial_value(cfg, 0, weights.whole(name, tuple(param.shape)), like, None)
        made[name] = drawn + 0.02 * torch.randn(param.shape, generator=gen)
    return made


def lf_side(run: lf.Run, cfg: LatentModel, first: Mapping[str, Tensor]) -> Step:
    """Returns lf's step; torch.distributed must be up."""
    published = Published(
        check=lambda shapes, compare: None,
        read=lambda placed: first[placed.name],
        differing=lambda placed, value, share: [],
    )
    engine = torch_engine(run, cfg, Ctx(device=cpu), published)
    state = engine.state

    def step(batch: Batch) -> tuple[float, float]:
        nonlocal state
        state, metrics = engine.step(state, [batch])
        return metrics.loss, metrics.grad_norm

    return step


def diffusers_side(run: lf.Run, cfg: LatentModel, first: Mapping[str, Tensor]) -> Step:
    """Returns a plain training step of diffusers' model, on batches of rows of one size."""
    import diffusers

    config = spec.hf_config(cfg)
    model = getattr(diffusers, config["_class_name"]).from_config(config)
    model.load_state_dict(dict(weights.export(spec.weight_map(cfg), first.__getitem__)))
    model.train()
    optimizer = make_optimizer(run.optim, param_groups(model.named_parameters(), run.optim))
    number = 0

    def step(batch: Batch) -> tuple[float, float]:
        nonlocal number
        number += 1
        drawn = to_device(spec.draw(cfg, batch, run.seed, number), "cpu")
        error = drawn["noise"] - drawn["latents"] - velocity(cfg, model, drawn)
        loss = error.square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.optim.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()), float(norm)

    return step


def velocity(cfg: LatentModel, model: nn.Module, drawn: Batch) -> Tensor:
    """Returns what diffusers' model says of noisy tokens of rows of one size, as tokens."""
    rows, packing = len(drawn["ids"]), drawn["packing"]
    x = noisy(drawn["latents"], drawn["noise"], drawn["sigma"])
    text = drawn["text"].unflatten(0, (rows, -1))
    if isinstance(cfg, Wan):
        latents = torch.stack(latents_of(cfg.space, packing, x))
        made = model(latents, drawn["time"] * 1000.0, text, return_dict=False)[0]
        return cfg_tokens(cfg, made)
    out = model(
        hidden_states=x.unflatten(0, (rows, -1)),
        encoder_hidden_states=text,
        encoder_hidden_states_mask=torch.ones(text.shape[:2], dtype=torch.bool),
        timestep=drawn["time"],
        img_shapes=[[tuple(grids[0])] for grids in packing.grids],
        return_dict=False,
    )[0]
    return cast(Tensor, out).flatten(0, 1)


def cfg_tokens(cfg: LatentModel, latents: Tensor) -> Tensor:
    """Returns latents [B, C, F, Y, X] as tokens."""
    return torch.cat([patchify(one, cfg.space.patch, cfg.space.channels_first) for one in latents])


def compare(args: DiffusionBench) -> Iterator[tuple[Ratio, float]]:
    """Gives the ratio of each case, and what packing could save at best; torch.distributed must be up."""
    for kind in args.kinds:
        cfg = model_of(kind, args)
        first, grid = first_weights(cfg), grid_of(kind, args)
        run = bench_run(cfg, args.rows)
        made = [rows_of(cfg, [grid] * args.rows, seed) for seed in range(1 + args.pairs)]
        batches = [spec.collate(cfg, rows, rows[0]) for rows in made]
        case = f"{kind} diffusers"
        pairs = measure(lf_side(run, cfg, first), diffusers_side(run, cfg, first), batches, case)
        yield summarise(pairs, case, math.prod(grid), args.rows), 0.0
        yield packed(kind, cfg, first, args)


def packed(kind: Kind, cfg: LatentModel, first: Mapping[str, Tensor], args: DiffusionBench) -> tuple[Ratio, float]:
    """Returns how much faster rows of mixed sizes are packed than filled up, and the share of the tokens that fill."""
    grids = mixed(kind, args)
    step = lf_side(bench_run(cfg, len(grids)), cfg, first)
    times: list[tuple[tuple[float, float], ...]] = []
    for seed in range(1 + args.pairs):
        sides = [rows_of(cfg, sizes, seed) for sizes in (grids, grids[:1] * len(grids))]
        ours, theirs = (spec.collate(cfg, rows, rows[0]) for rows in sides)
        times.append((timed(step, ours), timed(step, theirs)))
    tokens, full = sum(map(math.prod, grids)), len(grids) * math.prod(grids[0])
    return summarise(times[1:], f"{kind} padded", tokens // len(grids), len(grids)), 1.0 - tokens / full


def compare_shared(args: DiffusionBench) -> Iterator[Ratio]:
    """Gives how fast two processes that share the sequence of mixed rows are beside one that has it all."""
    if not args.cp:
        return
    with ranks(2, max(1, torch.get_num_threads() // 2)) as pipes:
        for kind in args.kinds:
            cfg, grids = model_of(kind, args), mixed(kind, args)

            def micro_of(seed: int, cfg: LatentModel = cfg, grids: list[tuple[int, int, int]] = grids) -> list[Batch]:
                rows = rows_of(cfg, grids, seed)
                return [spec.collate(cfg, rows, rows[0])]

            for how in args.cp:
                parallel = lf.MegatronParallel(cp=2, cp_kind=how, micro_batch=len(grids))
                run = attrs.evolve(bench_run(cfg, len(grids)), parallel=parallel)
                tokens = sum(map(math.prod, grids)) // len(grids)
                yield measure_run(run, f"{kind} cp2 {how}", tokens, micro_of, args.pairs, pipes)


def show(args: DiffusionBench, found: Ratio, padding: float) -> None:
    """Prints a case."""
    if args.json:
        print(json.dumps({**attrs.asdict(found), "padding": padding}), flush=True)
        return
    times = (f"{1e3 * found.rows * found.length / speed:.0f}" for speed in (found.ours, found.peer))
    told = (f"{found.ratio:.2f}", f"{found.low:.2f}-{found.high:.2f}", f"{found.cpu_ratio:.2f}")
    print(line((f"{found.model:22}", found.length, found.rows, *times, *told, f"{padding:.0%}")), flush=True)


def compare_diffusion(args: DiffusionBench) -> int:
    """Measures, prints, and returns the exit code."""
    if args.threads:
        torch.set_num_threads(args.threads)
    if not args.json:
        print(f"fp32 on a CPU, threads {torch.get_num_threads()}, {args.pairs} pairs")
        print(line(("case", "  tokens", "rows", "lf ms", "other ms", "ratio", "min-max", "cpu ratio", "padding")))
    ratios = []
    try:
        with process_group(cpu):
            for found, padding in compare(args):
                show(args, found, padding)
                ratios.append(found.ratio)
            if not args.json and ratios:
                print(f"median of the cases {statistics.median(ratios):.2f}", flush=True)
            for found in compare_shared(args):
                show(args, found, 0.0)
    except DisagreementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
