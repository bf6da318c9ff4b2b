"""Compares a model with the numbers that a public implementation recorded for it.

A golden folder of a language model is a Hugging Face checkpoint folder with `io.safetensors` beside it: the inputs of
the public model by the names of its forward, `labels` (unshifted, -100 ignored), and what it gave: `logits`, `loss`
(the mean over the targets) and `grad.<checkpoint key>` of that loss. With a head for the token after next it also has
`mtp_logits`, `mtp_loss` and `total_loss`, and the gradients are those of the total.

One of a robot or video model has `weights.safetensors`, `inputs.safetensors` with all random draws, and
`outputs.safetensors`: what the family's rule of `golden` names, `grad.<checkpoint key>`, `gradnorm.<key>` and
`gradnorm_total`, the norm of all. In a
checkpoint folder of such a model `io.safetensors` holds both inputs and outputs, of which `sample` and `loss` are known
by their names.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lf.models import weights
from lf.models.hf_folder import open_folder, parse_config
from lf.models.layouts import fitted, fitted_to
from lf.models.recorded import recorded_rows
from lf.models.spec import (
    Batch,
    Ctx,
    Layout,
    ModelConfig,
    collate,
    forward,
    golden,
    has_rule,
    loss_coefficients,
    loss_terms,
    loss_weights,
    slice_batch,
    weight_map,
)
from lf.parallel.megatron import placements
from lf.terminal import say
from lf.train.start import Start, load_model, open_start
from lf.train.step import to_device, weighted_loss

TOLERANCES = {
    "logits": 1e-4,
    "mtp_logits": 1e-4,
    "loss": 2e-5,
    "mtp_loss": 2e-5,
    "total_loss": 2e-5,
    "grads": 1e-4,
}
"""Largest difference over the largest reference, in fp32, that an honest language model may show."""

RECORDED = {"outputs": 2e-5, "grads": 5e-5}
"""The same of a robot or video model."""

_OUTPUTS = ("sample", "loss")

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
    limits: Mapping[str, float]
    """Largest difference of each output by name, of other outputs (`outputs`) and of gradients (`grads`)."""

    @property
    def ok(self) -> bool:
        """Whether every recorded output and gradient is there and near enough."""
        others = self.limits.get("outputs", 0.0)
        outputs = [(value, self.limits.get(name, others)) for name, value in self.outputs.items()]
        grads = [(value, self.limits["grads"]) for value in self.grads.values()]
        return bool(outputs) and all(value is not None and value <= limit for value, limit in outputs + grads)


def difference(value: Tensor | None, reference: Tensor) -> float | None:
    """Returns the largest difference over the largest reference; None without a value or for another shape."""
    if value is None or value.shape != reference.shape:
        return None
    reference = reference.double()
    scale, worst = float(reference.abs().max()), float((value.to(reference) - reference).abs().max())
    return worst / scale if scale >= ZERO else worst


def compare(folder: Path, ctx: Ctx) -> Parity:
    """Returns how far lf is from a golden folder; raises ValueError for an unknown family."""
    if (folder / "inputs.safetensors").is_file():
        return _compare_recorded(folder, Ctx(device=ctx.device))
    start = open_start(str(folder), None)
    recorded = load_file(folder / "io.safetensors", device=ctx.device.torch_type)
    if has_rule(golden, start.model):
        outputs = {name: value for name, value in recorded.items() if name in _OUTPUTS or name.startswith("grad.")}
        return _compare_all(folder, start, Ctx(device=ctx.device), recorded, outputs)
    model = load_model(start, ctx)
    table = fitted_to(weight_map(start.model), open_folder(folder))
    outputs, grads = _outputs(start.model, model, recorded), _gradients(start.model, model, recorded, table, ctx)
    return judge(folder, recorded, outputs, grads)


def judge(
    folder: Path, recorded: Mapping[str, Tensor], outputs: Mapping[str, Tensor], grads: Mapping[str, Tensor]
) -> Parity:
    """Returns how far outputs and gradients are from all that a golden folder has recorded."""
    file = folder / "config.json"
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
        limits=TOLERANCES,
    )


def _compare_recorded(folder: Path, ctx: Ctx) -> Parity:
    start = open_start(str(folder), None, stems=("weights",))
    inputs, recorded = (
        load_file(folder / f"{name}.safetensors", device=ctx.device.torch_type) for name in ("inputs", "outputs")
    )
    return _compare_all(folder, start, ctx, inputs, recorded)


def _compare_all(
    folder: Path, start: Start, ctx: Ctx, inputs: Mapping[str, Tensor], recorded: Mapping[str, Tensor]
) -> Parity:
    """Returns how far what `golden` makes of the inputs is from all that was recorded."""
    model = load_model(start, ctx)
    file = folder / "config.json"
    made = golden(start.model, model, inputs, parse_config(file, file.read_bytes()))
    made.loss.backward()
    params = dict(model.named_parameters())

    def grad_of(name: str) -> Tensor:
        grad = params[name].grad
        return torch.zeros_like(params[name]) if grad is None else grad

    names = [kept.name for kept in start.source.tensors] if start.source else []
    grads = dict(weights.export(fitted(weight_map(start.model), names), grad_of))
    found = {f"grad.{name}": grad for name, grad in grads.items()}
    found |= {f"gradnorm.{name}": grad.norm() for name, grad in grads.items()}
    total = torch.stack([grad.double().norm() for grad in grads.values()]).norm()
    results = {**made.outputs, "gradnorm_total": total}
    outputs = {name: value for name, value in recorded.items() if not name.startswith(("grad.", "gradnorm."))}
    wanted = {name: value for name, value in recorded.items() if name not in outputs}
    return Parity(
        folder=str(folder),
        family=type(start.model).__name__.lower(),
        outputs={name: difference(_like(results.get(name), value), value) for name, value in outputs.items()},
        grads={name.removeprefix("grad."): difference(found.get(name), value) for name, value in wanted.items()},
        limits=RECORDED,
    )


def _like(value: Tensor | None, reference: Tensor) -> Tensor | None:
    """Returns a single number in the shape in which it was recorded; other tensors as they are."""
    return value.reshape(reference.shape) if value is not None and value.numel() == reference.numel() == 1 else value


def _valid(value: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the entries of [B, S, ...] that are no padding; other tensors as they are."""
    return value[mask.bool()] if mask is not None and value.shape[:2] == mask.shape else value


def _batch(cfg: ModelConfig, recorded: Mapping[str, Tensor]) -> Batch:
    rows = recorded_rows(cfg, recorded)
    whole = to_device(collate(cfg, rows, rows[0]), recorded["input_ids"].device.type)
    return slice_batch(cfg, whole, Layout())


def _outputs(cfg: ModelConfig, model: nn.Module, recorded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns logits and mean losses, those of further heads under names of their own, and the total loss."""
    batch = _batch(cfg, recorded)
    unlabelled = {name: value for name, value in batch.items() if not name.startswith("labels")}
    with torch.no_grad():
        logits, losses = forward(cfg, model, unlabelled), loss_terms(cfg, forward(cfg, model, batch), batch)
    counts = loss_weights(cfg, batch)
    return named_outputs(cfg, by_term(logits), {name: losses[name] / counts[name] for name in losses})


def named_outputs(cfg: ModelConfig, logits: Mapping[str, Tensor], means: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns logits and mean losses by term under their recorded names, and the total loss."""
    factors = loss_coefficients(cfg)
    made = {_recorded(name, "logits"): value for name, value in logits.items()}
    made |= {_recorded(name, "loss"): value.reshape(1) for name, value in means.items()}
    total = torch.stack([factors.get(name, 1.0) * value for name, value in means.items()]).sum()
    return {**made, "total_loss": total.reshape(1)}


def by_term(output: Any) -> Mapping[str, Tensor]:
    """Returns a model's output by loss term."""
    return output if isinstance(output, dict) else {"lm": output}


def _recorded(term: str, kind: str) -> str:
    """Returns the recorded name of a term's loss or logits: plain for the model's own, `mtp_...` for its first head."""
    return kind if term == "lm" else f"{term.removesuffix('1')}_{kind}"


def _gradients(
    cfg: ModelConfig, model: nn.Module, recorded: Mapping[str, Tensor], table: weights.WeightMap, ctx: Ctx
) -> dict[str, Tensor]:
    """Returns the gradients of the loss under Hugging Face names: they go through the weight map as weights do."""
    batch = _batch(cfg, recorded)
    totals = {name: float(weight) for name, weight in loss_weights(cfg, batch).items()}
    weighted_loss(cfg, loss_terms(cfg, forward(cfg, model, batch), batch), totals).backward()
    by_name = {placed.name: param for param, placed in placements(model, ctx)}

    def get(name: str) -> Tensor:
        param = by_name[name]
        grad = param.grad if param.requires_grad else torch.zeros_like(param)
        assert grad is not None
        return grad

    return dict(weights.export(table, get))


def to_json(parity: Parity) -> dict[str, Any]:
    """Returns a comparison as one JSON object."""
    fields = attrs.asdict(parity, filter=lambda field, _: field.name != "limits")
    return {**fields, "ok": parity.ok}


def report(folders: Iterable[Path], compare: Callable[[Path], Mapping[str, Any]]) -> int:
    """Prints a line for each folder on rank 0 and returns the exit code."""
    code = 0
    for folder in folders:
        try:
            line = compare(folder)
            code = max(code, int(not line["ok"]))
        except Exception as error:  # Of a folder from elsewhere, anything may be missing.
            line, code = {"folder": str(folder), "error": f"{type(error).__name__}: {error}", "ok": False}, 2
        say(json.dumps(line))
    return code
