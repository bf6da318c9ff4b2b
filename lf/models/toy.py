"""A language model of two matrices and a few gates: the shortest complete family, and the first file to read.

Shapes: B rows, S positions, H width, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch.nn.functional as F
from torch import Tensor, nn

from lf.models import spec
from lf.models.llm.fields import whole
from lf.models.weights import Same, WeightMap


@attrs.frozen(kw_only=True)
class Toy(spec.ModelConfig):
    """Embedding, residual layers that see one token each, and a head."""

    vocab: int = 257
    """Token ids."""
    hidden: int = 32
    """Width of the residual stream."""
    layers: int = 2
    """Residual layers."""


class ToyModel(nn.Module):
    """The module of `Toy`."""

    def __init__(self, cfg: Toy) -> None:
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.hidden)
        self.layers = nn.ModuleList(nn.Linear(cfg.hidden, cfg.hidden) for _ in range(cfg.layers))
        self.head = nn.Linear(cfg.hidden, cfg.vocab, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Returns logits [B, S, V]."""
        x_BSH = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSH = x_BSH + F.silu(layer(x_BSH))
        return self.head(x_BSH)


@spec.build_model.register
def _(cfg: Toy, ctx: spec.Ctx) -> nn.Module:
    return ToyModel(cfg).to(ctx.dtype)


@spec.forward.register
def _(cfg: Toy, model: nn.Module, batch: spec.Batch) -> spec.Output:
    return model(batch["tokens"])


@spec.loss_weights.register
def _(cfg: Toy, batch: spec.Batch) -> dict[str, Tensor]:
    return {"lm": (batch["labels"] != spec.IGNORE).sum()}


@spec.loss_terms.register
def _(cfg: Toy, output: spec.Output, batch: spec.Batch) -> dict[str, Tensor]:
    logits = output.float().flatten(0, 1)
    return {"lm": F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=spec.IGNORE, reduction="sum")}


@spec.collate.register
def _(cfg: Toy, rows: Sequence[Mapping[str, Any] | None], like: Mapping[str, Any]) -> spec.Batch:
    return spec.text_batch(rows, like, cfg.vocab)


@spec.init_rules.register
def _(cfg: Toy) -> tuple[spec.InitRule, ...]:
    return (spec.InitRule(pattern="*.bias", kind="zeros"), spec.InitRule(pattern="*", kind="normal", std=0.1))


@spec.weight_map.register
def _(cfg: Toy) -> WeightMap:
    layers = [f"layers.{i}.{kind}" for i in range(cfg.layers) for kind in ("weight", "bias")]
    return WeightMap(rules=tuple(Same(lf=name, hf=name) for name in ("embed.weight", *layers, "head.weight")))


@spec.hf_config.register
def _(cfg: Toy) -> dict[str, Any]:
    return {"model_type": "lf_toy", **attrs.asdict(cfg)}


def from_hf(config: Mapping[str, Any]) -> Toy:
    """Returns the model of a config.json that `hf_config` wrote."""
    return Toy(**{field.name: whole(config, field.name) for field in attrs.fields(Toy)})


@spec.shard_spec.register
def _(cfg: Toy) -> spec.ShardSpec:
    return spec.ShardSpec(fsdp_units=("layers.*",), recompute_units=("layers.*",))


@spec.flops.register
def _(cfg: Toy, rows: int, length: int) -> float:
    return 6.0 * rows * length * (cfg.layers * cfg.hidden**2 + cfg.hidden * cfg.vocab)


@spec.fake_batch.register
def _(cfg: Toy, rows: int, length: int, seed: int) -> spec.Batch:
    return spec.fake_text_batch(cfg.vocab, rows, length, seed)
