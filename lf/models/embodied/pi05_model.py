"""Pi0.5 as torch modules (arXiv:2504.16054), after openpi's `PI0Pytorch` with `pi05=True`.

Images and a prompt go through a PaliGemma (SigLIP, projector, Gemma); noisy actions go through a second, smaller Gemma
of as many layers, the action expert, whose queries attend to the first one's keys and values layer by layer. The prompt
never sees the actions, so the first tower runs alone and gives its keys and values; sampling does it once.

Shapes: B rows, C cameras, I pixels of a side, P prompt tokens, L tokens before the actions (all cameras, then the
prompt), H action steps, D action dims, W width.
"""

import math
from collections.abc import Sequence

import attrs
import torch
import torch.nn.functional as F
from attrs.validators import min_len
from torch import Tensor, nn

from lf.models import spec
from lf.models.embodied.robot import ActionSpace, Counted, Times
from lf.models.layers.gemma import Gemma, GemmaTower, Keys, positions, scaled_embedding
from lf.models.ranges import least
from lf.models.vision.siglip import Siglip, SiglipTower

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""The cameras that the published models were trained with."""

VOCAB = 257152
"""Token ids of PaliGemma."""


@attrs.frozen(kw_only=True)
class Pi05(spec.ModelConfig):
    """A Pi0.5 policy; the defaults are those of the published base model."""

    vision: Siglip = Siglip()
    """The vision tower."""
    vlm: Gemma = Gemma(width=2048, depth=18, mlp=16384)
    """The tower of images and prompt."""
    expert: Gemma = Gemma(width=1024, depth=18, mlp=4096)
    """The tower of actions; depth, heads and head width are those of `vlm`."""
    vocab: int = attrs.field(default=VOCAB, validator=least(1))
    """Token ids."""
    cameras: tuple[str, ...] = attrs.field(default=CAMERAS, validator=min_len(1))
    """Names of the cameras, in order; rows may lack some."""
    prompt: int = attrs.field(default=200, validator=least(1))
    """Most tokens of a prompt; all rows are padded to it."""
    horizon: int = attrs.field(default=50, validator=least(1))
    """Action steps that are predicted at once."""
    dims: int = attrs.field(default=32, validator=least(1))
    """Most dims of an action; narrower ones are filled up with zeros."""
    counted: Counted = "valid"
    """Which entries of an action chunk the loss counts: those of real steps and dims, or the two public conventions:
    `lerobot` counts every step of the real dims, `openpi` every step of all dims."""
    times: Times = Times()
    """Where the times of training come from."""
    periods: tuple[float, float] = attrs.field(default=(4e-3, 4.0))
    """Shortest and longest period of the time's embedding."""
    steps: int = attrs.field(default=10, validator=least(1))
    """Euler steps of a sample."""

    def __attrs_post_init__(self) -> None:
        same = ("depth", "heads", "kv_heads", "head_dim", "theta")
        differ = [name for name in same if getattr(self.vlm, name) != getattr(self.expert, name)]
        if differ:
            told = ", ".join(f"{n}: {getattr(self.vlm, n)} and {getattr(self.expert, n)}" for n in differ)
            raise ValueError(f"model.vlm and model.expert attend together but differ in {told}; make them equal")
        if self.expert.width % 2 or not 0 < self.periods[0] < self.periods[1]:
            raise ValueError(
                f"model.expert.width = {self.expert.width} must be even, and model.periods = {self.periods} rise from "
                "above 0: they make the time's embedding"
            )
        if len(set(self.cameras)) < len(self.cameras):
            raise ValueError(f"model.cameras = {self.cameras} names a camera twice; name each once")

    @property
    def space(self) -> ActionSpace:
        """What goes in and comes out."""
        return ActionSpace(
            cameras=self.cameras,
            image=self.vision.image,
            prompt=self.prompt,
            vocab=self.vocab,
            horizon=self.horizon,
            dims=self.dims,
            counted=self.counted,
        )


def time_embedding(time_B: Tensor, width: int, periods: tuple[float, float]) -> Tensor:
    """Returns sines, then cosines, of the times at periods in geometric progression: fp32 [B, W], computed in fp64."""
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time_B.device)
    period = periods[0] * (periods[1] / periods[0]) ** fraction
    angle = time_B[:, None].double() * (2.0 * math.pi / period)
    return torch.cat((angle.sin(), angle.cos()), dim=-1).float()


def visible(valid_BS: Tensor, blocks_S: Tensor) -> Tensor:
    """Returns which keys each query sees [B, S, S]: valid ones of its own block and of those before it.

    The model computes the same from the keys alone; this is the whole table, to look at and to compare.
    """
    before = blocks_S[None, :] <= blocks_S[:, None]
    return before & valid_BS[:, None, :] & valid_BS[:, :, None]


class Pi05Model(nn.Module):
    """The module of `Pi05`."""

    def __init__(self, cfg: Pi05) -> None:
        super().__init__()
        self.cfg = cfg
        width = cfg.expert.width
        self.vision = SiglipTower(cfg.vision)
        self.projector = nn.Linear(cfg.vision.width, cfg.vlm.width)
        self.embed = nn.Embedding(cfg.vocab, cfg.vlm.width)
        self.vlm = GemmaTower(cfg.vlm)
        self.expert = GemmaTower(cfg.expert, cond=width)
        self.action_in = nn.Linear(cfg.dims, width)
        self.action_out = nn.Linear(width, cfg.dims)
        self.time_in = nn.Linear(width, width)
        self.time_out = nn.Linear(width, width)

    def forward(
        self, images: Tensor, cameras: Tensor, prompt: Tensor, words: Tensor, noisy: Tensor, time: Tensor
    ) -> Tensor:
        """Returns the velocity [B, H, D] in fp32 of noisy actions [B, H, D] at times [B].

        `images` [B, C, 3, I, I] and `prompt` [B, P] count where `cameras` [B, C] and `words` [B, P] are true.
        """
        keys, valid_BL = self.observe(images, cameras, prompt, words)
        return self.velocity(keys, valid_BL, noisy, time)

    def observe(self, images: Tensor, cameras: Tensor, prompt: Tensor, words: Tensor) -> tuple[list[Keys], Tensor]:
        """Returns what actions need of an observation: each layer's keys and values, and which of them count [B, L]."""
        valid_BL = self.valid(cameras, words)
        embedded = self.embedded(images, prompt)
        _, keys = self.vlm(embedded, positions(valid_BL), valid_BL, keys_only=True)
        return keys, valid_BL

    def valid(self, cameras: Tensor, words: Tensor) -> Tensor:
        """Returns which tokens before the actions count [B, L]."""
        return torch.cat((cameras.repeat_interleave(self.cfg.vision.tokens, dim=1), words), dim=1)

    def embedded(self, images: Tensor, prompt: Tensor) -> Tensor:
        """Returns the tokens before the actions [B, L, W]; those of images are not divided by the root of the width."""
        seen = self.projector(self.vision(images.flatten(0, 1))).unflatten(0, images.shape[:2]).flatten(1, 2)
        said = scaled_embedding(self.embed, prompt)
        return torch.cat((seen, said.to(seen.dtype)), dim=1)

    def condition(self, time_B: Tensor) -> Tensor:
        """Returns the condition of the expert's norms [B, W] at times from 0 (actions) to 1 (noise)."""
        embedding = time_embedding(time_B, self.cfg.expert.width, self.cfg.periods)
        return F.silu(self.time_out(F.silu(self.time_in(embedding.to(self.time_in.weight.dtype)))))

    def velocity(self, keys: Sequence[Keys], valid_BL: Tensor, noisy_BHD: Tensor, time_B: Tensor) -> Tensor:
        """Returns the velocity [B, H, D] in fp32 of noisy actions, given what `observe` returned."""
        return self.action(self.hidden(keys, valid_BL, noisy_BHD, time_B))

    def hidden(self, keys: Sequence[Keys], valid_BL: Tensor, noisy_BHD: Tensor, time_B: Tensor) -> Tensor:
        """Returns what `velocity` is a linear function of [B, H, W]: the expert's normalised output."""
        suffix = self.suffix(noisy_BHD, keys[0][0].dtype)
        after = valid_BL.sum(1, keepdim=True) + torch.arange(suffix.shape[1], device=suffix.device)
        seen = F.pad(valid_BL, (0, suffix.shape[1]), value=True)
        out, _ = self.expert(suffix, after, seen, keys, self.condition(time_B))
        return out

    def suffix(self, noisy_BHD: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the tokens of noisy actions [B, H, W]."""
        return self.action_in(noisy_BHD.to(self.action_in.weight.dtype)).to(dtype)

    def action(self, hidden_BHW: Tensor) -> Tensor:
        """Returns the velocity [B, H, D] in fp32 of the expert's normalised output."""
        return self.action_out(hidden_BHW.to(self.action_out.weight.dtype)).float()


def noisy(actions_BHD: Tensor, noise_BHD: Tensor, time_B: Tensor) -> Tensor:
    """Returns the straight path from actions (time 0) to noise (time 1)."""
    time = time_B[:, None, None]
    return time * noise_BHD + (1.0 - time) * actions_BHD


# A config that is read back from JSON imports this file alone, and needs the family's rules.
import lf.models.embodied.pi05  # noqa: E402, F401
