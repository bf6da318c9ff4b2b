"""Runs everything of lf that an accelerator changes, and says what holds: `python scripts/gpu_check.py`.

It compares an accelerator with golden folders and with the CPU, torch's layers with TransformerEngine's where the
package is there, trains, saves and resumes, and measures speed. One GPU needs less than five minutes. Everything but
TransformerEngine runs with `--device cpu` too.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

# cuBLAS reads it when it starts; only with it are repeated runs equal to the last bit.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import attrs
import numpy as np
import torch
import tyro
from torch import Tensor, nn

import lf
from lf.devices.detect import detect
from lf.devices.device import Device
from lf.models import spec
from lf.models.decoder import Attention, DecoderConfig, Mlp
from lf.models.generate import Sampling, generate
from lf.models.llm.qwen import Qwen3
from lf.models.spec import IGNORE, Batch, Ctx, Layout, ModelConfig, text_batch
from lf.models.toy import Toy
from lf.train.comm import Comm, process_group
from lf.train.state import Engine, TrainState
from lf.train.step import weighted_loss

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "hf"
LIMITS = {"parity": 1e-4, "loss": 1e-5, "gradients": 1e-4, "TF32 parity": 2e-2, "bfloat16 loss": 1e-2}
"""Largest relative difference that passes: fp32 against fp32, TransformerEngine's TF32 against fp32, and bfloat16."""


@attrs.frozen(kw_only=True)
class Size:
    """How much work the checks take."""

    model: DecoderConfig
    """The model of the comparisons."""
    rows: int
    """Rows of a step."""
    length: int
    """Tokens of a row."""
    falls: int
    """Steps of the run whose loss must fall."""
    fast: DecoderConfig
    """The model whose speed is measured."""
    fast_rows: int
    """Rows of a micro-batch when speed is measured; a step has two."""
    fast_length: int
    """Tokens of a row when speed is measured."""


def _model(hidden: int, layers: int, vocab: int, heads: int, width: int, head_dim: int) -> DecoderConfig:
    attention = Attention(heads=heads, kv_heads=heads // 2, head_dim=head_dim, qk_norm=True)
    return Qwen3(
        vocab=vocab, hidden=hidden, layers=layers, attention=attention, mlp=Mlp(width=width), vocab_multiple=64
    )


def _windowed(size: Size) -> DecoderConfig:
    assert isinstance(size.model.attention, Attention)
    attention = attrs.evolve(size.model.attention, window=size.length // 4, window_layers=(0,))
    return attrs.evolve(size.model, attention=attention)


SIZES = {
    "tiny": Size(
        model=_model(32, 2, 61, 4, 64, 16),
        rows=4,
        length=24,
        falls=30,
        fast=_model(32, 2, 61, 4, 64, 16),
        fast_rows=1,
        fast_length=32,
    ),
    "full": Size(
        model=_model(256, 4, 1021, 8, 704, 32),
        rows=8,
        length=256,
        falls=60,
        fast=_model(2048, 8, 32768, 16, 6144, 128),
        fast_rows=4,
        fast_length=4096,
    ),
}


@attrs.frozen(kw_only=True)
class Args:
    """Checks an accelerator. Exit code 0 when everything holds, 1 when something does not, 2 for bad usage."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Golden folders to compare with; none takes those of lf's own tests."""
    device: str = ""
    """Name of the device; empty takes the best one that is there."""
    size: Literal["tiny", "full"] = "full"
    """How much work: `tiny` is for a CPU."""
    only: tuple[str, ...] = ()
    """Words; a check runs when its name has one of them. None runs all."""
    json: bool = False
    """Prints one JSON object instead of a table."""


@attrs.frozen(kw_only=True)
class Check:
    """What one check found."""

    name: str
    """What was checked."""
    ok: bool | None
    """Whether it holds, None where nothing is judged."""
    found: str
    """What was seen, with the limit."""
    seconds: float = 0.0
    """How long it took."""


@attrs.frozen(kw_only=True, eq=False)
class Bench:
    """What the checks share."""

    device: Device
    """The device under test."""
    comm: Comm
    """The exchange of one process."""
    size: Size
    """How much work."""
    folders: tuple[Path, ...]
    """Golden folders."""
    ctx: Ctx
    """The context of the device in fp32, with torch's layers."""
    engine_layers: Any
    """TransformerEngine's layers, None where they are not there."""


Result = tuple[bool | None, str]
"""Whether a check holds, and what was seen."""


def _rows(cfg: DecoderConfig, count: int, length: int, seed: int) -> list[dict[str, Any]]:
    """Returns rows whose next token is a fixed function of the last one, in documents of several lengths."""
    follows = np.random.default_rng(0).permutation(cfg.vocab)
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        cuts = np.sort(rng.choice(np.arange(1, length), size=i % 4, replace=False))
        lengths = tuple(int(n) for n in np.diff([0, *cuts, length]))
        tokens = np.empty(length, np.int64)
        for start, size in zip((0, *cuts), lengths, strict=True):
            token = rng.integers(cfg.vocab)
            for at in range(start, start + size):
                tokens[at] = token
                token = follows[token]
        labels = np.append(tokens[1:], IGNORE)
        labels[np.cumsum(lengths) - 1] = IGNORE
        rows.append({"tokens": tokens, "labels": labels, "lengths": lengths, "real": length, "id": f"{seed}:{i}"})
    return rows


def _micro(rows: Sequence[dict[str, Any]], of: int) -> list[Batch]:
    return [text_batch(rows[i : i + of]) for i in range(0, len(rows), of)]


def _context(device: Device) -> Ctx:
    from lf.models.layers.megatron import TorchProvider
    from lf.parallel.megatron import make_context

    made = make_context(lf.MegatronParallel(), Layout(), device, torch.float32)
    return attrs.evolve(made, layers=TorchProvider())


def _engine(ctx: Ctx, model: ModelConfig, optim: lf.OptimConfig | None = None, dtype: str = "float32") -> Engine:
    """Returns the engine of a run whose data is never opened."""
    run = lf.Run(
        model=model,
        data=lf.TextData(paths=("unused",)),
        optim=optim or lf.AdamW(lr=1e-2, eps=1e-3),
        precision=lf.Precision(params=dtype),  # type: ignore[arg-type]
        steps=1000,
    )
    ctx = attrs.evolve(ctx, dtype=getattr(torch, dtype))
    if ctx.groups is None:
        from lf.train.fsdp_step import torch_engine

        return torch_engine(attrs.evolve(run, parallel=lf.TorchParallel()), model, ctx)
    from lf.train.megatron_step import megatron_engine

    return megatron_engine(run, model, ctx)


def _inside(engine: Engine) -> nn.Module:
    return engine.state.chunks[0].module


def _losses(engine: Engine, micro: Sequence[Batch], steps: int) -> tuple[list[float], TrainState]:
    state, losses = engine.state, []
    for _ in range(steps):
        state, metrics = engine.step(state, micro)
        losses.append(metrics.loss)
    return losses, state


def _recorded(ctx: Ctx, size: Size) -> dict[str, Any]:
    """Returns one loss with every gradient, the losses of three steps on both train paths, and a continuation."""
    from lf.parallel.megatron import placements
    from lf.train.step import to_device

    cfg, where = size.model, ctx.device.torch_type
    engine = _engine(ctx, cfg)
    model = _inside(engine)
    rows = _rows(cfg, size.rows, size.length, seed=1)
    said: dict[str, Any] = {"continuation": list(_continuation(cfg, model, where))}
    batch = to_device(text_batch(rows), where)
    weights = {name: float(weight) for name, weight in spec.loss_weights(cfg, batch).items()}
    terms = spec.loss_terms(cfg, spec.forward(cfg, model, batch), batch)
    loss = weighted_loss(cfg, terms, weights)
    loss.backward()
    said["loss"] = float(loss.detach())
    # megatron-core sums gradients in a buffer of its own.
    said["gradients"] = {p.name: getattr(t, "main_grad").cpu().numpy().copy() for t, p in placements(model, ctx)}  # noqa: B009
    said["steps"] = _losses(engine, _micro(rows, 2), 3)[0]
    toy = attrs.evolve(ctx, groups=None, layers=None)
    said["torch path"] = _losses(_engine(toy, Toy(vocab=cfg.vocab)), _micro(rows, 2), 3)[0]
    return said


def _continuation(cfg: DecoderConfig, model: nn.Module, device: str) -> Iterator[int]:
    return generate(cfg, model, [1, 2, 3], Sampling(tokens=8), eos=None, device=device)


def _on_cpu(size: str) -> dict[str, Any]:
    """Returns the same from the CPU; it runs in a process of its own, where megatron-core stays on the CPU."""
    device = detect("cpu")
    with process_group(device):
        return _recorded(_context(device), SIZES[size])


def _relative(value: Any, reference: Any) -> float:
    """Returns the largest difference over the largest reference; absolute where the reference is below 1e-7."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    scale = float(np.abs(reference).max())
    return float(np.abs(value - reference).max()) / (scale if scale >= 1e-7 else 1.0)


def _within(found: float, limit: str) -> Result:
    return found <= LIMITS[limit], f"{found:.1e}, limit {LIMITS[limit]:.0e}"


def facts(bench: Bench) -> Result:
    """Returns what the device is; not a judgement."""
    device, parts = bench.device, [f"{bench.device.name}, torch {torch.__version__}"]
    if device.torch_type == "cuda":
        card = torch.cuda.get_device_properties(0)
        parts.append(f"{card.name}, compute {card.major}.{card.minor}, CUDA {torch.version.cuda}")
    memory, peak = device.memory().total, device.peak("bfloat16")
    parts.append("" if memory is None else f"{memory / 2**30:.0f} GiB")
    parts.append(f"bf16 peak {peak / 1e12:.0f} TFLOP/s" if peak else "bf16 peak not known")
    if bench.engine_layers is not None:
        from importlib.metadata import version

        parts.append(f"TransformerEngine {version('transformer-engine')}")
    parts.append(", ".join(sorted(device.capabilities)))
    return None, "; ".join(part for part in parts if part)


def collectives(bench: Bench) -> Result:
    """Returns whether the device's collectives and the CPU's beside them run."""
    from torch import distributed as dist

    values = [torch.ones(2, device=bench.device.torch_type), torch.ones(2)]
    for value in values:
        dist.all_reduce(value)
    gathered = bench.comm.gather("object") == ["object"]
    return gathered and all(value.tolist() == [1.0, 1.0] for value in values), dist.get_backend_config()


def parity(bench: Bench, folder: Path, layers: Any, limit: str) -> Result:
    """Returns the largest difference of outputs and gradients from a golden folder."""
    from lf.train.parity import compare

    found = compare(folder, attrs.evolve(bench.ctx, layers=layers))
    values = {**found.outputs, **found.grads}
    missing = [name for name, value in values.items() if value is None]
    if missing or not values:
        return False, f"not produced: {', '.join(missing[:3]) or 'anything'}"
    name = max(values, key=lambda key: values[key] or 0.0)
    ok, text = _within(values[name] or 0.0, limit)
    return bool(ok) and (found.ok or limit != "parity"), f"worst {name}: {text}"


def cpu_equals(bench: Bench, size: str) -> Iterator[tuple[str, Result]]:
    """Gives each comparison of the device with the CPU."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        reference = pool.apply(_on_cpu, (size,))
    found = _recorded(bench.ctx, bench.size)
    yield "loss", _within(_relative(found["loss"], reference["loss"]), "loss")
    grads = {name: _relative(grad, reference["gradients"][name]) for name, grad in found["gradients"].items()}
    if grads.keys() != reference["gradients"].keys():
        yield "gradients", (False, "other names than on the CPU")
    else:
        worst = max(grads, key=lambda name: grads[name])
        ok, text = _within(grads[worst], "gradients")
        yield f"{len(grads)} gradients", (ok, f"worst {worst}: {text}")
    for name in ("steps", "torch path"):
        yield f"losses of three steps, {name}", _within(_relative(found[name], reference[name]), "gradients")
    same = found["continuation"] == reference["continuation"]
    yield (
        "greedy continuation",
        (same, f"{found['continuation']}" + ("" if same else f" and {reference['continuation']}")),
    )


def falls(bench: Bench, layers: Any) -> Result:
    """Returns whether a short run in bfloat16 learns what follows what."""
    engine = _engine(attrs.evolve(bench.ctx, layers=layers), bench.size.model, lf.AdamW(lr=1e-2), "bfloat16")
    micro = _micro(_rows(bench.size.model, bench.size.rows, bench.size.length, seed=2), 2)
    losses, _ = _losses(engine, micro, bench.size.falls)
    return losses[-1] < 0.5 * losses[0], f"{losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps; must halve"


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _state(engine: Engine, state: TrainState) -> dict[tuple[str, int], Tensor]:
    return {(piece.name, piece.start): piece.data.detach().cpu().clone() for piece in engine.pieces(state)}


@_deterministic()
def resume(bench: Bench, layers: Any, dtype: str, noise: float = 0.0) -> Result:
    """Returns whether a run that is saved and resumed goes on as one that was not.

    Losses may differ by `noise`, and by four times what two runs from the same start differ.
    """
    from lf.train.checkpoint import check_all_read, open_latest, save

    micro = _micro(_rows(bench.size.model, bench.size.rows, bench.size.length, seed=3), 2)
    make = partial(_engine, attrs.evolve(bench.ctx, layers=layers), bench.size.model, dtype=dtype)
    engine, again = make(), make()
    whole, repeated = _losses(engine, micro, 6)[0], _losses(again, micro, 6)[0]
    engine = make()
    _, state = _losses(engine, micro, 3)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), state.step, engine.pieces(state), {}, comm=bench.comm)
        saved, fresh = _state(engine, state), make()
        reader = open_latest(Path(folder), comm=bench.comm).reader
        assert reader is not None
        fresh.restore(fresh.state, reader)
        check_all_read(reader, comm=bench.comm)
    read = _state(fresh, fresh.state)
    if saved.keys() != read.keys() or not all(torch.equal(value, read[key]) for key, value in saved.items()):
        return False, "the tensors read back are not those that were saved"
    fresh = attrs.evolve(fresh, state=attrs.evolve(fresh.state, step=reader.step))
    usual, found = _relative(repeated, whole), _relative(_losses(fresh, micro, 3)[0], whole[3:])
    return found <= max(noise, 4 * usual), f"losses differ by {found:.1e}, those of a repeated run by {usual:.1e}"


def export(bench: Bench) -> Result:
    """Returns whether an exported Hugging Face folder holds the weights of the model."""
    from lf.train.start import export as write
    from lf.train.start import load_model, open_start

    engine = _engine(bench.ctx, bench.size.model)
    with tempfile.TemporaryDirectory() as folder:
        write(bench.size.model, engine.weights(engine.state), Path(folder, "hf"), source=None, files={}, write=True)
        read = dict(load_model(open_start(f"{folder}/hf", bench.size.model), bench.ctx).named_parameters())
    held = dict(_inside(engine).named_parameters())
    return all(torch.equal(param, read[name]) for name, param in held.items()), f"{len(held)} tensors"


def names(bench: Bench) -> Result:
    """Returns whether both layer backends have the same tensors by canonical name."""
    from lf.parallel.megatron import placements

    found = []
    for layers in (bench.ctx.layers, bench.engine_layers):
        ctx = attrs.evolve(bench.ctx, layers=layers)
        found.append({p.name: (p.shape, p.parts) for _, p in placements(spec.build_model(bench.size.model, ctx), ctx)})
    other = sorted(found[0].items() ^ found[1].items())
    return not other, f"{len(found[0])} tensors" + (f"; not in both: {other[:2]}" if other else "")


def same_steps(bench: Bench, model: DecoderConfig) -> Result:
    """Returns how far the losses of five steps in bfloat16 are apart between the layer backends."""
    micro = _micro(_rows(model, bench.size.rows, bench.size.length, seed=4), 2)
    losses = [
        _losses(_engine(attrs.evolve(bench.ctx, layers=layers), model, lf.AdamW(lr=1e-3), "bfloat16"), micro, 5)[0]
        for layers in (bench.ctx.layers, bench.engine_layers)
    ]
    return _within(_relative(*losses), "bfloat16 loss")


def speed(bench: Bench, layers: Any) -> Result:
    """Returns the training speed in bfloat16; not a judgement."""
    size, cfg = bench.size, bench.size.fast
    gc.collect()
    if bench.device.torch_type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    engine = _engine(attrs.evolve(bench.ctx, layers=layers), cfg, lf.AdamW(lr=1e-4), "bfloat16")
    micro = _micro(_rows(cfg, 2 * size.fast_rows, size.fast_length, seed=5), size.fast_rows)
    steps = 5
    _, state = _losses(engine, micro, 3)
    bench.device.synchronize()
    start = time.perf_counter()
    _losses(attrs.evolve(engine, state=state), micro, steps)
    bench.device.synchronize()
    seconds = (time.perf_counter() - start) / steps
    rate = spec.flops(cfg, 2 * size.fast_rows, size.fast_length) / seconds
    peak = bench.device.peak("bfloat16")
    used = f"MFU {rate / peak:.1%}" if peak else "MFU n/a"
    tokens = 2 * size.fast_rows * size.fast_length / seconds
    memory = bench.device.memory().peak / 2**30
    return None, f"{tokens:,.0f} tokens/s, {rate / 1e12:.3g} TFLOP/s, {used}, {memory:.1f} GiB at most"


Work = Callable[[], Result | Iterable[tuple[str, Result]]]
"""A check: its result, or several with a name each."""


def _plan(bench: Bench, args: Args) -> Iterator[tuple[str, Work]]:
    """Gives each check under its name."""
    plain, fused = bench.ctx.layers, bench.engine_layers
    yield "device", partial(facts, bench)
    yield "collectives", partial(collectives, bench)
    for folder in bench.folders:
        yield f"parity {folder.name}", partial(parity, bench, folder, plain, "parity")
    yield "equal to the CPU", partial(cpu_equals, bench, args.size)
    for dtype in ("float32", "bfloat16"):
        yield f"resume {dtype}", partial(resume, bench, plain, dtype)
    yield "export", partial(export, bench)
    yield "bfloat16 loss falls", partial(falls, bench, plain)
    yield "speed, torch layers", partial(speed, bench, plain)
    if fused is None:
        return
    yield "TransformerEngine names", partial(names, bench)
    for folder in bench.folders:
        yield f"TransformerEngine parity {folder.name}", partial(parity, bench, folder, fused, "TF32 parity")
    yield "TransformerEngine steps", partial(same_steps, bench, bench.size.model)
    yield "TransformerEngine steps with a window", partial(same_steps, bench, _windowed(bench.size))
    yield "TransformerEngine resume", partial(resume, bench, fused, "bfloat16", noise=1e-3)
    yield "TransformerEngine bfloat16 loss falls", partial(falls, bench, fused)
    yield "speed, TransformerEngine", partial(speed, bench, fused)


def _checks(bench: Bench, args: Args) -> Iterator[Check]:
    """Gives what each check found; one that fails with an error does not end the others."""
    for name, work in _plan(bench, args):
        if args.only and not any(word in name for word in args.only):
            continue
        start = time.perf_counter()
        try:
            made = work()
            for part, (ok, found) in [("", made)] if isinstance(made, tuple) else made:
                yield Check(
                    name=f"{name}: {part}" if part else name, ok=ok, found=found, seconds=time.perf_counter() - start
                )
                start = time.perf_counter()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            yield Check(name=name, ok=False, found=text, seconds=time.perf_counter() - start)


def _bench(args: Args, device: Device, comm: Comm) -> Bench:
    from lf.models.layers.megatron import TorchProvider, provider

    fused = provider(device, torch.bfloat16)
    return Bench(
        device=device,
        comm=comm,
        size=SIZES[args.size],
        folders=args.folders or tuple(sorted(path for path in GOLDEN.iterdir() if path.is_dir())),
        ctx=_context(device),
        engine_layers=None if isinstance(fused, TorchProvider) else fused,
    )


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    args = tyro.cli(Args, args=argv, prog="gpu_check.py")
    try:
        device = detect(args.device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("highest")
    done: list[Check] = []
    with process_group(device) as comm:
        for check in _checks(_bench(args, device, comm), args):
            done.append(check)
            if not args.json:
                word = {True: "ok", False: "FAILED", None: "-"}[check.ok]
                print(f"{word:<7} {check.seconds:6.1f} s  {check.name:<40} {check.found}", flush=True)
    if not done:
        print(f"error: no check has a name with one of {', '.join(args.only)}", file=sys.stderr)
        return 2
    ok = all(check.ok is not False for check in done)
    if args.json:
        print(json.dumps({"device": device.name, "checks": [attrs.asdict(check) for check in done], "ok": ok}))
    else:
        print("everything holds" if ok else "not everything holds")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
