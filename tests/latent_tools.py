"""Small models of latents with random weights, and what tests ask of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

import lf
from lf.data.source import DataCtx, Row, open_data
from lf.devices.cpu import cpu
from lf.models import spec
from lf.models.diffusion.latent import LatentModel, Space, fake_rows
from lf.models.diffusion.qwen_image import QwenImage, qwen_image_tiny
from lf.models.diffusion.wan import Wan, wan_tiny
from lf.models.spec import Batch, Ctx
from lf.train.start import export


@attrs.frozen(kw_only=True)
class RandomWan(Wan):
    """Its first weights are random, so that every tensor has a gradient in the first step."""


@attrs.frozen(kw_only=True)
class RandomQwenImage(QwenImage):
    """The same of the other family."""


@spec.init_rules.register
def _(cfg: RandomWan | RandomQwenImage) -> tuple[spec.InitRule, ...]:
    ones = spec.InitRule(pattern="*norm*.weight", kind="ones")
    return (ones, spec.InitRule(pattern="*", kind="normal", std=0.15))


def random_first(cfg: LatentModel) -> LatentModel:
    kind = RandomWan if isinstance(cfg, Wan) else RandomQwenImage
    return kind(**{field.name: getattr(cfg, field.name) for field in attrs.fields(type(cfg))})


def tiny(cfg: LatentModel, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns a small model with random weights everywhere."""
    model = spec.build_model(cfg, Ctx(device=cpu, dtype=dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
    return model


def write_base(cfg: LatentModel, folder: Path) -> None:
    """Writes a small model as a folder of diffusers."""
    tensors = spec.named_tensors(tiny(cfg))
    export(cfg, tensors.__getitem__, folder, source=None, files={}, write=True)


def batch_of(cfg: LatentModel, rows: Sequence[dict[str, Any] | None], step: int = 5) -> Batch:
    like = next(row for row in rows if row is not None)
    return spec.draw(cfg, spec.collate(cfg, rows, like), 3, step)


def micro_batches(cfg: LatentModel, rows: list[dict[str, Any]], micro_batch: int, layout: spec.Layout) -> list[Batch]:
    """Returns the micro-batches of one rank: they are dealt to the data parallel ranks in turn."""
    micro = [spec.collate(cfg, rows[i : i + micro_batch], rows[0]) for i in range(0, len(rows), micro_batch)]
    return micro[layout.dp_rank :: layout.dp]


def loss_of(cfg: LatentModel, model: nn.Module, batch: Batch) -> Tensor:
    terms = spec.loss_terms(cfg, spec.forward(cfg, model, batch), batch)
    return terms["flow"] / spec.loss_weights(cfg, batch)["flow"]


def gradients(cfg: LatentModel, model: nn.Module, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and every gradient of some micro-batches, as a step adds them up."""
    model.zero_grad()
    weight = sum(spec.loss_weights(cfg, batch)["flow"] for batch in batches)
    losses = [spec.loss_terms(cfg, spec.forward(cfg, model, batch), batch)["flow"] / weight for batch in batches]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def near(one: dict[str, Tensor], other: dict[str, Tensor], gate: float = 5e-6) -> None:
    """Asserts that gradients agree, each to a part of its own largest value.

    That is at least a thousandth of the largest of all: biases of keys have gradients that nearly cancel.
    """
    assert one.keys() == other.keys()
    least = 1e-3 * max(float(value.abs().max()) for value in one.values())
    for name, value in one.items():
        scale = max(float(value.abs().max()), least)
        assert float((value - other[name]).abs().max()) <= gate * scale, name


@attrs.frozen(kw_only=True)
class FakeLatents(lf.DataConfig):
    """Random rows, for runs."""

    kind: str = "wan"
    """Which small model they are for."""
    rows: int = 7
    """Rows of an epoch."""


SPACES: dict[str, Space] = {"wan": wan_tiny.space, "qwen_image": qwen_image_tiny.space}


@attrs.frozen(kw_only=True, eq=False)
class FakeRows:
    made: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.made)

    def row(self, epoch: int, index: int) -> Row:
        return self.made[index]

    def describe(self) -> dict[str, int]:
        return {"rows": len(self.made), "channels": 4, "text_dim": 16}


@open_data.register
def _(cfg: FakeLatents, ctx: DataCtx) -> FakeRows:
    return FakeRows(made=fake_rows(SPACES[cfg.kind], cfg.rows, ctx.seed))
