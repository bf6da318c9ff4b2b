"""Compares a model with the numbers that a public implementation recorded for it.

A golden folder is a Hugging Face checkpoint folder with `io.safetensors` beside it: the inputs of the public model by
the names of its forward, `labels` (unshifted, -100 ignored), and what it gave: `logits`, `loss` (the mean over the
targets) and `grad.<checkpoint key>` of that loss. With a head for the token after next it also has `mtp_logits`,
`mtp_loss` and `total_loss`, and the gradients are those of the total.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from lf.models import weights
from lf.models.hf_folder import parse_config
from lf.models.spec import (
    IGNORE,
    Batch,
    Ctx,
    Layout,
    ModelConfig,
    forward,
    loss_coefficients,
    loss_terms,
    loss_weights,
    slice_batch,
    weight_map,
)
from lf.parallel.megatron import placements
from lf.train.start import load_model, open_start
from lf.train.step import weighted_loss

TOLERANCES = {"logits": 1e-4, "loss": 2e-5, "grads": 1e-4}
"""Largest difference over the largest reference, in fp32, that an honest implementation may show."""

ZERO = 1e-7
"""A reference that is nowhere larger is compared absolutely: it is an analytic zero."""


@attrs.frozen(kw_only=True)
class Parity:
    """How far a model is from a golden folder."""

    folder: str
    """The folder."""
    family: str
    """Its model_type."""
    outputs: Mapping[str, float | None]
    """Difference of each recorded output; None where lf cannot produce it."""
    grads: Mapping[str, float | None]
    """Difference of each recorded gradient; None where lf cannot produce it."""

    @property
    def ok(self) -> bool:
        """Whether every recorded output and gradient is there and near enough."""
        outputs = [(value, TOLERANCES[name.rpartition("_")[2]]) for name, value in self.outputs.items()]
        grads = [(value, TOLERANCES["grads"]) for value in self.grads.values()]
        return bool(outputs) and all(value is not None and value <= limit for value, limit in outputs + grads)


def difference(value: Tensor | None, reference: Tensor) -> float | None:
    """Returns the largest difference over the largest reference; None without a value or for another shape."""
    if value is None or value.shape != reference.shape:
        return None
    scale = float(reference.abs().max())
    worst = float((value.double() - reference.double()).abs().max())
    return worst / scale if scale >= ZERO else worst


def compare(folder: Path, ctx: Ctx) -> Parity:
    """Returns how far lf is from a golden folder of a language model; raises ValueError for an unknown family."""
    start, file = open_start(str(folder), None), folder / "config.json"
    recorded = load_file(folder / "io.safetensors", device=ctx.device.torch_type)
    model = load_model(start, ctx)
    outputs, grads = _outputs(start.model, model, recorded), _gradients(start.model, model, recorded, ctx)
    known = {name: value for name, value in recorded.items() if name.endswith(("logits", "loss"))}
    mask = recorded.get("attention_mask")
    kept = {name: _valid(value, mask) for name, value in known.items()}
    made = {name: _valid(value, mask) for name, value in outputs.items()}
    wanted = {name.removeprefix("grad."): value for name, value in recorded.items() if name.startswith("grad.")}
    return Parity(
        folder=str(folder),
        family=str(parse_config(file, file.read_bytes())["model_type"]),
        outputs={name: difference(made.get(name), value) for name, value in kept.items()},
        grads={name: difference(grads.get(name), value) for name, value in wanted.items()},
    )


def _valid(value: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the entries of [B, S, ...] that are no padding; other tensors as they are."""
    return value[mask.bool()] if mask is not None and value.shape[:2] == mask.shape else value


def _batch(recorded: Mapping[str, Tensor], labels: bool) -> Batch:
    tokens = recorded["input_ids"]
    rows, length = tokens.shape
    batch: dict[str, Any] = {
        "tokens": tokens,
        "positions": torch.arange(length, device=tokens.device).expand(rows, length),
        "lengths": (length,) * rows,
        "ids": tuple(f"golden:{i}" for i in range(rows)),
        "count": tokens.numel(),
    }
    if labels:
        batch["labels"] = F.pad(recorded["labels"][:, 1:], (0, 1), value=IGNORE)
    return batch


def _outputs(cfg: ModelConfig, model: nn.Module, recorded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns logits and mean losses, those of further heads under names of their own, and the total loss."""
    batch = slice_batch(cfg, _batch(recorded, labels=True), Layout())
    unlabelled = {name: value for name, value in batch.items() if not name.startswith("labels")}
    with torch.no_grad():
        logits, losses = forward(cfg, model, unlabelled), loss_terms(cfg, forward(cfg, model, batch), batch)
    counts, factors = loss_weights(cfg, batch), loss_coefficients(cfg)
    means = {name: losses[name] / counts[name] for name in losses}
    made = {_recorded(name, "logits"): value for name, value in _by_term(logits).items()}
    made |= {_recorded(name, "loss"): value.reshape(1) for name, value in means.items()}
    total = torch.stack([factors.get(name, 1.0) * value for name, value in means.items()]).sum()
    return {**made, "total_loss": total.reshape(1)}


def _by_term(output: Any) -> Mapping[str, Tensor]:
    return output if isinstance(output, dict) else {"lm": output}


def _recorded(term: str, kind: str) -> str:
    """Returns the recorded name of a term's loss or logits: plain for the model's own, `mtp_...` for its first head."""
    return kind if term == "lm" else f"{term.removesuffix('1')}_{kind}"


def _gradients(cfg: ModelConfig, model: nn.Module, recorded: Mapping[str, Tensor], ctx: Ctx) -> dict[str, Tensor]:
    """Returns the gradients of the loss under Hugging Face names: they go through the weight map as weights do."""
    batch = slice_batch(cfg, _batch(recorded, labels=True), Layout())
    totals = {name: float(weight) for name, weight in loss_weights(cfg, batch).items()}
    weighted_loss(cfg, loss_terms(cfg, forward(cfg, model, batch), batch), totals).backward()
    by_name = {placed.name: param for param, placed in placements(model, ctx)}

    def get(name: str) -> Tensor:
        param = by_name[name]
        grad = param.grad if param.requires_grad else torch.zeros_like(param)
        assert grad is not None
        return grad

    return dict(weights.export(weight_map(cfg), get))


def to_json(parity: Parity) -> dict[str, Any]:
    """Returns a comparison as one JSON object."""
    return {**attrs.asdict(parity), "ok": parity.ok}
