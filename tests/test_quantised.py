"""Published FP8 weights: read as their values by slice, exported unquantised, other quantisations refused by name."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from lf.models.hf_folder import open_folder
from lf.models.hf_save import save_folder
from lf.models.quantised import quantisation, without_quantisation
from lf.models.weights import Carried, Same, Stack, WeightMap, check, export, read, remember, report, whole
from tests.test_weights import box, counting

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""DeepSeek-V3's quantization_config."""


def quantise(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Returns a matrix in float8 and one factor for each block of rows x columns."""
    height, width = (math.ceil(extent / block) for extent, block in zip(weight.shape, (rows, columns), strict=True))
    scales = torch.rand(height, width) + 0.5
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
    return (weight / spread).to(torch.float8_e4m3fn), scales


def values(raw: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the values of a quantised matrix, computed the long way round."""
    out = torch.empty(raw.shape)
    for i in range(raw.shape[0]):
        for j in range(0, raw.shape[1], columns):
            out[i, j : j + columns] = raw[i, j : j + columns].float() * scales[i // rows, j // columns]
    return out


def folder(path: Path, tensors: dict[str, Tensor], config: dict) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@given(st.data())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_any_box_of_a_blocked_weight(tmp_path_factory, data):
    torch.manual_seed(0)
    shape = (data.draw(st.integers(1, 11)), data.draw(st.integers(1, 11)))
    block = (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    raw, scales = quantise(torch.randn(shape), *block)
    config = {"quantization_config": {**FP8, "weight_block_size": list(block)}}
    path = folder(tmp_path_factory.mktemp("m"), {"a.weight": raw, "a.weight_scale_inv": scales}, config)
    opened = open_folder(path)
    assert opened.names == ("a.weight",)
    full = opened.read("a.weight")
    assert full.dtype == opened.dtype("a.weight") == torch.float32
    assert torch.equal(full, values(raw, scales, *block))
    at = [data.draw(st.integers(0, extent - 1)) for extent in shape]
    end = [data.draw(st.integers(first + 1, extent)) for first, extent in zip(at, shape, strict=True)]
    part = opened.read("a.weight", [slice(first, last) for first, last in zip(at, end, strict=True)])
    assert torch.equal(part, full[at[0] : end[0], at[1] : end[1]])


def test_only_the_factors_of_the_box_are_read(tmp_path):
    raw, scales = quantise(torch.randn(300, 260), 128, 128)
    path = folder(tmp_path, {"a.weight": raw, "a.weight_scale_inv": scales}, {"quantization_config": FP8})
    opened, count = counting(open_folder(path))
    part = read(
        WeightMap((Same("a", "a.weight"),)), opened, box("a", (300, 260), (120, 0), (16, 100)), dtype=torch.bfloat16
    )
    assert torch.equal(part, values(raw, scales, 128, 128)[120:136, :100].bfloat16())
    assert count == {"a.weight": 16 * 100, "a.weight_scale_inv": 2 * 1 * 4}


@pytest.mark.parametrize(
    ("name", "shape", "scale"),
    [
        ("weight_scale", (4, 6), torch.tensor(0.25)),
        ("weight_scale", (4, 6), torch.tensor([0.25])),
        ("weight_scale_inv", (4, 6), torch.tensor(3.0)),
        ("weight_scale", (4, 6), torch.tensor([0.5, 1.0, 2.0, 4.0])),
        ("weight_scale", (4, 6), torch.tensor([[0.5], [1.0], [2.0], [4.0]])),
        ("weight_scale", (2, 3, 2), torch.tensor([0.5, 2.0])),
    ],
)
def test_factors_of_a_tensor_or_a_row(tmp_path, name, shape, scale):
    raw = torch.randn(shape).to(torch.float8_e4m3fn)
    tensors = {"a.weight": raw, f"a.{name}": scale, "a.input_scale": torch.tensor(1.0)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}
    opened = open_folder(folder(tmp_path, tensors, config))
    factors = scale.reshape(-1, *[1] * (len(shape) - 1)) if scale.numel() > 1 else scale.reshape(())
    assert opened.names == ("a.weight",)
    assert torch.equal(opened.read("a.weight"), raw.float() * factors)
    lower = [slice(1, 2), *[slice(0, 2)] * (len(shape) - 1)]
    assert torch.equal(opened.read("a.weight", lower), (raw.float() * factors)[tuple(lower)])


def test_stacked_experts_have_a_block_grid_each(tmp_path):
    parts = [quantise(torch.randn(5, 7), 2, 3) for _ in range(3)]
    tensors = {"e": torch.stack([raw for raw, _ in parts]), "e_scale_inv": torch.stack([scale for _, scale in parts])}
    config = {"text_config": {"quantization_config": {**FP8, "weight_block_size": [2, 3]}}}
    opened = open_folder(folder(tmp_path, tensors, config))
    expected = torch.stack([values(raw, scale, 2, 3) for raw, scale in parts])
    assert torch.equal(opened.read("e"), expected)
    assert torch.equal(opened.read("e", [slice(1, 2), slice(3, 5), slice(2, 4)]), expected[1:2, 3:5, 2:4])


def test_export_is_bfloat16_and_says_so(tmp_path):
    gate, gate_scale = quantise(torch.randn(4, 6), 2, 3)
    up, up_scale = quantise(torch.randn(4, 6), 2, 3)
    tensors = {
        "gate.weight": gate,
        "gate.weight_scale_inv": gate_scale,
        "norm.weight": torch.randn(6),
        "up.weight": up,
        "up.weight_scale_inv": up_scale,
    }
    config = {"model_type": "toy", "quantization_config": {**FP8, "weight_block_size": [2, 3]}, "hidden_size": 6}
    opened = open_folder(folder(tmp_path / "m", tensors, config))
    weights = WeightMap((Stack("fc1", ("gate.weight", "up.weight")), Same("norm", "norm.weight")))
    shapes = {"fc1": (8, 6), "norm": (6,)}
    check(weights, opened, shapes)
    made = {name: read(weights, opened, whole(name, shape)) for name, shape in shapes.items()}
    rows = {row["key"]: row for row in report(weights, opened)}
    assert rows["gate.weight"]["waived"] == "dequantised with gate.weight_scale_inv; exported as BF16"
    assert (rows["gate.weight"]["rule"], rows["gate.weight_scale_inv"]["rule"]) == ("Stack", "Scale")
    assert "waived" not in rows["norm.weight"]

    source = remember(weights, opened)
    save_folder(tmp_path / "m2", export(weights, made.__getitem__, source), source=source, config=source.config)
    written = load_file(tmp_path / "m2" / "model.safetensors")
    assert set(written) == {"gate.weight", "up.weight", "norm.weight"}
    assert torch.equal(written["up.weight"], values(up, up_scale, 2, 3).bfloat16())
    assert torch.equal(written["norm.weight"], tensors["norm.weight"])
    stored = json.loads((tmp_path / "m2" / "config.json").read_text())
    assert stored == {"model_type": "toy", "hidden_size": 6}
    again = open_folder(tmp_path / "m2")
    assert torch.equal(again.read("gate.weight").float(), values(gate, gate_scale, 2, 3).bfloat16().float())


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4", None])
def test_other_quantisations_are_refused_by_name(tmp_path, method):
    path = folder(tmp_path, {"a": torch.ones(1)}, {"quantization_config": {"quant_method": method, "bits": 4}})
    with pytest.raises(
        ValueError, match=f"quant_method = {method!r}.*give the folder of the unquantised model"
    ) as caught:
        open_folder(path)
    assert str(tmp_path) in str(caught.value)


def test_missing_and_misshapen_factors_are_refused(tmp_path):
    raw, scales = quantise(torch.randn(300, 20), 128, 128)
    config = {"quantization_config": FP8}
    with pytest.raises(ValueError, match=r"a\.weight is F8_E4M3 but its factors are missing: a\.weight_scale_inv or"):
        open_folder(folder(tmp_path, {"a.weight": raw}, config))
    with pytest.raises(ValueError, match=r"a\.weight_scale_inv has shape \[2, 1\], which does not fit a\.weight .*300"):
        open_folder(folder(tmp_path, {"a.weight": raw, "a.weight_scale_inv": scales[:2].clone()}, config))


@pytest.mark.parametrize("block", [[0, 128], [128, -1], "a", 128, [2.0, 2], [[1], 1], ["a", 1], [], [1, 1, 1], True])
def test_blocks_that_are_no_sizes_are_refused(tmp_path, block):
    tensors = {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(2, 2)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    with pytest.raises(ValueError, match="weight_block_size = ") as caught:
        open_folder(folder(tmp_path, tensors, config))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("stated", [FP8, "fp8", 8])
def test_a_config_that_states_fp8_of_plain_weights_is_refused(tmp_path, stated):
    with pytest.raises(ValueError, match=r"no tensor is float8; delete|quantization_config = .* must be an object"):
        open_folder(folder(tmp_path, {"a": torch.ones(2)}, {"quantization_config": stated}))


@pytest.mark.parametrize(
    ("kind", "code"),
    [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.bool, "BOOL"), (torch.complex64, "C64"), (torch.int16, "I16")],
)
def test_weights_in_codes_are_refused_without_a_config_that_says_how(tmp_path, kind, code):
    tensors = {"a": torch.ones(2, 2).to(kind), "b": torch.ones(2, 2).to(torch.float8_e4m3fn), "mask": torch.ones(2) > 0}
    opened = open_folder(folder(tmp_path, tensors, {}))
    with pytest.raises(
        ValueError, match="2 not stored as F64, F32, F16, BF16, I64, I32, so perhaps quantised: "
    ) as caught:
        check(WeightMap((Same("a", "a"), Same("b", "b"), Carried("mask"))), opened, {"a": (2, 2), "b": (2, 2)})
    assert f"a in model.safetensors is {code}, b in model.safetensors is F8_E4M3" in str(caught.value)


def test_plain_float8_is_an_ordinary_dtype(tmp_path):
    raw = torch.randn(3, 2).to(torch.float8_e4m3fn)
    opened = open_folder(folder(tmp_path, {"a": raw}, {}))
    weights = WeightMap((Same("a", "a"),))
    made = read(weights, opened, whole("a", (3, 2)), dtype=torch.float32)
    ((_, back),) = export(weights, lambda name: made, remember(weights, opened))
    assert torch.equal(back.view(torch.uint8), raw.view(torch.uint8))


def test_configs_without_quantisation():
    assert quantisation({"a": {"b": 1}}, {}, {}).scales == {}
    assert without_quantisation({"a": 1, "t": {"quantization_config": {}, "b": 2}}) == {"a": 1, "t": {"b": 2}}
