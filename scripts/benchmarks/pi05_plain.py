"""A plain Pi0.5, to compare with: torch modules in the published names, after the structure of openpi's `PI0Pytorch`.

Queries, keys and values are projected apart, both towers' tokens go through one attention (SDPA with the dense mask,
keys repeated for the heads) layer by layer, the whole last layer included, and rows stay padded. Sampling computes the
prefix once and keeps its keys and values, as openpi does. Runs eager, in the dtype of its parameters.

Shapes: B rows, C cameras, I pixels of a side, L tokens before the actions, H action steps, D action dims, S = L + H,
W width, N heads, G key-value heads, E width of a head.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf.models.embodied.pi05_model import Pi05
from lf.models.layers.gemma import Gemma
from lf.models.vision.siglip import Siglip

MASKED = -2.3819763e38
"""What openpi adds to the scores of keys that a query does not see."""

Cache = list[tuple[Tensor, Tensor]]


class VisionLayer(nn.Module):
    """A layer of SigLIP."""

    def __init__(self, cfg: Siglip) -> None:
        super().__init__()
        self.heads = cfg.heads
        self.layer_norm1 = nn.LayerNorm(cfg.width, cfg.eps)
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(cfg.width, cfg.width) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        )
        self.layer_norm2 = nn.LayerNorm(cfg.width, cfg.eps)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(cfg.width, cfg.mlp), "fc2": nn.Linear(cfg.mlp, cfg.width)})

    def forward(self, x: Tensor) -> Tensor:
        """Returns [B, S, W]."""
        h, attn = self.layer_norm1(x), self.self_attn
        q, k, v = (attn[f"{name}_proj"](h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in "qkv")
        x = x + attn["out_proj"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.layer_norm2(x)), approximate="tanh"))


class Vision(nn.Module):
    """SigLIP without a head."""

    def __init__(self, cfg: Siglip) -> None:
        super().__init__()
        patch = nn.Conv2d(3, cfg.width, cfg.patch, cfg.patch)
        position = nn.Embedding(cfg.tokens, cfg.width)
        self.embeddings = nn.ModuleDict({"patch_embedding": patch, "position_embedding": position})
        self.encoder: Any = nn.ModuleDict({"layers": nn.ModuleList(VisionLayer(cfg) for _ in range(cfg.depth))})
        self.post_layernorm = nn.LayerNorm(cfg.width, cfg.eps)

    def forward(self, images: Tensor) -> Tensor:
        """Returns [B, S, W] of images [B, 3, I, I]."""
        patch: Any = self.embeddings["patch_embedding"]
        position = self.embeddings["position_embedding"]
        x = patch(images.to(patch.weight.dtype)).flatten(2).transpose(1, 2)
        x = (x + position(torch.arange(x.shape[1], device=x.device))).to(self.post_layernorm.weight.dtype)
        for layer in self.encoder["layers"]:
            x = layer(x)
        return self.post_layernorm(x)


class Norm(nn.Module):
    """Gemma's RMSNorm; with a condition, openpi's adaptive one."""

    def __init__(self, width: int, eps: float, cond: int) -> None:
        super().__init__()
        self.eps = eps
        if cond:
            self.dense = nn.Linear(cond, 3 * width)
        else:
            self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, cond: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns x normalised, and the gate of its branch where there is a condition."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if not hasattr(self, "dense"):
            return (normed * (1.0 + self.weight.float())).to(x.dtype), None
        assert cond is not None
        scale, shift, gate = self.dense(cond.to(self.dense.weight.dtype))[:, None].chunk(3, dim=-1)
        return (normed * (1.0 + scale.float()) + shift.float()).to(x.dtype), gate.to(x.dtype)


class Layer(nn.Module):
    """The parameters of a Gemma layer; `towers` says how they are used."""

    def __init__(self, cfg: Gemma, cond: int) -> None:
        super().__init__()
        inner = cfg.heads * cfg.head_dim
        sizes = {"q_proj": inner, "k_proj": cfg.kv_heads * cfg.head_dim, "v_proj": cfg.kv_heads * cfg.head_dim}
        self.head_dim = cfg.head_dim
        self.self_attn = nn.ModuleDict({name: nn.Linear(cfg.width, n, bias=False) for name, n in sizes.items()})
        self.self_attn["o_proj"] = nn.Linear(inner, cfg.width, bias=False)
        self.mlp = nn.ModuleDict({name: nn.Linear(cfg.width, cfg.mlp, bias=False) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = nn.Linear(cfg.mlp, cfg.width, bias=False)
        self.input_layernorm = Norm(cfg.width, cfg.eps, cond)
        self.post_attention_layernorm = Norm(cfg.width, cfg.eps, cond)

    def project(self, x: Tensor, cond: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """Returns queries, keys and values [B, heads, S, E] of x, and the gate of the attention."""
        h, gate = self.input_layernorm(x, cond)
        heads = (self.self_attn[f"{name}_proj"](h).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
        return [one.transpose(1, 2) for one in heads], gate

    def close(self, x: Tensor, attended: Tensor, gate: Tensor | None, cond: Tensor | None) -> Tensor:
        """Returns x after the attention's output [B, S, N * E] and the MLP are added."""
        x = added(x, self.self_attn["o_proj"](attended), gate)
        h, gate = self.post_attention_layernorm(x, cond)
        mlp = self.mlp
        inner = F.gelu(mlp["gate_proj"](h), approximate="tanh") * mlp["up_proj"](h)
        return added(x, mlp["down_proj"](inner), gate)


class Tower(nn.Module):
    """Layers and a norm."""

    embed_tokens: nn.Embedding
    """Of the tower of images and prompt."""

    def __init__(self, cfg: Gemma, cond: int = 0) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(Layer(cfg, cond) for _ in range(cfg.depth))
        self.norm = Norm(cfg.width, cfg.eps, cond)


class PlainPi05(nn.Module):
    """The whole model; its parameters have the published names."""

    def __init__(self, cfg: Pi05) -> None:
        super().__init__()
        self.cfg, width = cfg, cfg.expert.width
        language = Tower(cfg.vlm)
        language.embed_tokens = nn.Embedding(cfg.vocab, cfg.vlm.width)
        seen = nn.ModuleDict(
            {
                "vision_tower": nn.ModuleDict({"vision_model": Vision(cfg.vision)}),
                "multi_modal_projector": nn.ModuleDict({"linear": nn.Linear(cfg.vision.width, cfg.vlm.width)}),
                "language_model": language,
            }
        )
        self.paligemma_with_expert: Any = nn.ModuleDict(
            {
                "paligemma": nn.ModuleDict({"model": seen}),
                "gemma_expert": nn.ModuleDict({"model": Tower(cfg.expert, width)}),
            }
        )
        self.action_in_proj = nn.Linear(cfg.dims, width)
        self.action_out_proj = nn.Linear(width, cfg.dims)
        self.time_mlp_in = nn.Linear(width, width)
        self.time_mlp_out = nn.Linear(width, width)

    def forward(self, batch: Mapping[str, Tensor], noisy: Tensor, time: Tensor) -> Tensor:
        """Returns the velocity [B, H, D] of noisy actions [B, H, D] at times [B], given a padded batch."""
        prefix, valid = self.prefix(batch)
        suffix, cond = self.suffix(noisy, time, prefix.dtype)
        both = torch.cat((valid, torch.ones(suffix.shape[:2], dtype=torch.bool, device=valid.device)), 1)
        block = torch.arange(both.shape[1], device=valid.device) >= valid.shape[1]
        sees = (block[None, :] <= block[:, None]) & both[:, None, :] & both[:, :, None]
        table = self.rope(both.long().cumsum(1) - 1)
        mask = added_mask(sees, prefix.dtype)
        language, expert = self.language, self.expert
        for one, other in zip(language.layers, expert.layers, strict=True):
            (q1, k1, v1), _ = one.project(prefix, None)
            (q2, k2, v2), gate = other.project(suffix, cond)
            q, k, v = (torch.cat(pair, 2) for pair in ((q1, q2), (k1, k2), (v1, v2)))
            out = attention(turned(q, table), turned(k, table), v, mask)
            prefix = one.close(prefix, out[:, : prefix.shape[1]], None, None)
            suffix = other.close(suffix, out[:, prefix.shape[1] :], gate, cond)
        language.norm(prefix, None)
        return self.action(expert.norm(suffix, cond)[0])

    @torch.no_grad()
    def sample(self, batch: Mapping[str, Tensor], noise: Tensor) -> Tensor:
        """Returns actions [B, H, D], by Euler steps from noise; the prefix is computed once."""
        x, valid = self.prefix(batch)
        sees = valid[:, None, :] & valid[:, :, None]
        table, mask, cache = self.rope(valid.long().cumsum(1) - 1), added_mask(sees, x.dtype), Cache()
        for layer in self.language.layers:
            (q, k, v), _ = layer.project(x, None)
            cache.append((turned(k, table), v))
            x = layer.close(x, attention(turned(q, table), *cache[-1], mask), None, None)
        self.language.norm(x, None)
        dt, time, actions = -1.0 / self.cfg.steps, torch.tensor(1.0, device=noise.device), noise
        for _ in range(self.cfg.steps):
            actions = actions + dt * self.denoise(cache, valid, actions, time.expand(len(noise)))
            time = time + dt
        return actions

    def denoise(self, cache: Cache, valid: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """Returns the velocity of a step of sampling."""
        suffix, cond = self.suffix(noisy, time, cache[0][0].dtype)
        own = torch.ones(suffix.shape[:2], dtype=torch.bool, device=valid.device)
        mask = added_mask(torch.cat((valid, own), 1)[:, None, :].expand(-1, suffix.shape[1], -1), suffix.dtype)
        table = self.rope(valid.sum(1, keepdim=True) + own.long().cumsum(1) - 1)
        for layer, (k1, v1) in zip(self.expert.layers, cache, strict=True):
            (q, k, v), gate = layer.project(suffix, cond)
            keys, values = torch.cat((k1, turned(k, table)), 2), torch.cat((v1, v), 2)
            suffix = layer.close(suffix, attention(turned(q, table), keys, values, mask), gate, cond)
        return self.action(self.expert.norm(suffix, cond)[0])

    @property
    def language(self) -> Tower:
        """The tower of images and prompt."""
        tower: Tower = self.paligemma_with_expert["paligemma"]["model"]["language_model"]
        return tower

    @property
    def expert(self) -> Tower:
        """The tower of actions."""
        tower: Tower = self.paligemma_with_expert["gemma_expert"]["model"]
        return tower

    def prefix(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the tokens before the actions [B, L, W], and which of them are no padding [B, L]."""
        seen, images = self.paligemma_with_expert["paligemma"]["model"], batch["images"]
        features = seen["vision_tower"]["vision_model"](images.flatten(0, 1))
        tokens = seen["multi_modal_projector"]["linear"](features).unflatten(0, images.shape[:2]).flatten(1, 2)
        words = self.language.embed_tokens(batch["prompt"]) * math.sqrt(self.cfg.vlm.width)
        cameras = batch["cameras"].repeat_interleave(self.cfg.vision.tokens, dim=1)
        return torch.cat((tokens, words.to(tokens.dtype)), 1), torch.cat((cameras, batch["words"]), 1)

    def suffix(self, noisy: Tensor, time: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the tokens of noisy actions [B, H, W], and the condition of the expert's norms [B, W]."""
        wide, width = self.time_mlp_in.weight.dtype, self.cfg.expert.width
        least, most = self.cfg.periods
        fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
        angle = time[:, None].double() * (2.0 * math.pi / (least * (most / least) ** fraction))
        embedded = torch.cat((angle.sin(), angle.cos()), -1).float().to(wide)
        cond = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(embedded))))
        return self.action_in_proj(noisy.to(self.action_in_proj.weight.dtype)).to(dtype), cond

    def action(self, hidden: Tensor) -> Tensor:
        """Returns the velocity of the expert's output, in fp32."""
        return self.action_out_proj(hidden.to(self.action_out_proj.weight.dtype)).float()

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine [B, 1, S, E] of positions [B, S]."""
        dim, theta = self.cfg.vlm.head_dim, self.cfg.vlm.theta
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device)
        angle = positions[:, None, :, None].float() * theta ** (-steps / dim)
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()


def turned(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Returns heads [B, N, S, E] turned by their positions."""
    cos, sin = (part.to(x.dtype) for part in table)
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat((-other, one), -1) * sin


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Returns [B, S, N * E] of queries [B, N, S, E] to keys and values [B, G, K, E]."""
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def added_mask(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what is added to the scores [B, 1, S, K]."""
    return torch.where(sees, 0.0, MASKED).to(dtype)[:, None]


def added(x: Tensor, branch: Tensor, gate: Tensor | None) -> Tensor:
    """Returns x with a branch, gated where there is a gate."""
    return x + (branch if gate is None else branch * gate)
