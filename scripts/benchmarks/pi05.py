"""lf's Pi0.5 beside a plain one: training steps and samples, on rows that fill the model and on those of a robot."""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import torch
from torch import Tensor

import lf
from lf.devices.detect import detect
from lf.devices.device import Device
from lf.models import spec, weights
from lf.models.embodied import robot
from lf.models.embodied.pi05 import pi05_base
from lf.models.embodied.pi05_model import Pi05
from lf.models.layers.gemma import Gemma
from lf.models.spec import Batch, Ctx
from lf.models.vision.siglip import Siglip
from lf.train.comm import process_group
from lf.train.fsdp_step import torch_engine
from lf.train.optim import make_optimizer, param_groups
from lf.train.state import Published, initial_value
from lf.train.step import to_device
from scripts.benchmarks.pi05_plain import PlainPi05
from scripts.benchmarks.ratios import DisagreementError, Ratio, Step, measure, summarise

SIZES: dict[str, Pi05] = {
    "small": Pi05(
        vision=Siglip(width=192, depth=4, mlp=768, heads=4, image=112),
        vlm=Gemma(width=320, depth=4, mlp=2560, head_dim=40),
        expert=Gemma(width=160, depth=4, mlp=640, head_dim=40),
        vocab=8192,
        prompt=50,
    ),
    "middle": Pi05(
        vision=Siglip(width=576, depth=12, mlp=2304, heads=8, image=224),
        vlm=Gemma(width=1024, depth=9, mlp=8192, head_dim=128),
        expert=Gemma(width=512, depth=9, mlp=2048, head_dim=128),
    ),
    "base": pi05_base,
}
"""Models, all in the proportions of the published one, which `base` is."""

Kind = Literal["full", "robot"]


@attrs.frozen(kw_only=True)
class Pi05Bench:
    """Trains and samples equal Pi0.5 models in lf and in plain torch, in turn, and compares their speed.

    The peer has the structure of openpi's PyTorch model, with SDPA, a dense mask and fused AdamW, and passes the same
    parity tests. Both sides have the same weights, rows, draws, dtype and clipping. Exit code 1 when they disagree
    about the first step or the first sample.
    """

    size: Literal["small", "middle", "base"] = "small"
    """Which model; `base` is the published one."""
    rows: int = 2
    """Rows of a training step; a sample is for one."""
    kinds: tuple[Kind, ...] = ("full", "robot")
    """Rows: `full` have all cameras and the longest prompt, `robot` two of the three cameras and a prompt of a quarter
    to a third of the longest, about that of LIBERO."""
    pairs: int = 5
    """Timed pairs of steps, and of samples."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the models compute in; main weights are float32."""
    device: str = "cpu"
    """Device, by the name that lf has for it."""
    threads: int = 0
    """Threads of torch; 0 leaves torch's own choice."""
    json: bool = False
    """Print a JSON line a case in place of the table."""


def made_rows(cfg: Pi05, kind: Kind, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns random rows; those of a robot lack the last camera, and have short prompts of different lengths."""
    rng = np.random.default_rng(seed)
    rows = robot.fake_rows(cfg.space, count, seed)
    images = {name: rng.integers(0, 256, (3, cfg.vision.image, cfg.vision.image), np.uint8) for name in cfg.cameras}
    for row in rows:
        words = cfg.prompt if kind == "full" else int(rng.integers(cfg.prompt // 4, cfg.prompt // 3 + 1))
        row["prompt"] = rng.integers(0, cfg.vocab, words)
        row["images"] = dict(list(images.items())[: None if kind == "full" else -1])
    return rows


def first_weights(cfg: Pi05) -> dict[str, Tensor]:
    """Returns weights by canonical name. They are random in all layers: the expert's would do nothing at first."""
    model = spec.build_model(cfg, Ctx(device=detect("cpu"), meta=True))
    gen, made = torch.Generator().manual_seed(0), {}
    for name, param in model.named_parameters():
        like = torch.empty(param.shape)
        drawn = initial_value(cfg, 0, weights.whole(name, tuple(param.shape)), like, None)
        made[name] = drawn + 0.02 * torch.randn(param.shape, generator=gen)
    return made


def bench_run(args: Pi05Bench, cfg: Pi05) -> lf.Run:
    """Returns the run whose step is measured."""
    return lf.Run(
        model=cfg,
        data=lf.TextData(paths=("unused",)),
        batch=args.rows,
        parallel=lf.TorchParallel(micro_batch=args.rows),
        precision=lf.Precision(params=args.dtype),
    )


def lf_model(run: lf.Run, cfg: Pi05, device: Device, first: Mapping[str, Tensor]) -> tuple[Step, torch.nn.Module]:
    """Returns lf's step, and the module that it trains; torch.distributed must be up."""
    published = Published(
        check=lambda shapes, compare: None,
        read=lambda placed: first[placed.name],
        differing=lambda placed, value, share: [],
    )
    ctx = Ctx(device=device, dtype=getattr(torch, run.precision.params))
    engine = torch_engine(run, cfg, ctx, published)
    state = engine.state

    def step(batch: Batch) -> tuple[float, float]:
        nonlocal state
        state, metrics = engine.step(state, [batch["lf"]])
        return metrics.loss, metrics.grad_norm

    (module,) = engine.state.chunks
    return step, module


def plain_model(run: lf.Run, cfg: Pi05, device: Device, first: Mapping[str, Tensor]) -> tuple[Step, PlainPi05]:
    """Returns a plain training step with the same weights, and the module that it trains."""
    with torch.device("meta"):
        model = PlainPi05(cfg)
    theirs = dict(model.named_parameters())
    dtype = getattr(torch, run.precision.params)
    # The published dtypes: those that lf's model has, under their own names.
    wide = spec.build_model(cfg, Ctx(device=device, meta=True, dtype=dtype))
    table = spec.weight_map(cfg)
    dtypes = {name: t.dtype for name, t in weights.export(table, dict(wide.named_parameters()).__getitem__)}
    stored = {name: t.to(dtypes[name]) for name, t in weights.export(table, first.__getitem__) if name in theirs}
    model.load_state_dict(stored, assign=True)
    model.to(device.torch_type)
    params = dict(model.named_parameters())
    main = {
        name: param if param.dtype == torch.float32 else torch.nn.Parameter(param.detach().float())
        for name, param in params.items()
    }
    narrow = [name for name, param in params.items() if main[name] is not param]
    optimizer = make_optimizer(run.optim, param_groups(main.items(), run.optim))
    number = 0

    def step(batch: Batch) -> tuple[float, float]:
        nonlocal number
        number += 1
        drawn = to_device(spec.draw(cfg, batch["plain"], run.seed, number), device.torch_type)
        time = drawn["time"][:, None, None]
        velocity = model(drawn, time * drawn["noise"] + (1.0 - time) * drawn["actions"], drawn["time"])
        loss = (drawn["noise"] - drawn["actions"] - velocity).square().mean()
        loss.backward()
        for name in narrow:
            grad, params[name].grad = params[name].grad, None
            main[name].grad = None if grad is None else grad.float()
        norm = torch.nn.utils.clip_grad_norm_(main.values(), run.optim.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name in narrow:
                params[name].copy_(main[name])
        return float(loss.detach()), float(norm)

    return step, model


def samplers(cfg: Pi05, ours: torch.nn.Module, plain: PlainPi05, device: Device) -> tuple[Step, Step]:
    """Returns what samples the first row of a batch on either side; it gives the size of the actions, twice."""

    def moved(batch: Batch) -> Batch:
        return to_device(spec.draw(cfg, batch, 0, 0), device.torch_type)

    def own(batch: Batch) -> tuple[float, float]:
        with torch.no_grad():
            actions = spec.sample(cfg, ours, moved(batch["lf"]))
        return float(actions.norm()), float(actions.abs().sum())

    def other(batch: Batch) -> tuple[float, float]:
        drawn = moved(batch["plain"])
        actions = plain.sample(drawn, drawn["noise"])
        return float(actions.norm()), float(actions.abs().sum())

    return own, other


def batches(cfg: Pi05, kind: Kind, rows: int, count: int) -> list[Batch]:
    """Returns batches of the same rows, as lf takes them and padded as openpi has them."""
    made = [made_rows(cfg, kind, rows, seed) for seed in range(count)]
    return [{"lf": spec.collate(cfg, one, one[0]), "plain": robot.robot_batch(cfg.space, one)} for one in made]


def compare(args: Pi05Bench) -> Iterator[Ratio]:
    """Gives the ratio of each case as it is measured; torch.distributed must be up, with one process."""
    device = detect(args.device)
    # openpi's loss counts every step and dim, and its samples move all of them.
    cfg = attrs.evolve(SIZES[args.size], counted="openpi")
    run, first = bench_run(args, cfg), first_weights(cfg)
    limits = (1e-5, 1e-4) if args.dtype == "float32" else (2e-2, 5e-2)
    for kind in args.kinds:
        step, module = lf_model(run, cfg, device, first)
        plain_step, plain = plain_model(run, cfg, device, first)
        own, other = samplers(cfg, module, plain, device)
        for name, ours, theirs, rows in (
            ("sample", own, other, 1),
            ("train", step, plain_step, args.rows),
        ):
            pairs = measure(ours, theirs, batches(cfg, kind, rows, 1 + args.pairs), f"{name} {kind}", limits)
            yield summarise(pairs, f"{name} {kind}", 1, rows)


def line(cells: Sequence[object]) -> str:
    """Returns a line of the table."""
    return f"{cells[0]!s:14}" + "".join(f"{cell!s:>12}" for cell in cells[1:])


def compare_pi05(args: Pi05Bench) -> int:
    """Measures, prints, and returns the exit code."""
    if args.threads:
        torch.set_num_threads(args.threads)
    if not args.json:
        print(
            f"{args.size} Pi0.5 in {args.dtype} on {args.device}, threads {torch.get_num_threads()}, {args.pairs} pairs"
        )
        print(line(("case", "rows", "lf ms", "plain ms", "ratio", "min-max", "cpu ratio")))
    ratios = []
    try:
        with process_group(detect(args.device)):
            for found in compare(args):
                ratios.append(found.ratio)
                times = (f"{1e3 * found.rows / speed:.0f}" for speed in (found.ours, found.peer))
                row = (found.model, found.rows, *times, f"{found.ratio:.2f}", f"{found.low:.2f}-{found.high:.2f}")
                told = json.dumps(attrs.asdict(found)) if args.json else line((*row, f"{found.cpu_ratio:.2f}"))
                print(told, flush=True)
    except DisagreementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not args.json and ratios:
        print(f"median of the cases {statistics.median(ratios):.2f}")
    return 0
