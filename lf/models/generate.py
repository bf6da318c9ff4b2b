"""Continues a sequence of token ids with a language model.

Shapes: S positions, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from attrs.validators import and_, ge, gt, le, lt
from torch import Tensor, nn

from lf.models.decoder import DecoderConfig
from lf.models.layers.rope import DynamicScaling
from lf.models.media import media_rules
from lf.models.spec import IGNORE, Batch, Layout, ModelConfig, check_model, collate, forward, paths, slice_batch
from lf.models.vlm import Vlm

CONTEXT = 16
"""Tokens that are decoded again with a new one: some decoders treat the first token of a text differently."""


@attrs.frozen(kw_only=True)
class Sampling:
    """How the next token is chosen."""

    tokens: int = attrs.field(default=100, validator=ge(1))
    """Most tokens to add."""
    temperature: float = attrs.field(default=0.0, validator=ge(0.0))
    """Divisor of the logits; 0 takes the likeliest token (greedy)."""
    top_p: float = attrs.field(default=1.0, validator=and_(gt(0.0), le(1.0)))
    """Share of the probability that is kept, from the likeliest token on."""
    seed: int = attrs.field(default=0, validator=and_(ge(0), lt(2**63)))
    """Seed of the draws."""

    def __attrs_post_init__(self) -> None:
        if self.top_p < 1.0 and self.temperature == 0.0:
            raise ValueError(
                f"top_p = {self.top_p} does nothing at temperature = 0.0; set temperature too, such as 1.0"
            )


def distribution(logits_V: Tensor, how: Sampling) -> Tensor:
    """Returns the probabilities [V] that a token is drawn from, as float64 on the CPU; the temperature is above 0.

    Only the likeliest tokens that together reach `top_p` have any (nucleus sampling, arXiv:1904.09751).
    """
    logits = logits_V.double().cpu()
    probabilities, ids = torch.softmax((logits - logits.max()) / how.temperature, -1).sort(descending=True, stable=True)
    # A token stays as long as those before it have not filled the share, so the likeliest always stays.
    kept = probabilities * (probabilities.cumsum(-1) - probabilities < how.top_p)
    return torch.zeros_like(kept).scatter(0, ids, kept / kept.sum())


def choose(logits_V: Tensor, how: Sampling, generator: torch.Generator) -> int:
    """Returns the id of the next token. Raises ValueError where the logits are not finite."""
    if not torch.isfinite(logits_V).all():
        raise ValueError("the model's logits are not finite; its weights are damaged, or its training has diverged")
    if how.temperature == 0.0:
        return int(logits_V.argmax())
    return int(torch.multinomial(distribution(logits_V, how), 1, generator=generator))


def allowance(cfg: ModelConfig, prompt: Sequence[int], how: Sampling, pictures: Mapping[str, Any] | None = None) -> int:
    """Returns how many tokens may be added to a prompt: those asked for, as far as the model's length goes.

    Raises ValueError for a prompt without tokens, with ids that the model does not have or that stand for images that
    are not there, or that fills its length.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens; give at least one")
    check_model(cfg, {"vocab": max(prompt) + 1})
    rules = media_rules(cfg)
    if rules is not None and not pictures and set(rules.ids).intersection(prompt):
        raise ValueError("the prompt has the tokens of an image or a video, and none is given; leave them out")
    text = _decoder(cfg)
    if text is None:
        return how.tokens
    if len(prompt) >= text.max_length:
        name = "model.max_length" if text is cfg else "model.text.max_length"
        of_pictures = 0 if rules is None else sum(token in rules.ids for token in prompt)
        told = f", {of_pictures} of them of images and videos" if of_pictures else ""
        raise ValueError(
            f"the prompt has {len(prompt)} tokens{told}, and prompt and continuation together must fit into {name} "
            f"= {text.max_length}; {'give fewer or smaller pictures' if of_pictures else 'shorten it'}"
        )
    return min(how.tokens, text.max_length - len(prompt))


def _decoder(cfg: ModelConfig) -> DecoderConfig | None:
    text = cfg.text if isinstance(cfg, Vlm) else cfg
    return text if isinstance(text, DecoderConfig) else None


def generate(
    cfg: ModelConfig,
    model: nn.Module,
    prompt: Sequence[int],
    how: Sampling,
    *,
    eos: int | None,
    device: str,
    pictures: Mapping[str, Any] | None = None,
) -> Iterator[int]:
    """Returns an iterator over the token ids after the prompt, until `eos` (which is not among them) or the allowance.

    `pictures` are the images and videos whose tokens the prompt has: `media` and `patches` as in a row of training. New
    tokens have the positions that training gives them: they count on from the prompt's last one.
    The model is in evaluation mode until the iterator ends or is closed. Attention keeps the keys and values of earlier
    tokens where they stay as they are. Raises ValueError as `allowance` does.
    """
    limit = allowance(cfg, prompt, how, pictures)
    return _continue(cfg, model, prompt, pictures, how, limit, eos, device)


def _continue(
    cfg: ModelConfig,
    model: nn.Module,
    prompt: Sequence[int],
    pictures: Mapping[str, Any] | None,
    how: Sampling,
    limit: int,
    eos: int | None,
    device: str,
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(how.seed)
    first = _pictured(cfg, prompt, pictures) if pictures else _text_batch(torch.tensor([prompt]), 0)
    batch, new = first, list[int]()
    was_training = model.training
    model.eval()
    try:
        with _cache(cfg, model) as cached:
            for _ in range(limit):
                token = choose(_logits(cfg, model, batch, device), how, generator)
                if token == eos:
                    return
                new.append(token)
                yield token
                batch = _text_batch(torch.tensor([[token]]), _end(batch)) if cached else _extended(first, new)
    finally:
        model.train(was_training)


def stream_text(decode: Callable[[Sequence[int]], str], prompt: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
    """Yields the text that token ids add to a prompt, as they come; a character waits until all its bytes are there."""
    kept = list(prompt[-CONTEXT:])
    shown = decode(kept)
    for token in ids:
        kept.append(token)
        text = decode(kept)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            kept = kept[-CONTEXT:]
            shown = decode(kept)
    yield decode(kept)[len(shown) :]


@torch.no_grad()
def _logits(cfg: ModelConfig, model: nn.Module, batch: Batch, device: str) -> Tensor:
    """Returns the logits [V] after the last token of a batch."""
    there = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    output: Tensor = forward(cfg, model, there)
    return output[0, -1]


def _cache(cfg: ModelConfig, model: nn.Module) -> contextlib.AbstractContextManager[bool]:
    # Dynamic scaling turns the keys of all tokens anew as the text grows.
    text = _decoder(cfg)
    dynamic = text is not None and isinstance(text.rope.scaling, DynamicScaling)
    if dynamic or "megatron" not in paths(cfg):
        return contextlib.nullcontext(False)
    from lf.models.layers.attention import key_value_cache

    return key_value_cache(model)


def _text_batch(tokens_BS: Tensor, start: int) -> Batch:
    length = tokens_BS.shape[1]
    return {
        "tokens": tokens_BS,
        "positions": torch.arange(start, start + length)[None],
        "lengths": (length,),
        "ids": ("prompt",),
        "count": length,
    }


def _pictured(cfg: ModelConfig, ids: Sequence[int], pictures: Mapping[str, Any]) -> Batch:
    row = {"tokens": np.array(ids), "labels": np.full(len(ids), IGNORE), "lengths": (len(ids),), "real": len(ids)}
    row |= {"id": "prompt", **pictures}
    batch = slice_batch(cfg, collate(cfg, [row], row), Layout())
    return {name: value for name, value in batch.items() if name != "labels"}


def _end(batch: Batch) -> int:
    """Returns the position after a batch, whose last token is one of text: all its positions are alike."""
    return int(batch["positions"].flatten()[-1]) + 1


def _extended(batch: Batch, new: Sequence[int]) -> Batch:
    more = _text_batch(torch.tensor([[*batch["tokens"][0].tolist(), *new]]), 0)
    positions = torch.arange(_end(batch), _end(batch) + len(new)).expand(*batch["positions"].shape[:-1], -1)
    return {**batch, **more, "positions": torch.cat((batch["positions"], positions), dim=-1)}
