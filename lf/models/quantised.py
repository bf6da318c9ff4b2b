"""Published weights in FP8: which tensors scale which, and their values.

Two published forms are read. DeepSeek-V3's (its `inference/fp8_cast_bf16.py` and `README_WEIGHTS.md`): a float8 weight
`x` beside `x_scale_inv` with one fp32 factor for each block of `weight_block_size` elements, and one factor for a whole
tensor or row, `x_scale`. In both the value is weight * factor, computed here in float32. Everything else is refused.
"""

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

Shape = tuple[int, ...]
"""Extents of a tensor."""

_WEIGHT_SUFFIXES = ("_scale_inv", "_scale")
"""What is added to a weight's name to name its factors."""

_ACTIVATION_SUFFIXES = (".input_scale", ".activation_scale")
"""Factors of activations: of no use to weights that are no longer float8."""

_CURE = "give the folder of the unquantised model, or dequantise the weights with the tool that made them"


@attrs.frozen(kw_only=True)
class Scale:
    """Where the factors of a quantised tensor are."""

    name: str
    """The tensor of factors."""
    shape: Shape
    """Its shape as stored."""
    block: Shape
    """Elements of the quantised tensor that share a factor, one number a dimension."""


@attrs.frozen(kw_only=True)
class Quantisation:
    """What a folder says about its quantised tensors; empty for ordinary folders."""

    scales: Mapping[str, Scale]
    """The factors of each quantised tensor."""
    unused: frozenset[str]
    """Tensors that only the quantised form needs: all factors."""


def quantisation(config: Mapping[str, Any], shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> Quantisation:
    """Returns how the tensors of a folder are quantised.

    `dtypes` are safetensors codes (`F8_E4M3`). Raises ValueError for a quantisation that is not FP8 or that no tensor
    has, a float8 tensor without factors, and factors whose shape does not fit.
    """
    found = _quantisation_config(config)
    if found is None:
        return Quantisation(scales={}, unused=frozenset())
    method = found.get("quant_method")
    if method != "fp8":
        raise ValueError(
            f"config.json says quantization_config.quant_method = {method!r}; of quantised weights only 'fp8' can be "
            f"read: {_CURE}"
        )
    block = found.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and all(type(size) is int and size > 0 for size in block)):
        raise ValueError(
            f"config.json says quantization_config.weight_block_size = {block!r}, and it must be a list of whole "
            f"numbers above 0: {_CURE}"
        )
    scales = {}
    for name, dtype in dtypes.items():
        if dtype.startswith("F8_") and not name.endswith(_WEIGHT_SUFFIXES):
            scale = next((name + suffix for suffix in _WEIGHT_SUFFIXES if name + suffix in shapes), None)
            if scale is None:
                wanted = " or ".join(name + suffix for suffix in _WEIGHT_SUFFIXES)
                raise ValueError(f"{name} is {dtype} but its factors are missing: {wanted} must be there; {_CURE}")
            blocks = _blocks(name, shapes[name], scale, shapes[scale], block)
            scales[name] = Scale(name=scale, shape=shapes[scale], block=blocks)
    if not scales:
        raise ValueError(
            "config.json says quantization_config.quant_method = 'fp8', but no tensor is float8; delete "
            "quantization_config if the weights were dequantised, or else copy the folder again"
        )
    modules = {name.rpartition(".")[0] for name in scales}
    activations = {
        name for name in shapes if name.endswith(_ACTIVATION_SUFFIXES) and name.rpartition(".")[0] in modules
    }
    return Quantisation(scales=scales, unused=frozenset({scale.name for scale in scales.values()} | activations))


def scale_box(scale: Scale, box: tuple[slice, ...]) -> tuple[slice, ...]:
    """Returns the box of the factors that a box of the quantised tensor needs."""
    if math.prod(scale.shape) == 1:
        return tuple(slice(0, 1) for _ in scale.shape)
    needed = (
        slice(part.start // block, max(part.start // block, -(-part.stop // block)))
        for part, block in zip(box, scale.block, strict=True)
    )
    return tuple(needed)[: len(scale.shape)]


def dequantise(values: Tensor, factors: Tensor, scale: Scale, box: tuple[slice, ...]) -> Tensor:
    """Returns a box of a quantised tensor in float32, from its raw values and the factors that `scale_box` names."""
    if factors.numel() == 1:
        return values.float() * factors.float().reshape(())
    spread = factors.float().reshape(*factors.shape, *[1] * (values.ndim - factors.ndim))
    for dim, (part, block) in enumerate(zip(box, scale.block, strict=True)):
        if spread.shape[dim] > 1:
            spread = spread.index_select(dim, torch.arange(part.start, part.stop) // block - part.start // block)
    return values.float() * spread


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config without its quantization_config, wherever that stands."""
    return {
        key: without_quantisation(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != "quantization_config"
    }


def _quantisation_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = config.get("quantization_config")
    if isinstance(found, Mapping):
        return found
    if found is not None:
        raise ValueError(f"config.json says quantization_config = {found!r:.80}, and it must be an object: {_CURE}")
    nested = (_quantisation_config(value) for value in config.values() if isinstance(value, Mapping))
    return next((found for found in nested if found is not None), None)


def _blocks(name: str, shape: Shape, scale: str, scales: Shape, block: Any) -> Shape:
    if math.prod(scales) == 1:
        return shape
    if block is not None and len(block) <= len(shape):
        blocks = (1,) * (len(shape) - len(block)) + tuple(block)
        if scales == tuple(-(-extent // size) for extent, size in zip(shape, blocks, strict=True)):
            return blocks
    elif block is None and scales in {shape[:1], (*shape[:1], *[1] * (len(shape) - 1))}:
        return (1, *shape[1:])
    raise ValueError(
        f"{scale} has shape {list(scales)}, which does not fit {name} of shape {list(shape)} with "
        f"quantization_config.weight_block_size = {block}: one factor a block, a row or a tensor is expected; {_CURE}"
    )
