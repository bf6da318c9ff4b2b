"""Initial weights as a function of (seed, canonical tensor name), so that every layout starts from the same numbers."""

import fnmatch
import hashlib

import torch
from torch import Tensor

from lf.models.spec import InitRule, ModelConfig, Placed, init_rules, type_name


def seed_of(*parts: object) -> int:
    """Returns a 63-bit seed that is a function of the parts alone, on every machine."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def normal(pattern: str, fan_in: int) -> InitRule:
    """Returns the rule of matrices that keep the size of what goes through them."""
    return InitRule(pattern=pattern, kind="normal", std=fan_in**-0.5)


def rule_for(cfg: ModelConfig, name: str) -> InitRule:
    """Returns the first rule that matches a canonical name; raises ValueError where none does."""
    for rule in init_rules(cfg):
        if fnmatch.fnmatchcase(name, rule.pattern):
            return rule
    raise ValueError(
        f"init_rules of {type_name(cfg)} has no rule for the tensor {name}; add an InitRule whose pattern matches it"
    )


def initial_tensor(cfg: ModelConfig, placed: Placed, local: Tensor, seed: int) -> Tensor:
    """Returns fp32 initial values of this rank's tensor: the global tensor is drawn, then cut; padded rows are 0."""
    rule = rule_for(cfg, placed.name)
    if rule.kind == "ones":
        whole = torch.ones(placed.shape)
    elif rule.kind == "zeros":
        whole = torch.zeros(placed.shape)
    else:
        generator = torch.Generator().manual_seed(seed_of(seed, placed.name))
        whole = torch.randn(placed.shape, generator=generator) * rule.std
    return cut(whole, placed, local)


def cut(whole: Tensor, placed: Placed, local: Tensor) -> Tensor:
    """Returns what a rank's tensor, shaped as `local`, has of a whole one, in fp32; padded rows are 0."""
    out = torch.zeros(local.shape)
    for part in placed.parts:
        take = tuple(slice(a, a + n) for a, n in zip(part.at, part.size, strict=True))
        put = tuple(slice(a, a + n) for a, n in zip(part.local, part.size, strict=True))
        out[put] = whole[take]
    return out
