"""What robot models share: rows of a dataset as a batch, images at the model's size, random draws by sample.

Shapes: B rows, C cameras, I pixels of a side, H action steps, D action dims of the model, d those of the robot,
P prompt tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import torch
from torch import Tensor

from lf.models.initialise import seed_of
from lf.models.pictures import resize_with_pad
from lf.models.ranges import above, least
from lf.models.spec import Batch

Counted = Literal["valid", "lerobot", "openpi"]
"""Which entries of an action chunk the loss counts: `valid` those of real steps and real dims; `lerobot` the real dims
of every step, those after the end of the episode too; `openpi` all, the dims that only fill the model's width too."""


@attrs.frozen(kw_only=True)
class ActionSpace:
    """What goes into a robot model and comes out of it."""

    cameras: tuple[str, ...]
    """Names of the cameras, in the model's order."""
    image: int
    """Pixels of a side of an image."""
    prompt: int
    """Most tokens of a prompt."""
    vocab: int
    """Token ids."""
    horizon: int
    """Steps of an action chunk."""
    dims: int
    """Most dims of an action."""
    counted: Counted
    """Which entries of a chunk the loss counts."""


@attrs.frozen(kw_only=True)
class Times:
    """Where the times of flow matching come from: `offset + scale * Beta(alpha, beta)`; 1 is noise."""

    alpha: float = attrs.field(default=1.5, validator=above(0.0))
    """First parameter of the Beta distribution."""
    beta: float = attrs.field(default=1.0, validator=above(0.0))
    """Second parameter of the Beta distribution."""
    scale: float = attrs.field(default=0.999, validator=above(0.0))
    """Factor on the draw."""
    offset: float = attrs.field(default=0.001, validator=least(0.0))
    """Added to the draw; the least time."""


def robot_batch(space: ActionSpace, rows: Sequence[Mapping[str, Any] | None]) -> Batch:
    """Returns the micro-batch of rows of a robot dataset; None becomes a row of no weight.

    A row has

        images         camera name -> uint8 [3, h, w], or floats from 0 to 1; a camera left out is masked
        prompt         token ids, at most P
        actions        normalised actions [H, d]
        action_is_pad  bool [H]: steps after the end of the episode
        id             the sample's id

    and the batch has `images` [B, C, 3, I, I] from -1 to 1, `cameras` [B, C] (which are there), `prompt` [B, P] and
    `words` [B, P] (which are no padding), `actions` [B, H, D], `dims` [B, D] (which are the robot's), `counted`
    [B, H, D] (what the loss counts), `ids`, and `count`, its samples. Where steps after the end do not count, they get
    the last real action, so that what a reader pads with has no influence. Raises ValueError with the row's id for what
    the model cannot take.
    """
    made = [_row(space, row) if row is not None else _blank(space) for row in rows]
    names = ("images", "cameras", "prompt", "words", "actions", "dims", "counted")
    return {
        **{name: torch.stack([row[name] for row in made]) for name in names},
        "ids": tuple("padding" if row is None else row["id"] for row in rows),
        "count": sum(row is not None for row in rows),
    }


def trimmed(batch: Batch) -> Batch:
    """Returns the batch without cameras that no row has, and without what is padding in every row's prompt.

    A model computes the same without them, in less time. Prompts stay a multiple of 8 tokens long where they can, which
    kernels like, and of which compiled units see few. One camera stays, so that all ranks call the same modules.
    """
    there = batch["cameras"].any(0)
    there[0] |= ~there.any()
    words = batch["words"].any(0).nonzero().max() + 1
    most = min(-(-int(words) // 8) * 8, batch["words"].shape[1])
    cameras = {name: batch[name][:, there] for name in ("images", "cameras")}
    return {**batch, **cameras, **{name: batch[name][:, :most] for name in ("prompt", "words")}}


def _blank(space: ActionSpace) -> dict[str, Tensor]:
    return {
        "images": torch.full((len(space.cameras), 3, space.image, space.image), -1.0),
        "cameras": torch.zeros(len(space.cameras), dtype=torch.bool),
        "prompt": torch.zeros(space.prompt, dtype=torch.long),
        # Attention needs a key to look at.
        "words": torch.arange(space.prompt) < 1,
        "actions": torch.zeros(space.horizon, space.dims),
        "dims": torch.zeros(space.dims, dtype=torch.bool),
        "counted": torch.zeros(space.horizon, space.dims, dtype=torch.bool),
    }


def _row(space: ActionSpace, row: Mapping[str, Any]) -> dict[str, Tensor]:
    made, ident = _blank(space), row["id"]
    images = row.get("images", {})
    unknown = sorted(set(images) - set(space.cameras))
    if unknown or not images:
        said = f"has the camera {unknown[0]}" if unknown else "has no camera"
        raise ValueError(
            f"row {ident} {said}, and the model's are {', '.join(space.cameras)}; map the dataset's names to these"
        )
    for at, camera in enumerate(space.cameras):
        if camera in images:
            made["images"][at] = fitted_image(torch.as_tensor(images[camera]), space.image)
            made["cameras"][at] = True
    prompt = torch.as_tensor(row["prompt"], dtype=torch.long)
    _check_prompt(space, ident, prompt)
    made["prompt"][: len(prompt)] = prompt
    made["words"] = torch.arange(space.prompt) < len(prompt)
    actions, past = torch.as_tensor(row["actions"], dtype=torch.float32), torch.as_tensor(row["action_is_pad"])
    _check_actions(space, ident, actions, past)
    if space.counted == "valid":
        actions = torch.where(past[:, None], actions[(~past).nonzero().max()], actions)
    made["actions"][:, : actions.shape[1]] = actions
    made["dims"] = torch.arange(space.dims) < actions.shape[1]
    steps = torch.ones_like(past) if space.counted != "valid" else ~past
    dims = torch.ones_like(made["dims"]) if space.counted == "openpi" else made["dims"]
    made["counted"] = steps[:, None] & dims
    return made


def _check_prompt(space: ActionSpace, ident: str, prompt: Tensor) -> None:
    if not 1 <= len(prompt) <= space.prompt:
        raise ValueError(
            f"row {ident}: its prompt has {len(prompt)} tokens, the model takes 1 to {space.prompt}; shorten the "
            "task's text, or raise model.prompt"
        )
    if int(prompt.min()) < 0 or int(prompt.max()) >= space.vocab:
        raise ValueError(
            f"row {ident}: its prompt has token ids from {int(prompt.min())} to {int(prompt.max())}, the model's go "
            f"from 0 to {space.vocab - 1}; use the model's tokenizer, or raise model.vocab"
        )


def _check_actions(space: ActionSpace, ident: str, actions: Tensor, past: Tensor) -> None:
    if actions.ndim != 2 or len(actions) != space.horizon or not 1 <= actions.shape[1] <= space.dims:
        raise ValueError(
            f"row {ident}: its actions are {list(actions.shape)}, the model takes [{space.horizon}, 1 to {space.dims}]"
            "; set model.horizon and model.dims to the data's, or the data's chunk to the model's"
        )
    if past.dtype != torch.bool or past.shape != actions.shape[:1]:
        raise ValueError(
            f"row {ident}: action_is_pad is {past.dtype} {list(past.shape)}; it must be bool [{space.horizon}]"
        )
    if bool(past.all()):
        raise ValueError(f"row {ident}: every action step is padding; leave such rows out of the data")
    if not bool(torch.isfinite(actions[~past]).all()):
        raise ValueError(f"row {ident}: its actions are not all finite; mend or leave out the episode")


def fitted_image(image_3hw: Tensor, size: int) -> Tensor:
    """Returns an image as fp32 [3, I, I] from -1 to 1, as large as fits in the square, on black.

    uint8 goes from 0 to 255 and is so again after it was resized, as in openpi; floats go from 0 to 1.
    """
    if image_3hw.ndim != 3 or image_3hw.shape[0] != 3:
        raise ValueError(f"an image has the shape {list(image_3hw.shape)}; [3, height, width] is expected")
    whole = image_3hw.dtype == torch.uint8
    image, high = image_3hw.float(), 255.0 if whole else 1.0
    if image.shape[1:] != (size, size):
        image = resize_with_pad(image[None], size, 0.0, high)[0]
        image = image.round() if whole else image
    return image * (2.0 / high) - 1.0


def with_draws(batch: Batch, times: Times, seed: int, step: int) -> Batch:
    """Returns the batch with `noise` [B, H, D] and `time` [B]: a row's are functions of (seed, step, its id) alone."""
    shape = batch["actions"].shape[1:]
    noise = [
        torch.randn(shape, generator=torch.Generator().manual_seed(seed_of(seed, step, "noise", ident)))
        for ident in batch["ids"]
    ]
    drawn = [np.random.default_rng(seed_of(seed, step, "time", i)).beta(times.alpha, times.beta) for i in batch["ids"]]
    time = torch.tensor(drawn, dtype=torch.float64) * times.scale + times.offset
    return {**batch, "noise": torch.stack(noise), "time": time.float()}


def fake_rows(space: ActionSpace, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns random rows that differ in everything that rows may differ in: cameras, prompts, dims, padded steps."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        there = space.cameras[: max(1, len(space.cameras) - i % 2)]
        size = (3, space.image, space.image)
        real = int(rng.integers(1, space.horizon + 1))
        words, dims = int(rng.integers(1, space.prompt + 1)), max(1, space.dims - 1 - i % 2)
        rows.append(
            {
                "images": {name: rng.integers(0, 256, size, dtype=np.uint8) for name in there},
                "prompt": rng.integers(0, space.vocab, words),
                "actions": rng.uniform(-1.0, 1.0, (space.horizon, dims)).astype(np.float32),
                "action_is_pad": np.arange(space.horizon) >= real,
                "id": f"fake:{seed}:{i}",
            }
        )
    return rows


def quantile_normalised(x: np.ndarray, low: np.ndarray, high: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Returns x [..., d] with the quantiles `low` and `high` [d] at -1 and about 1, not clipped, as openpi does."""
    return (x - low) / (high - low + eps) * 2.0 - 1.0


def quantile_unnormalised(x: np.ndarray, low: np.ndarray, high: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Returns what `quantile_normalised` was given."""
    return (x + 1.0) / 2.0 * (high - low + eps) + low


def state_bins(state: np.ndarray, bins: int = 256) -> np.ndarray:
    """Returns which of the bins from -1 to 1 each number of a normalised state falls into, from 0.

    The ends are open, as openpi has them: -1 is below all bins, and the last bin has no upper end.
    """
    return np.digitize(state, np.linspace(-1.0, 1.0, bins + 1)[:-1]) - 1


def mean_normalised(x: np.ndarray, mean: np.ndarray, std: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Returns x [..., d] with mean 0 and deviation about 1, as openpi does."""
    return (x - mean) / (std + eps)
