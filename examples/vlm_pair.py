"""An InternViT and a Qwen3, a pair that nobody publishes, learn to name the colour and the place of a square.

Hardware: a CPU with 2 cores. Time: about a minute. Result: held-out loss near 0, where guessing costs 1.4 nats a token.
The export in `hf/` has a layout of lf's own, which its config.json states. `vlm_pair.py:apart` is for 4 processes.
"""

import attrs
import numpy as np

import lf
from lf.data.source import DataCtx, Row, open_data
from lf.models.decoder import Attention, Mlp
from lf.models.llm.qwen import Qwen3
from lf.models.media import Media
from lf.models.spec import IGNORE
from lf.models.vision.intern_vit import InternVision
from lf.models.vision.projector import Projector
from lf.models.vlm import Vlm

SIDE, PATCH = 32, 4
IMAGE, ASK, COLOURS, PLACES = 1, 2, 3, 7
GRID = (1, SIDE // PATCH, SIDE // PATCH)
TOKENS = GRID[1] * GRID[2] // 4
LENGTH = TOKENS + 4
PAINTS = np.array([(1, -1, -1), (-1, 1, -1), (-1, -1, 1), (1, 1, -1)], np.float32)


@attrs.frozen(kw_only=True)
class Squares(lf.DataConfig):
    """Pictures of one square, with its colour and its quarter of the picture as the answer."""

    rows: int = 4096
    """Pictures."""
    seed: int = 0
    """Seed of the pictures; other seeds have other ones."""


@attrs.frozen
class SquareRows:
    """The rows of `Squares`."""

    cfg: Squares

    def __len__(self) -> int:
        return self.cfg.rows

    def row(self, epoch: int, index: int) -> Row:
        """Returns one picture, the question and its answer of two tokens."""
        rng = np.random.default_rng((self.cfg.seed, index))
        colour, place = rng.integers(0, 4, 2)
        pixels = rng.normal(0, 0.1, (3, SIDE, SIDE)).astype(np.float32)
        top, left = (int(at) * SIDE // 2 + rng.integers(0, 8) for at in divmod(place, 2))
        pixels[:, top : top + 8, left : left + 8] += PAINTS[colour][:, None, None]
        tokens = np.array([0, *[IMAGE] * TOKENS, ASK, COLOURS + colour, PLACES + place])
        labels = np.full(LENGTH, IGNORE)
        labels[-3:-1] = tokens[-2:]
        split = pixels.reshape(3, GRID[1], PATCH, GRID[2], PATCH).transpose(1, 3, 0, 2, 4)
        return {
            "tokens": tokens,
            "labels": labels,
            "lengths": (LENGTH,),
            "real": LENGTH,
            "id": f"square:{self.cfg.seed}:{index}",
            "media": (Media(grids=(GRID,)),),
            "patches": split.reshape(-1, 3 * PATCH**2),
        }

    def describe(self) -> dict[str, int]:
        """Returns the facts of the source."""
        return {"rows": self.cfg.rows, "vocab": PLACES + 4, "length": LENGTH}


@open_data.register
def _(cfg: Squares, ctx: DataCtx) -> SquareRows:
    return SquareRows(cfg)


MODEL = Vlm(
    vision=InternVision(width=64, depth=2, mlp=128, heads=4, image=SIDE, patch=PATCH),
    projector=Projector(over="block", eps=1e-5),
    text=Qwen3(
        vocab=16,
        hidden=64,
        layers=2,
        attention=Attention(heads=4, kv_heads=2, head_dim=16, qk_norm=True),
        mlp=Mlp(width=128),
        max_length=64,
    ),
    image_token=IMAGE,
    video_token=IMAGE,
)

cfg = lf.Run(
    model=MODEL,
    data=Squares(),
    batch=32,
    optim=lf.AdamW(lr=3e-3, schedule=lf.Cosine(warmup=20)),
    parallel=lf.MegatronParallel(micro_batch=32),
    steps=200,
    eval=lf.Eval(data=Squares(rows=256, seed=1), every=100, batches=4),
    log=lf.Log(every=20),
    save=lf.Save(every=100),
)
smoke = attrs.evolve(cfg, steps=20, eval=lf.Eval(data=Squares(rows=256, seed=1), every=20, batches=1))
apart = attrs.evolve(cfg, parallel=lf.Hetero(micro_batch=4, text=lf.MegatronParallel(tp=2, pp=2)))
"""The same on 4 processes: each encodes a quarter of the pictures, then two stages of two run the decoder."""
