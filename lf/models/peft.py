"""Adapters as folders of the `peft` package: `adapter_config.json` and `adapter_model.safetensors`, both ways.

PEFT names the layers of the Hugging Face model. Where lf keeps several of those in one layer (query, key and value),
each gets the same A and its rows of B, which is exact; of a foreign adapter, whose A differ, the layer's A has them one
below the other.

Shapes: I inputs, O outputs, r rank of the folder, R rank of the run.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lf.models import weights
from lf.models.hf_folder import HfFolder, few, open_folder, parse_config
from lf.models.hf_save import new_folder, write_safetensors
from lf.models.layouts import renamed
from lf.models.lora import Lora, adapted_weights, first_values, sides, weight_of
from lf.models.weights import LfRule, Shape, WeightMap, hf_names, hf_shapes, pieces, to_hf

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter."""
DIFFUSERS = "pytorch_lora_weights.safetensors"
"""What diffusers' pipelines read beside them."""
FILES = (CONFIG, WEIGHTS, DIFFUSERS)

_PREFIX = "base_model.model."
_SIDES = (".lora_A.weight", ".lora_B.weight")
_VARIANTS = ("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern")


def save_adapter(
    path: Path,
    cfg: Lora,
    table: WeightMap,
    names: Collection[str],
    trained: Collection[str],
    get: Callable[[str], Tensor],
    *,
    base: str,
    diffusers: bool = False,
    write: bool,
) -> None:
    """Writes the adapters of a run, and the tensors that it trains as they are, as a PEFT folder, in float32.

    With `diffusers`, the adapters are there again as `load_lora_weights` of a pipeline reads them. It takes alpha to be
    the rank, so B is multiplied by the scale; tensors that are trained as they are have no place in that file.

    `names` are all canonical names and `trained` those that are trained; `base` is what PEFT is told that the adapter
    belongs to. Every rank calls it, since `get` may be a collective; the one with `write` writes.
    """
    tensors: dict[str, Tensor] = {}
    targets: list[str] = []
    for weight in adapted_weights(names):
        a, b = (get(side).float() for side in sides(weight))
        for name, rows in to_hf(table.by_lf[weight], b).items():
            module = name.removesuffix(".weight")
            targets.append(module)
            tensors |= {_PREFIX + module + _SIDES[0]: a, _PREFIX + module + _SIDES[1]: rows}
    modules = {name.rpartition(".")[0] for lf in trained if not weight_of(lf) for name in hf_names(table.by_lf[lf])}
    # PEFT keeps whole modules: what is frozen of one is there too.
    for lf, rule in table.by_lf.items():
        if modules.intersection(name.rpartition(".")[0] for name in hf_names(rule)):
            made = to_hf(rule, get(lf))
            tensors |= {_PREFIX + name: t.float() for name, t in made.items() if name.rpartition(".")[0] in modules}
    if not write:
        return
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base or None,
        "r": cfg.rank,
        "lora_alpha": int(cfg.alpha) if cfg.alpha == int(cfg.alpha) else cfg.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "modules_to_save": sorted(modules) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    with new_folder(path, FILES) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_safetensors(folder / WEIGHTS, tensors, {"format": "pt"})
        if diffusers:
            sided = {name: tensor for name, tensor in tensors.items() if name.endswith(_SIDES)}
            named = {f"transformer.{name.removeprefix(_PREFIX)}": tensor for name, tensor in sided.items()}
            scaled = {name: t * cfg.scale if name.endswith(_SIDES[1]) else t for name, t in named.items()}
            write_safetensors(folder / DIFFUSERS, scaled, {"format": "pt"})


def read_adapter(cfg: Lora, table: WeightMap, seed: int, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Returns what `cfg.start` has of the tensors of an adapted model, whole and by canonical name.

    `shapes` are the global shapes of the model, adapters included. Of a layer's Hugging Face parts, some may lack: the
    rows of B start at zero. What is left of a larger rank starts as it would without a folder. Raises ValueError where
    the folder is no LoRA of this model that `cfg` can hold: nothing of it may be left out.
    """
    folder = Path(cfg.start).expanduser()
    scale = _scale(folder)
    if not math.isclose(scale, cfg.scale, rel_tol=1e-6):
        raise ValueError(
            f"{folder} multiplies its adapters by {scale:g}, and adapt by alpha / rank = {cfg.alpha:g} / {cfg.rank}; "
            f"set adapt.alpha to {scale * cfg.rank:g}"
        )
    opened = open_folder(folder, stems=["adapter_model"])
    layers, whole = _layers(opened, table, shapes)
    lacking = [weight for weight in adapted_weights(shapes) if weight not in layers]
    if lacking:
        raise ValueError(
            f"{folder} adapts nothing of {few(lacking)}, which adapt.targets names; leave the layers out, or start "
            "from an adapter that has them"
        )
    made: dict[str, Tensor] = {}
    for weight, parts in layers.items():
        a, b = sides(weight)
        made[a], made[b] = _joined(opened, table.by_lf[weight], parts, shapes[b], first_values(a, shapes[a], seed))
    prefixed = renamed(table, _PREFIX.__add__)
    for lf in whole:
        made[lf] = weights.read(prefixed, opened, weights.whole(lf, shapes[lf]), dtype=torch.float32)
    return made


def _scale(folder: Path) -> float:
    """Returns what a folder multiplies its adapters by; raises ValueError for what is no plain LoRA."""
    file = folder / CONFIG
    if not file.is_file():
        raise ValueError(f"{file} is missing; give adapt.start the folder of a PEFT adapter, or leave it empty")
    config: Mapping[str, Any] = parse_config(file, file.read_bytes())
    odd = {key: config[key] for key in _VARIANTS if config.get(key)}
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or odd:
        told = odd or {key: config.get(key) for key in ("peft_type", "bias")}
        raise ValueError(f"{file}: {told}; lf reads adapters of the type LORA without biases and variants")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise ValueError(f"{file}: r = {rank!r} and lora_alpha = {alpha!r} must be numbers, r at least 1")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _layers(opened: HfFolder, table: WeightMap, shapes: Mapping[str, Shape]) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the HF weights that a folder adapts, by the lf weight that holds them, and the tensors it has whole."""
    layers: dict[str, list[str]] = {}
    whole: set[str] = set()
    wrong: list[str] = []
    for key in opened.names:
        side = next((end for end in _SIDES if key.endswith(end)), "")
        name = key.removeprefix(_PREFIX)
        name = f"{name.removesuffix(side)}.weight" if side else name
        rule = table.by_hf.get(name) if key.startswith(_PREFIX) else None
        if not isinstance(rule, LfRule):
            wrong.append(key)
        elif side and sides(rule.lf)[0] in shapes:
            other = key.removesuffix(side) + _SIDES[side == _SIDES[0]]
            wrong += [] if other in opened.entries else [f"{key} without {other}"]
            layers.setdefault(rule.lf, []).extend([name] if side == _SIDES[0] else [])
        elif side or sides(rule.lf)[0] in shapes:
            wrong.append(key)
        else:
            whole.add(rule.lf)
    # A tensor that is given whole needs all of its parts.
    for lf in whole:
        wrong += [n for n in hf_names(table.by_lf[lf]) if _PREFIX + n not in opened.entries]
    if wrong:
        raise ValueError(
            f"{opened.path} does not fit adapt.targets and the model: {few(wrong)}; name the layers that it adapts, "
            "and give a model of the same family"
        )
    return layers, sorted(whole)


def _joined(opened: HfFolder, rule: LfRule, parts: Sequence[str], b_shape: Shape, a: Tensor) -> tuple[Tensor, Tensor]:
    """Returns A [R, I] and B [O, R] of a layer, from those of its HF parts; `a` has the first values of A."""
    (outputs, rank), inputs = b_shape, a.shape[1]
    rows = hf_shapes(rule, (outputs, inputs))
    found = {name: _sides(opened, name, (rows[name][0], inputs)) for name in parts}
    at, used = _columns([one for one, _ in found.values()])
    if used > rank:
        raise ValueError(
            f"{opened.path}: the parts of {rule.lf} ({few(parts)}) have adapters of rank {used} together, and "
            f"adapt.rank = {rank}; set adapt.rank to {used} or more, and adapt.alpha in proportion"
        )
    b = torch.zeros(b_shape)
    for first, (one, _) in zip(at, found.values(), strict=True):
        a[first : first + len(one)] = one
    for piece in pieces(rule, (outputs, inputs)):
        if piece.hf in found:
            one, other = found[piece.hf]
            first, (mine, theirs), size = at[parts.index(piece.hf)], (piece.lf_at[0], piece.hf_at[0]), piece.size[0]
            b[mine : mine + size, first : first + len(one)] = other[theirs : theirs + size]
    return a, b


def _sides(opened: HfFolder, name: str, shape: Shape) -> tuple[Tensor, Tensor]:
    """Returns A [r, I] and B [O, r] of an HF weight of this shape."""
    key = _PREFIX + name.removesuffix(".weight")
    one, other = (opened.read(key + side).float() for side in _SIDES)
    if one.shape[1:] != shape[1:] or other.shape != (shape[0], len(one)):
        raise ValueError(
            f"{opened.path}: {key} has A {list(one.shape)} and B {list(other.shape)}, but the layer has {shape[1]} "
            f"inputs and {shape[0]} outputs; give an adapter of this model"
        )
    return one, other


def _columns(sides: Sequence[Tensor]) -> tuple[list[int], int]:
    """Returns where each A begins when equal ones are kept once, and the rank of all."""
    at: list[int] = []
    used = 0
    for i, one in enumerate(sides):
        same = next((at[j] for j in range(i) if torch.equal(sides[j], one)), None)
        at.append(used if same is None else same)
        used += len(one) if same is None else 0
    return at, used
