"""Continues a sequence of token ids with a language model.

Shapes: S positions, V vocabulary.
"""

import contextlib
from collections.abc import Iterator, Sequence

import attrs
import torch
from attrs.validators import and_, ge, gt, le
from torch import Tensor, nn

from lf.models.spec import Batch, ModelConfig, forward, paths


@attrs.frozen(kw_only=True)
class Sampling:
    """How the next token is chosen."""

    tokens: int = attrs.field(default=100, validator=ge(1))
    """Most tokens to add."""
    temperature: float = attrs.field(default=0.0, validator=ge(0.0))
    """Divisor of the logits; 0 takes the likeliest token (greedy)."""
    top_p: float = attrs.field(default=1.0, validator=and_(gt(0.0), le(1.0)))
    """Share of the probability that is kept, from the likeliest token on."""
    seed: int = 0
    """Seed of the draws."""


def choose(logits_V: Tensor, how: Sampling, generator: torch.Generator) -> int:
    """Returns the id of the next token."""
    if how.temperature == 0.0:
        return int(logits_V.argmax())
    probabilities, ids = torch.softmax(logits_V.float() / how.temperature, -1).sort(descending=True)
    # A token stays as long as those before it have not filled the share, so the likeliest always stays.
    kept = probabilities * (probabilities.cumsum(-1) - probabilities < how.top_p)
    return int(ids[torch.multinomial(kept.cpu(), 1, generator=generator).to(ids.device)])


def generate(
    cfg: ModelConfig, model: nn.Module, prompt: Sequence[int], how: Sampling, *, eos: int | None, device: str
) -> Iterator[int]:
    """Yields token ids after the prompt until `eos` (which is not yielded) or the limit.

    Attention keeps the keys and values of earlier tokens where the model's layers can.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens; give at least one")
    generator = torch.Generator().manual_seed(how.seed)
    cached = "megatron" in paths(cfg)
    seen, new = list(prompt), list(prompt)
    was_training = model.training
    model.eval()
    with torch.no_grad(), _cache(model) if cached else contextlib.nullcontext():
        for _ in range(how.tokens):
            given = new if cached else seen
            logits_V = forward(cfg, model, _batch(given, len(seen) - len(given), device))[0, -1]
            new = [choose(logits_V, how, generator)]
            if new[0] == eos:
                break
            seen += new
            yield new[0]
    model.train(was_training)


def _cache(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    from lf.models.layers.attention import key_value_cache

    return key_value_cache(model)


def _batch(ids: Sequence[int], start: int, device: str) -> Batch:
    return {
        "tokens": torch.tensor([ids], device=device),
        "positions": torch.arange(start, start + len(ids), device=device)[None],
        "lengths": (len(ids),),
        "ids": ("prompt",),
        "count": len(ids),
    }
