"""Everything that openpi's Pi0.5 was recorded to compute, from lf's own functions: for parity alone."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lf.models import spec
from lf.models.embodied import robot
from lf.models.embodied.pi05_model import Pi05, Pi05Model, noisy, time_embedding, visible
from lf.models.embodied.pi05_sample import euler
from lf.models.layers.gemma import positions
from lf.models.pictures import resize_with_pad


def golden(cfg: Pi05, model: Pi05Model, inputs: Mapping[str, Tensor], real: int) -> spec.Golden:
    """Returns the outputs by their recorded names, and the mean over all dims, which was differentiated.

    `inputs` has `image.<i>` and `image_mask.<i>` of each camera, `tokens`, `token_mask`, `actions`, `noise`, `time`,
    `sample_noise`, and `pre.*` for the functions before the model; `real` is the robot's action dims.
    """
    count = len(cfg.cameras)
    images = torch.stack([inputs[f"image.{i}"] for i in range(count)], dim=1)
    cameras = torch.stack([inputs[f"image_mask.{i}"] for i in range(count)], dim=1)
    prompt, words, time = inputs["tokens"], inputs["token_mask"], inputs["time"]
    x_t, u_t = noisy(inputs["actions"], inputs["noise"], time), inputs["noise"] - inputs["actions"]
    v_t = model(images, cameras, prompt, words, x_t, time)
    losses = (u_t - v_t).square()
    with torch.no_grad():
        made = _inside(model, images, cameras, prompt, words, x_t, time)
        keys, valid = model.observe(images, cameras, prompt, words)
        sampled = euler(model, keys, valid, inputs["sample_noise"], cfg.steps, None)
        made |= {"suffix_hidden": model.hidden(keys, valid, x_t, time)}
    made |= {
        "x_t": x_t,
        "u_t": u_t,
        "v_t": v_t.detach(),
        "loss_per_element": losses.detach(),
        "loss_mean_all_dims": losses.mean().detach(),
        "loss_mean_real_dims": losses[..., :real].mean().detach(),
        "sampled_actions": sampled.actions,
        "sample_times": sampled.times,
        "sample_v_first_step": sampled.first,
        "sample_v_last_step": sampled.last,
    }
    return spec.Golden(outputs={**made, **_before(cfg, inputs)}, loss=losses.mean())


def _inside(
    model: Pi05Model, images: Tensor, cameras: Tensor, prompt: Tensor, words: Tensor, x_t: Tensor, time: Tensor
) -> dict[str, Tensor]:
    """Returns what happens inside the model; hidden states of padding mean nothing and are zero."""
    cfg = model.cfg
    before, embedded = model.valid(cameras, words), model.embedded(images, prompt)
    hidden, _ = model.vlm(embedded, positions(before), before)
    valid = torch.nn.functional.pad(before, (0, cfg.horizon), value=True)
    blocks = torch.arange(valid.shape[1], device=valid.device) >= before.shape[1]
    return {
        "time_emb": time_embedding(time, cfg.expert.width, cfg.periods),
        "adarms_cond": model.condition(time),
        "prefix_embs": embedded,
        "prefix_hidden": torch.where(before[..., None], hidden, 0.0),
        "suffix_embs": model.action_in(x_t),
        "pad_mask": valid,
        "position_ids": positions(valid),
        "attention_mask_2d": visible(valid, blocks.long()),
    }


def _before(cfg: Pi05, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns what the functions before the model make of images, states and actions."""
    raw, low, high = (inputs[f"pre.{name}"].cpu().double().numpy() for name in ("state_raw", "q01", "q99"))
    mean, std = (inputs[f"pre.{name}"].cpu().double().numpy() for name in ("mean", "std"))
    normal = robot.quantile_normalised(raw, low, high)
    edges = inputs["pre.bin_edges_in"].cpu().numpy()
    made = {
        "pre.state_quantile_normalized": normal,
        "pre.action_unnormalized": robot.quantile_unnormalised(normal, low, high),
        "pre.state_meanstd_normalized": robot.mean_normalised(raw, mean, std),
        "pre.state_bins": robot.state_bins(normal),
        "pre.bin_edges_out": robot.state_bins(edges),
    }
    image = resize_with_pad(inputs["pre.image"].permute(0, 3, 1, 2), cfg.vision.image).permute(0, 2, 3, 1)
    return {"pre.image_resized_padded": image, **{name: torch.from_numpy(value) for name, value in made.items()}}
