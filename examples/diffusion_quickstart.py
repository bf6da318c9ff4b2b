"""A small Wan learns to make clips of moving shapes that do what their captions say.

The clips are rendered from a seed, and their pixels are the latents. `python examples/diffusion_quickstart.py` trains
and, before and after, makes a clip for every caption, measures whether colour, shape and direction are those asked for,
and draws `before.png` and `after.png` in its run folder. `scripts/train.py --cfg examples/diffusion_quickstart.py`
trains alone.

Hardware: a CPU with 2 cores. Time: about 4 minutes. Result: clips agree with their captions in 82 % of colours, shapes
and directions together (100, 88 and 58 %), from 44 % before; more steps go on from there.

Shapes: F frames, S pixels of a side, L words.
"""

import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import tyro
from numpy.typing import NDArray

import lf
from lf import config
from lf.data.source import DataCtx, Row, open_data
from lf.models.diffusion.flow import ConstantShift, Flow, Sampling
from lf.models.diffusion.latent import latent_batch, with_draws
from lf.models.diffusion.wan import Wan
from lf.models.spec import sample

FRAMES, SIDE, DIM = 3, 12, 32
COLOURS = {"red": (1, -1, -1), "green": (-1, 1, -1), "blue": (-1, -1, 1)}
SHAPES = ("square", "cross")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
CAPTIONS = tuple((c, s, d) for c in COLOURS for s in SHAPES for d in DIRECTIONS)
Pixels = NDArray[np.float32]


def shape_mask(shape: str, y: float, x: float) -> NDArray[np.bool_]:
    """Returns the pixels [S, S] of a shape around a place."""
    at = np.arange(SIDE)
    dy, dx = np.abs(at - y)[:, None], np.abs(at - x)[None]
    if shape == "square":
        return (dy < 2.6) & (dx < 2.6)
    return ((dy < 0.9) & (dx < 2.6)) | ((dy < 2.6) & (dx < 0.9))


def clip_of(caption: tuple[str, str, str], start: tuple[float, float]) -> Pixels:
    """Returns a clip [3, F, S, S] of values from -1 to 1: a shape on black that moves three pixels a frame."""
    colour, shape, direction = caption
    step = 3.0 * np.array(DIRECTIONS[direction])
    clip = np.full((3, FRAMES, SIDE, SIDE), -1.0, np.float32)
    for frame in range(FRAMES):
        y, x = np.array(start) + step * (frame - (FRAMES - 1) / 2)
        clip[:, frame, shape_mask(shape, y, x)] = np.array(COLOURS[colour], np.float32)[:, None]
    return clip


def words(*caption: str) -> torch.Tensor:
    """Returns an embedding [L, D] for each word, which its letters alone decide."""
    made = [np.random.default_rng(list(word.encode())).standard_normal(DIM) for word in caption]
    return torch.from_numpy(np.stack(made).astype(np.float32))


@attrs.frozen(kw_only=True)
class Clips(lf.DataConfig):
    """Clips of moving shapes."""

    rows: int = 4096
    """Clips of an epoch."""
    first: int = 0
    """Number of the first one: others are other clips."""


@attrs.frozen(kw_only=True, eq=False)
class ClipRows:
    """Clips by number."""

    cfg: Clips
    seed: int

    def __len__(self) -> int:
        return self.cfg.rows

    def row(self, epoch: int, index: int) -> Row:
        """Returns the clip of a number, whatever the epoch; captions follow each other."""
        number = self.cfg.first + index
        rng = np.random.default_rng((self.seed, number))
        caption = CAPTIONS[int(rng.integers(len(CAPTIONS)))]
        middle = (SIDE - 1) / 2
        clip = clip_of(caption, (middle + rng.uniform(-0.5, 0.5), middle + rng.uniform(-0.5, 0.5)))
        text = {"text": words(*caption), "empty": words("nothing"), "caption": " ".join(caption)}
        return {"latents": torch.from_numpy(clip), **text, "id": f"clip:{number}"}

    def describe(self) -> dict[str, int]:
        """Returns the facts that the model is held to."""
        return {"rows": self.cfg.rows, "first": self.cfg.first, "channels": 3, "text_dim": DIM, "text_length": 3}


@open_data.register
def _(cfg: Clips, ctx: DataCtx) -> ClipRows:
    return ClipRows(cfg=cfg, seed=ctx.seed)


def judge(clip: Pixels, caption: tuple[str, str, str]) -> tuple[bool, bool, bool]:
    """Returns whether colour, shape and direction of a clip [3, F, S, S] are those of a caption.

    The colour is the nearest of the pixels that are lit; the direction is that of their middle, from the first frame
    to the last; the shape is the one whose pixels, at the best place, agree most with a frame's.
    """
    lit = clip.max(0) > 0
    if not lit.any(axis=(1, 2)).all():
        return False, False, False
    mean = np.stack([clip[channel][lit].mean() for channel in range(3)])
    colour = min(COLOURS, key=lambda name: float(np.square(mean - COLOURS[name]).sum()))
    middles = np.stack([np.argwhere(frame).mean(0) for frame in lit])
    moved = middles[-1] - middles[0]
    direction = max(DIRECTIONS, key=lambda name: float(moved @ np.array(DIRECTIONS[name])))

    def agreement(shape: str) -> float:
        """Returns the best overlap of a shape with a frame, over places around the middle, on average of the frames."""
        total = 0.0
        for frame, (y, x) in zip(lit, middles, strict=True):
            near = [shape_mask(shape, y + i / 2, x + j / 2) for i in (-1, 0, 1) for j in (-1, 0, 1)]
            total += max(float((frame & mask).sum() / (frame | mask).sum()) for mask in near)
        return total

    return colour == caption[0], max(SHAPES, key=agreement) == caption[1], direction == caption[2]


def make_clips(cfg: Wan, model: torch.nn.Module, seed: int = 1) -> list[Pixels]:
    """Returns a clip of the model for every caption."""
    size = (3, FRAMES, SIDE, SIDE)
    rows = [
        {"latents": torch.zeros(size), "text": words(*c), "empty": words("nothing"), "id": " ".join(c)}
        for c in CAPTIONS
    ]
    batch = with_draws(cfg.space, Flow(), latent_batch(cfg.space, rows), seed, 0)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        made = sample(cfg, model, batch)
    model.train(was_training)
    return [latent.numpy().clip(-1, 1) for latent in made]


def quality(clips: list[Pixels]) -> tuple[float, float, float]:
    """Returns the parts of the clips whose colour, shape and direction agree with their captions."""
    found = np.array([judge(clip, caption) for clip, caption in zip(clips, CAPTIONS, strict=True)])
    colour, shape, direction = found.mean(0).tolist()
    return colour, shape, direction


def draw_sheet(clips: list[Pixels], path: Path) -> None:
    """Writes the frames of all clips, a row for each caption in two columns, as a PNG."""
    from PIL import Image

    framed = [np.pad(clip, ((0, 0), (0, 0), (1, 1), (1, 1))) for clip in clips]
    strips = [clip.transpose(2, 1, 3, 0).reshape(SIDE + 2, -1, 3) for clip in framed]
    half = len(strips) // 2
    columns = [np.concatenate(strips[:half]), np.concatenate(strips[half:])]
    sheet = ((np.concatenate(columns, axis=1) + 1) * 127.5).round().astype(np.uint8)
    image = Image.fromarray(sheet)
    image.resize((image.width * 3, image.height * 3), Image.Resampling.NEAREST).save(path)


MODEL = Wan(
    layers=4,
    heads=4,
    head_dim=24,
    mlp=288,
    in_channels=3,
    out_channels=3,
    patch=(1, 4, 4),
    text=3,
    text_dim=DIM,
    padding="masked",
    sinusoids=64,
    flow=Flow(shift=ConstantShift(factor=3.0), caption_dropout=0.1),
    sampling=Sampling(steps=20, guidance=1.5, shift=ConstantShift(factor=3.0)),
)

cfg = lf.Run(
    model=MODEL,
    data=Clips(),
    batch=32,
    optim=lf.AdamW(lr=3e-3, weight_decay=0.0, schedule=lf.Cosine(warmup=40, final=0.02)),
    parallel=lf.TorchParallel(micro_batch=32),
    precision=lf.Precision(),
    steps=900,
    eval=lf.Eval(data=Clips(rows=64, first=1_000_000), every=300, batches=2),
    log=lf.Log(every=50),
    save=lf.Save(every=450),
)

smoke = attrs.evolve(
    cfg,
    model=attrs.evolve(MODEL, layers=2, heads=2, mlp=96, sampling=Sampling(steps=4, guidance=1.0)),
    batch=8,
    optim=lf.AdamW(lr=5e-3, schedule=lf.Cosine(warmup=5)),
    parallel=lf.TorchParallel(micro_batch=8),
    steps=20,
    eval=lf.Eval(data=Clips(rows=16, first=1_000_000), every=10, batches=2),
    log=lf.Log(every=10),
    save=lf.Save(every=20),
)


def main(run: lf.Run, out: Path) -> tuple[float, float]:
    """Trains, and returns the part of what captions ask that clips have, before and after."""
    from lf.devices.cpu import cpu
    from lf.terminal import say
    from lf.train import comm, loop, summary
    from lf.train import run as runs
    from lf.train.start import load_model, local_context, open_saved, open_start

    model = run.model
    assert isinstance(model, Wan)
    found: list[float] = []

    def show(name: str, module: torch.nn.Module) -> None:
        clips = make_clips(model, module)
        parts = quality(clips)
        draw_sheet(clips, out / f"{name}.png")
        found.append(sum(parts) / 3)
        told = "colour {:.0%}, shape {:.0%}, direction {:.0%}".format(*parts)
        sheet = out / f"{name}.png"
        print(f"{name} training, clips agree with their captions: {found[-1]:.0%} ({told}); {sheet}", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    first = load_model(open_start("", model), local_context(model, cpu), run.seed)
    with comm.process_group(cpu) as group:
        job = runs.open_job(run, out, config.loaded_files(), cpu, group, say)
        show("before", first)
        summary.close(job, loop.train(job))
    show("after", load_model(open_saved(out), local_context(model, cpu)))
    return found[0], found[1]


@attrs.frozen(kw_only=True)
class Args:
    """Trains a small Wan on clips of moving shapes, and measures its clips against their captions."""

    out: Path = Path("runs/diffusion_quickstart")
    """Run folder."""
    variant: str = "cfg"
    """Name of the config in this file."""


if __name__ == "__main__":
    given = tyro.cli(Args)
    # Loaded as a config file is, so that what is saved names this file's classes.
    wanted: Any = config.load(Path(__file__), given.variant)
    sys.modules[Path(__file__).stem].main(wanted, given.out)
