"""What models of latents share: rows of cached latents as a packed batch, draws by sample, the loss, and Euler samples.

A row of data, whatever its size, has

    latents      [C, F, Y, X], fp32 or bf16: what is to be made, normalised with the mean and std of the VAE's config
    text         [L, D], fp32 or bf16: the caption as the text encoder gives it
    text_length  how many of the L embeddings are no padding; left out, all of them
    empty        [E, D]: the empty caption, beside the row's references where a caption is; needed to drop captions and
                 for guidance
    condition    [Cc, F, Y, X]: channels beside the latents (Wan I2V: mask and first frame), where the model has some
    image        [I, Di]: embeddings of the first frame (Wan2.1 I2V), where the model has some
    given        how many frames of the latents are given, clean and not trained (Wan2.2 TI2V: 1 for I2V); left out, 0
    references   list of [C, F, Y, X]: pictures that the sample is made from, in order (Qwen-Image-Edit)
    caption      id of the caption, for reports; no number depends on it
    id           the sample's id

and a batch packs them without padding: `latents` [T, P*C] with the tokens of every latent and reference, `noised` [T]
(which of them the loss is about), `text` [K, D], `condition`, `image` and `empty` where there are some (with the
lengths `empties`), the `packing` that says where samples begin, `clean` (which runs of tokens have time 0), `real`
(which samples count), `samples` (how many do), `ids`, and `count`, its tokens. `draw` adds `noise` [T, P*C], `sigma`
[T, 1] (each token's share of noise), `time` [R] (each run's) and `weight` [T], and gives the samples whose captions are
dropped the empty one.

Shapes: T tokens, P patch size, C channels, F frames, Y rows, X columns, K text tokens, R runs of tokens of one time.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from attrs.validators import ge, gt
from torch import Tensor, nn

from lf.models import spec
from lf.models.diffusion.flow import Flow, Sampling, noisy, schedule, time_of, weight_of
from lf.models.diffusion.packed import Grid, Packing, grid_of, patchify, unpatchify
from lf.models.initialise import seed_of

_LEAST_NORM = 1e-12


@attrs.frozen(kw_only=True)
class Space:
    """What goes into a model of latents."""

    channels: int
    """Channels of a latent."""
    patch: Grid
    """Size of a patch along frames, rows and columns."""
    channels_first: bool
    """Whether the channels come first within a patch."""
    text_dim: int
    """Width of a text embedding."""
    text: int
    """Most text embeddings of a sample."""
    pad_text: bool = False
    """Whether texts are filled up to `text` with zeros that the model sees."""
    condition: int = 0
    """Channels beside the latent."""
    image_dim: int = 0
    """Width of an image embedding; 0 where the model reads none."""
    given: bool = False
    """Whether frames may be given."""
    references: bool = False
    """Whether pictures may be given."""
    clean_references: bool = False
    """Whether references have time 0 instead of the sample's."""
    most: int = 1024
    """Most patches along an axis."""


@attrs.frozen(kw_only=True)
class LatentModel(spec.ModelConfig):
    """A model that makes latents from noise; subclasses say which."""

    layers: int = attrs.field(validator=ge(1))
    """Blocks."""
    heads: int = attrs.field(validator=ge(1))
    """Heads."""
    head_dim: int = attrs.field(default=128, validator=ge(6))
    """Width of a head; even. The width of the model is `heads * head_dim`."""
    eps: float = attrs.field(default=1e-6, validator=gt(0.0))
    """Added to the variance in the norms."""
    flow: Flow = Flow()
    """How it is trained to denoise."""
    sampling: Sampling = Sampling()
    """How samples are made."""

    @property
    def width(self) -> int:
        """Width of the model."""
        return self.heads * self.head_dim

    @property
    def space(self) -> Space:
        """What goes in."""
        raise NotImplementedError(f"{spec.type_name(self)} must say what goes in; give it the property `space`")


@spec.collate.register
def _(cfg: LatentModel, rows: Sequence[Mapping[str, Any] | None], like: Mapping[str, Any]) -> spec.Batch:
    batch = latent_batch(cfg.space, rows)
    if cfg.flow.caption_dropout and "empty" not in batch and any(batch["real"]):
        raise ValueError(
            f"row {batch['ids'][0]}: model.flow.caption_dropout = {cfg.flow.caption_dropout}, but the row has no "
            "`empty`, the embedding of the empty caption; cache it with the data, or set caption_dropout to 0"
        )
    return batch


@spec.draw.register
def _(cfg: LatentModel, batch: spec.Batch, seed: int, step: int) -> spec.Batch:
    return with_draws(cfg.space, cfg.flow, batch, seed, step)


@spec.loss_weights.register
def _(cfg: LatentModel, batch: spec.Batch) -> dict[str, Tensor]:
    """Every sample counts alike, however large it is."""
    return {"flow": torch.tensor(batch["samples"])}


@spec.loss_terms.register
def _(cfg: LatentModel, output: spec.Output, batch: spec.Batch) -> dict[str, Tensor]:
    error = batch["noise"] - batch["latents"] - output
    return {"flow": (error.square().mean(-1) * batch["weight"]).sum()}


@spec.forward.register
def _(cfg: LatentModel, model: nn.Module, batch: spec.Batch) -> spec.Output:
    return run(model, batch, noisy(batch["latents"], batch["noise"], batch["sigma"]), batch["time"])


@spec.sample.register
def _(cfg: LatentModel, model: nn.Module, batch: spec.Batch) -> tuple[Tensor, ...]:
    """Returns the latent [C, F, Y, X] of each row, by Euler steps from its noise."""
    packing: Packing = batch["packing"]
    noised, x = batch["noised"][:, None], noisy(batch["latents"], batch["noise"], batch["noised"][:, None].float())
    ways = [schedule(cfg.sampling, math.prod(grids[0])) for grids in packing.grids]
    for i in range(cfg.sampling.steps):
        now, then = ([way[at] for way in ways] for at in (i, i + 1))
        step = torch.tensor([b - a for a, b in zip(now, then, strict=True)], dtype=torch.float32, device=x.device)
        each = torch.cat([d.expand(n) for d, n in zip(step, packing.lengths, strict=True)])[:, None]
        x = torch.where(noised, x + each * velocity(cfg, model, batch, x, now), x)
    return latents_of(cfg.space, packing, x)


def run(model: nn.Module, batch: spec.Batch, tokens: Tensor, time: Tensor) -> Tensor:
    """Returns the velocity [T, P*C] in fp32 of tokens [T, P*C], given the time of each run [R]."""
    return model(tokens, time, batch["text"], batch["packing"], batch.get("condition"), batch.get("image"))


def velocity(cfg: LatentModel, model: nn.Module, batch: spec.Batch, tokens: Tensor, times: Sequence[float]) -> Tensor:
    """Returns the guided velocity [T, P*C] of tokens [T, P*C] at a time (0 to 1) of each sample, for any solver."""
    time = _run_times(batch, times).to(tokens.device)
    told = run(model, batch, tokens, time)
    if cfg.sampling.guidance == 1.0:
        return told
    if "empty" not in batch:
        raise ValueError(
            f"model.sampling.guidance = {cfg.sampling.guidance} needs the empty caption, and the batch has none; give "
            "rows with `empty`, or set guidance to 1"
        )
    untold = run(model, _with_captions(batch, (True,) * len(batch["ids"])), tokens, time)
    guided = untold + cfg.sampling.guidance * (told - untold)
    if not cfg.sampling.keep_norm:
        return guided
    return guided * (told.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True).clamp_min(_LEAST_NORM))


def latents_of(space: Space, packing: Packing, tokens: Tensor) -> tuple[Tensor, ...]:
    """Returns the latent [C, F, Y, X] that each sample's tokens [T, P*C] are, without its references."""
    made = []
    for grids, part in zip(packing.grids, tokens.split(packing.lengths), strict=True):
        made.append(unpatchify(part[: math.prod(grids[0])], grids[0], space.patch, space.channels_first))
    return tuple(made)


def latent_batch(space: Space, rows: Sequence[Mapping[str, Any] | None]) -> spec.Batch:
    """Returns the packed batch of rows; None becomes a sample of one token and no weight.

    Raises ValueError with the row's id for what the model cannot take.
    """
    made = [_row(space, _blank(space) if row is None else row) for row in rows]
    empties = _empties(made, rows)
    names = [name for name in ("latents", "noised", "text", "condition", "image") if name in made[0]]
    return {
        **{name: torch.cat([row[name] for row in made]) for name in names},
        **({"empty": torch.cat(empties), "empties": tuple(map(len, empties))} if empties else {}),
        "packing": Packing(
            grids=tuple(row["grids"] for row in made),
            texts=tuple(len(row["text"]) for row in made),
            images=tuple(len(row["image"]) for row in made) if space.image_dim else (),
            runs=tuple(tuple(length for length, _ in row["runs"]) for row in made),
        ),
        "clean": tuple(clean for row in made for _, clean in row["runs"]),
        "real": tuple(row is not None for row in rows),
        "samples": float(sum(row is not None for row in rows)),
        "ids": tuple("padding" if row is None else row["id"] for row in rows),
        "count": sum(len(one["latents"]) for one, row in zip(made, rows, strict=True) if row is not None),
    }


def row_sizes(space: Space, row: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the tokens of a row's latents, those of its references included, and of its text."""
    latents = (row["latents"], *(row.get("references") or ()))
    tokens = sum(math.prod(grid_of(one.shape, space.patch)) for one in latents)
    length = row.get("text_length")
    text = len(row["text"]) if length is None else int(length)
    return tokens, space.text if space.pad_text else text


def _empties(made: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any] | None]) -> list[Tensor]:
    """Returns the empty caption of each sample, none where the rows have none; a filler's is its text."""
    without = [str(row["id"]) for one, row in zip(made, rows, strict=True) if row is not None and "empty" not in one]
    if len(without) == sum(row is not None for row in rows):
        return []
    if without:
        raise ValueError(
            f"the rows {', '.join(without)} have no `empty`, the embedding of the empty caption, and others of the "
            "batch have one; cache it with all of them, or with none"
        )
    return [one.get("empty", one["text"]) for one in made]


def _blank(space: Space) -> dict[str, Any]:
    row: dict[str, Any] = {"latents": torch.zeros(space.channels, *space.patch), "id": "padding"}
    row["text"] = torch.zeros(1, space.text_dim)
    if space.condition:
        row["condition"] = torch.zeros(space.condition, *space.patch)
    if space.image_dim:
        row["image"] = torch.zeros(1, space.image_dim)
    return row


def _row(space: Space, row: Mapping[str, Any]) -> dict[str, Any]:
    ident = row["id"]
    latents = _latent(space, ident, "latents", row["latents"], space.channels)
    grid = grid_of(latents.shape, space.patch)
    references = [_latent(space, ident, "references", one, space.channels) for one in row.get("references") or ()]
    if references and not space.references:
        raise ValueError(f"row {ident} has references, and the model reads none; leave them out, or use an edit model")
    grids = (grid, *(grid_of(one.shape, space.patch) for one in references))
    given = _given(space, ident, row, latents)
    tokens, before = sum(map(math.prod, grids)), given // space.patch[0] * math.prod(grid[1:])
    target = math.prod(grid)
    runs = [(before, True), (target - before, False)] if before else [(target, False)]
    if references:
        rest = tokens - target
        runs = [*runs, (rest, True)] if space.clean_references else [*runs[:-1], (runs[-1][0] + rest, False)]
    at = torch.arange(tokens)
    made: dict[str, Any] = {
        "latents": torch.cat([patchify(one, space.patch, space.channels_first) for one in (latents, *references)]),
        "noised": (at >= before) & (at < target),
        "text": _text(space, ident, row),
        "grids": grids,
        "runs": runs,
    }
    if row.get("empty") is not None:
        made["empty"] = _filled(space, _embeddings(ident, "empty", row["empty"], space.text_dim, space.text))
    if space.condition:
        made["condition"] = _condition(space, ident, row, latents)
    if space.image_dim:
        made["image"] = _embeddings(ident, "image", _there(ident, row, "image"), space.image_dim, 2**20)
    return made


def _there(ident: object, row: Mapping[str, Any], name: str) -> Any:
    if row.get(name) is None:
        raise ValueError(f"row {ident} has no `{name}`, which the model reads; add it to the data")
    return row[name]


def _latent(space: Space, ident: object, name: str, value: Any, channels: int) -> Tensor:
    latent = torch.as_tensor(value)
    if latent.ndim != 4 or latent.shape[0] != channels or not latent.is_floating_point():
        raise ValueError(
            f"row {ident}: {name} is {latent.dtype} {list(latent.shape)}, and the model takes floats "
            f"[{channels}, frames, rows, columns]; encode the media with the model's own VAE"
        )
    for axis, extent, size in zip(("frames", "rows", "columns"), latent.shape[1:], space.patch, strict=True):
        if extent % size or not 0 < extent // size <= space.most:
            raise ValueError(
                f"row {ident}: {name} has {extent} {axis}, and the model takes multiples of {size} up to "
                f"{size * space.most}; resize or cut the media before it is encoded"
            )
    if not bool(torch.isfinite(latent).all()):
        raise ValueError(f"row {ident}: {name} is not finite everywhere; encode the media again, or leave it out")
    return latent.float()


def _given(space: Space, ident: object, row: Mapping[str, Any], latents: Tensor) -> int:
    given, frames = int(row.get("given") or 0), latents.shape[1]
    if given and not space.given:
        raise ValueError(f"row {ident}: {given} frames are given, and the model has no such frames; leave `given` out")
    if not 0 <= given < frames or given % space.patch[0]:
        raise ValueError(
            f"row {ident}: given = {given} of {frames} frames; it must be a multiple of {space.patch[0]} from 0 to "
            "below the frames, so that something is left to make"
        )
    return given


def _embeddings(ident: object, name: str, value: Any, width: int, most: int) -> Tensor:
    found = torch.as_tensor(value)
    if found.ndim != 2 or found.shape[1] != width or not found.is_floating_point():
        raise ValueError(
            f"row {ident}: {name} is {found.dtype} {list(found.shape)}, and the model takes floats [length, {width}]; "
            "encode it with the model's own encoder"
        )
    if not 1 <= len(found) <= most:
        raise ValueError(
            f"row {ident}: {name} has {len(found)} embeddings, and the model takes 1 to {most}; shorten it, or raise "
            "model.text"
        )
    if not bool(torch.isfinite(found).all()):
        raise ValueError(f"row {ident}: {name} is not finite everywhere; encode it again")
    return found.float()


def _text(space: Space, ident: object, row: Mapping[str, Any]) -> Tensor:
    text = torch.as_tensor(_there(ident, row, "text"))
    length = row.get("text_length")
    if length is not None and not 1 <= int(length) <= len(text):
        raise ValueError(f"row {ident}: text_length = {length} of {len(text)} embeddings; it must be from 1 to those")
    text = _embeddings(ident, "text", text if length is None else text[: int(length)], space.text_dim, space.text)
    return text if ident == "padding" else _filled(space, text)


def _filled(space: Space, text: Tensor) -> Tensor:
    return torch.cat((text, text.new_zeros(space.text - len(text), text.shape[1]))) if space.pad_text else text


def _condition(space: Space, ident: object, row: Mapping[str, Any], latents: Tensor) -> Tensor:
    found = _latent(space, ident, "condition", _there(ident, row, "condition"), space.condition)
    if found.shape[1:] != latents.shape[1:]:
        raise ValueError(
            f"row {ident}: condition is {list(found.shape)} and latents {list(latents.shape)}; frames, rows and "
            "columns must be equal: encode both from one clip"
        )
    return patchify(found, space.patch, space.channels_first)


def with_draws(space: Space, flow: Flow, batch: spec.Batch, seed: int, step: int) -> spec.Batch:
    """Returns the batch with noise, times and weights of a step; captions of some samples are dropped.

    What a sample gets is a function of (seed, step, what is drawn, its id) and its own size alone.
    """
    packing: Packing = batch["packing"]
    noise, weights, times, dropped = [], [], [], []
    noised = batch["noised"].split(packing.lengths)
    for grids, ident, real, mine in zip(packing.grids, batch["ids"], batch["real"], noised, strict=True):
        drawn = np.random.default_rng(seed_of(seed, step, "time", ident)).random()
        time = float(np.float32(time_of(flow, math.prod(grids[0]), drawn)))
        times.append(time)
        weights.append(mine.float() * (weight_of(flow, time) / float(mine.sum()) if real else 0.0))
        noise.append(_noise(space, grids, ident, seed, step))
        dropped.append(np.random.default_rng(seed_of(seed, step, "caption", ident)).random() < flow.caption_dropout)
    each = torch.cat([torch.full((n,), t) for n, t in zip(packing.lengths, times, strict=True)])
    drawn_batch = {
        **batch,
        "noise": torch.cat(noise),
        "time": _run_times(batch, times),
        "sigma": torch.where(batch["noised"], each, 0.0)[:, None],
        "weight": torch.cat(weights),
    }
    return _with_captions(drawn_batch, tuple(dropped)) if any(dropped) and "empty" in batch else drawn_batch


def _noise(space: Space, grids: Sequence[Grid], ident: object, seed: int, step: int) -> Tensor:
    """Returns the noise of a sample's tokens; references have none."""
    shape = (space.channels, *(n * size for n, size in zip(grids[0], space.patch, strict=True)))
    generator = torch.Generator().manual_seed(seed_of(seed, step, "noise", ident))
    noise = patchify(torch.randn(shape, generator=generator), space.patch, space.channels_first)
    return torch.cat((noise, noise.new_zeros(sum(map(math.prod, grids[1:])), noise.shape[1])))


def _run_times(batch: spec.Batch, times: Sequence[float]) -> Tensor:
    """Returns the time of each run: that of its sample, or 0 where it is clean."""
    packing: Packing = batch["packing"]
    each = [time for time, runs in zip(times, packing.runs, strict=True) for _ in runs]
    return torch.tensor([0.0 if clean else t for t, clean in zip(each, batch["clean"], strict=True)])


def _with_captions(batch: spec.Batch, dropped: tuple[bool, ...]) -> spec.Batch:
    """Returns the batch whose samples have the empty caption where theirs is dropped."""
    packing: Packing = batch["packing"]
    own, empty = batch["text"].split(packing.texts), batch["empty"].to(batch["text"]).split(batch["empties"])
    texts = [untold if drop else text for text, untold, drop in zip(own, empty, dropped, strict=True)]
    return {
        **batch,
        "text": torch.cat(texts),
        "packing": attrs.evolve(packing, texts=tuple(len(text) for text in texts)),
    }


def check_data(cfg: LatentModel, data: Mapping[str, int]) -> None:
    """Raises ValueError where facts of the data are not the model's.

    A source may state `channels` of its latents, `condition_channels`, `text_dim`, `image_dim`, `text_length`, the most
    embeddings of a caption, and the most `given` frames and `references`; what it does not state is found row by row.
    """
    space = cfg.space
    wanted = {
        "channels": (space.channels, "encode it with the model's own VAE"),
        "text_dim": (space.text_dim, "encode captions with the model's own encoder"),
        "condition_channels": (space.condition, "cache the condition that the model reads"),
        "image_dim": (space.image_dim, "cache the image embeddings that the model reads"),
    }
    for fact, (value, cure) in wanted.items():
        if data.get(fact, value) != value:
            raise ValueError(f"the data has {fact} {data[fact]}, and the model {value}; {cure}")
    if data.get("text_length", 0) > space.text:
        raise ValueError(
            f"model.text = {space.text}, but the data has captions of {data['text_length']} embeddings; shorten them, "
            "or raise model.text"
        )
    _check_pictures(space, data)


def _check_pictures(space: Space, data: Mapping[str, int]) -> None:
    if data.get("given") and not space.given:
        raise ValueError(f"the data gives {data['given']} frames, and the model takes none; set data.given to 0")
    if data.get("references") and not space.references:
        raise ValueError(
            f"the data has up to {data['references']} references, and the model reads none; leave them out, or take an "
            "edit model"
        )


@spec.check_model.register
def _(cfg: LatentModel, data: Mapping[str, int]) -> None:
    check_data(cfg, data)


def fake_rows(space: Space, count: int, seed: int, tokens: int = 0) -> list[dict[str, Any]]:
    """Returns random rows that differ in everything that rows may differ in; `tokens` makes all of that many tokens."""
    rng = np.random.default_rng(seed)
    a, b, d = space.patch

    def floats(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    rows = []
    for i in range(count):
        grid = (1, 1, tokens) if tokens else (1 + int(rng.integers(0, 3)), 2 + i % 2, 2 + int(rng.integers(0, 2)))
        size = (grid[0] * a, grid[1] * b, grid[2] * d)
        length = space.text if tokens else int(rng.integers(1, space.text + 1))
        row: dict[str, Any] = {
            "latents": floats(space.channels, *size),
            "text": floats(length, space.text_dim),
            "empty": torch.full((1, space.text_dim), 0.5),
            "id": f"fake:{seed}:{i}",
        }
        if space.condition:
            row["condition"] = floats(space.condition, *size)
        if space.image_dim:
            row["image"] = floats(3 + i % 2, space.image_dim)
        if space.given and grid[0] > 1 and i % 2:
            row["given"] = a
        if space.references and not tokens:
            row["references"] = [floats(space.channels, a, (2 + j) * b, 2 * d) for j in range(i % 3)]
        rows.append(row)
    return rows


@spec.fake_batch.register
def _(cfg: LatentModel, rows: int, length: int, seed: int) -> spec.Batch:
    return spec.draw(cfg, latent_batch(cfg.space, fake_rows(cfg.space, rows, seed, length)), seed, 0)
