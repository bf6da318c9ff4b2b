"""Adapters: where they stand, how they start, every strategy, resumes, exports in PEFT's names, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lf
from lf.devices.cpu import cpu
from lf.models import spec, weights
from lf.models.embodied.pi05 import pi05_tiny
from lf.models.layers.gemma import positions
from lf.models.layers.lora import LoraLinear, rows_from
from lf.models.layouts import fitted
from lf.models.lora import adapt, adapted_weights, added, first_values, merged, weight_of
from lf.models.peft import CONFIG, WEIGHTS, read_adapter, save_adapter
from lf.models.spec import Ctx, Part
from lf.models.toy import Toy
from lf.parallel.torch_dp import share
from lf.train.convert import export_folder
from lf.train.fsdp_step import torch_engine
from lf.train.loop import FAULTS
from lf.train.run import check_run
from lf.train.start import load_model, open_start
from tests.cases import DENSE, off, run_of
from tests.test_fsdp_step import BF16, GATE, LAYOUTS, Outcome, P, batches, engine_of, outcome, same, whole_pieces
from tests.test_pi05 import batch_of, checkpoint, rows_of, small_run, tiny
from tests.test_train import go, metrics, tensors
from tests.workers import Workers

ALL = lf.Lora(rank=3, alpha=4.5, targets=("*",))
SOME = lf.Lora(
    rank=4,
    alpha=6.0,
    targets=("vision.*.qkv", "vlm.*", "expert.layers.*.qkv", "expert.*.gate_up"),
    full=("action_out.*", "vision.layers.1.fc1.weight", "embed.weight"),
)
FULL = {"action_out.weight", "action_out.bias", "vision.layers.1.fc1.weight", "embed.weight"}
"""What `SOME` trains besides."""
TABLE = spec.weight_map(pi05_tiny)


def adapted(cfg: lf.Lora = SOME, seed: int = 0) -> nn.Module:
    """Returns a small model with random weights and random adapters, B too."""
    model = tiny(seed)
    adapt(model, cfg, TABLE)
    gen = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if weight_of(name):
                param.copy_(torch.randn(param.shape, generator=gen) * 0.2)
    return model


def whole_of(model: nn.Module, scale: float) -> Any:
    params = dict(model.named_parameters())
    return merged(params.__getitem__, params, scale)


# Where adapters stand


def test_a_linear_layer_with_an_adapter_is_the_merged_one_in_whole_and_in_part() -> None:
    torch.manual_seed(0)
    base = nn.Linear(6, 9)
    layer = LoraLinear(base, rank=2, scale=0.7)
    with torch.no_grad():
        layer.lora_a.normal_()
        layer.lora_b.normal_()
    x, weight = torch.randn(5, 6), base.weight + 0.7 * layer.lora_b @ layer.lora_a
    expected = x @ weight.T + base.bias
    assert torch.allclose(layer(x), expected, atol=1e-5)
    assert torch.allclose(rows_from(layer, x, 4), expected[:, 4:], atol=1e-5)
    assert torch.equal(rows_from(base, x, 4), base(x)[:, 4:])
    read = {"x.lora_a": layer.lora_a, "x.lora_b": layer.lora_b}

    def box(name: str, at: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return read[name][tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))]

    part = Part(at=(2, 1), local=(0, 0), size=(4, 3))
    assert torch.allclose(added("x.weight", part, box, 2, 0.7), (weight - base.weight)[2:6, 1:4], atol=1e-6)


def test_every_adapter_counts_and_the_merged_model_computes_the_same() -> None:
    model, batch = adapted(ALL), batch_of([*rows_of(3)])
    params = dict(model.named_parameters())
    plain = tiny()
    get = whole_of(model, ALL.scale)
    with torch.no_grad():
        for name, param in plain.named_parameters():
            param.copy_(get(name))
    out = spec.forward(pi05_tiny, model, batch)
    assert off(out.detach(), spec.forward(pi05_tiny, plain, batch).detach()) <= 2e-6
    out.square().sum().backward()
    trained = {name for name, param in params.items() if param.requires_grad}
    assert trained == {name for name in params if weight_of(name)}
    assert all(params[name].grad.any() for name in trained)  # type: ignore[union-attr]
    layers = {name.rpartition(".")[0] for name in trained}
    # Those of the last layer that no action depends on have none.
    assert "vlm.layers.0.out" in layers
    assert {"vlm.layers.1.qkv", "time_in", "expert.norm.dense", "projector"} <= layers
    assert not layers & {"vlm.layers.1.out", "vlm.layers.1.mlp.down", "embed", "vision.embed.patch"}


def test_other_parts_are_trained_as_they_are_and_the_rest_is_frozen() -> None:
    model = adapted(SOME)
    trained = {name for name, param in model.named_parameters() if param.requires_grad and not weight_of(name)}
    assert trained == FULL


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"targets": ("*.q_proj",)},
            r"adapt.targets: '\*.q_proj' names nothing in the model; linear layers are such as",
        ),
        (
            {"targets": ("embed",)},
            r"'embed' names no layer that can be adapted: embed is no linear layer but a Embedding",
        ),
        ({"targets": ("vision.embed.patch",)}, "vision.embed.patch is no linear layer but a Conv2d"),
        ({"targets": ("vlm.layers.1.out",)}, "vlm.layers.1.out is tied to another layer, or no output depends on it"),
        ({"targets": ("*",), "rank": 9}, "adapt.rank = 9, but action_in has 8 inputs and 32 outputs; lower the rank"),
        ({"targets": ("*",), "full": ("vlm.norm.*",)}, r"adapt.full: 'vlm.norm.\*' names no tensor that is trained"),
        (
            {"targets": ("*out",), "full": ("action_out.bias",)},
            "names action_out.bias, whose layer adapt.targets names",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        adapt(tiny(), lf.Lora(**fields), TABLE)


def test_a_layer_that_no_adapter_of_peft_can_have_is_refused() -> None:
    @attrs.frozen
    class Turned(weights.LfRule):
        hf: str

    @weights.hf_names.register
    def _(rule: Turned) -> tuple[str, ...]:
        return (rule.hf,)

    @weights.pieces.register
    def _(rule: Turned, shape: tuple[int, ...]) -> tuple[weights.Piece, ...]:
        return (weights.Piece(rule.hf, (0, 0), (0, 0), shape, (1, 0)),)

    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    table = weights.WeightMap(rules=(Turned("0.weight", "x.weight"),))
    with pytest.raises(
        ValueError, match=r"0, which is x.weight in Hugging Face's names by a rule \(Turned\) that no PEFT"
    ):
        adapt(model, lf.Lora(rank=2, targets=("0",)), table)


def test_runs_that_cannot_have_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match="adapt is for the torch path, and parallel is a MegatronParallel"):
        check_run(run_of(DENSE, adapt=ALL), DENSE, cpu, 1)
    run = run_of(Toy(), parallel=P(), adapt=ALL, optim=lf.AdamW(freeze=("head.*",)))
    with pytest.raises(
        ValueError, match=r"adapt freezes all but its adapters and adapt.full, and optim.freeze = \('head"
    ):
        check_run(run, Toy(), cpu, 1)


@pytest.mark.usefixtures("one_process")
def test_parts_of_an_adapter_may_have_a_learning_rate_of_their_own() -> None:
    rates = (lf.Rate(names=("*.lora_b",), factor=16.0),)
    engine, _ = engine_of(pi05_tiny, P(), adapt=ALL, optim=lf.AdamW(rates=rates))
    factors = {name: g.get("lr_factor", 1.0) for g in engine.state.optimizer.param_groups for name in g["names"]}
    assert {name: factor for name, factor in factors.items() if factor != 1.0} == {
        name: 16.0 for name in factors if name.endswith(".lora_b")
    }
    assert len(factors) == 2 * len(list(adapted_weights(factors)))
    with pytest.raises(ValueError, match=r"optim.rates\[0\].names: no tensor of the model matches 'embed.*'"):
        engine_of(pi05_tiny, P(), adapt=ALL, optim=lf.AdamW(rates=(lf.Rate(names=("embed.*",), factor=2.0),)))


# The start


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("precision", [lf.Precision(), BF16])
def test_before_the_first_step_the_model_is_the_base_bit_for_bit(precision: lf.Precision) -> None:
    plain, layout = engine_of(pi05_tiny, P(), precision=precision)
    found, _ = engine_of(pi05_tiny, P(), precision=precision, adapt=SOME)
    batch = spec.draw(pi05_tiny, batches(pi05_tiny, 4, layout)[0], 0, 0)
    with torch.no_grad():
        one, other = (spec.forward(pi05_tiny, e.state.chunks[0], batch) for e in (plain, found))
    assert torch.equal(one, other)
    params = dict(found.state.chunks[0].named_parameters())
    a = params["vlm.layers.0.qkv.lora_a"].float()
    assert a.shape == (4, 64)
    assert 0.9 < a.abs().max() * 8.0 <= 1.0
    assert not torch.equal(a, params["vlm.layers.1.qkv.lora_a"].float())
    assert not params["vlm.layers.0.qkv.lora_b"].any()
    assert torch.equal(first_values("x.lora_a", (4, 64), 1), first_values("x.lora_a", (4, 64), 1))
    assert not torch.equal(first_values("x.lora_a", (4, 64), 1), first_values("x.lora_a", (4, 64), 2))


# Every strategy

OPTIM = "adamw"
WORLDS = ["zero1", "fsdp, recompute", "ddp, recompute"]
MORE = [pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS if name not in WORLDS]


def adapted_outcome(parallel: lf.TorchParallel, precision: lf.Precision) -> Outcome | None:
    return outcome("pi05", parallel, OPTIM, adapt=SOME, precision=precision)


@pytest.fixture(scope="module")
def reference(workers: Workers) -> Any:
    made: dict[lf.Precision, Outcome] = {}

    def get(precision: lf.Precision) -> Outcome:
        if precision not in made:
            (made[precision],) = workers.run(1, adapted_outcome, P(), precision)
        return made[precision]

    return get


@pytest.mark.parametrize("layout", [*WORLDS, *MORE])
def test_no_number_depends_on_the_strategy(workers: Workers, reference: Any, layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    expected = reference(lf.Precision())
    assert expected.losses[2] < expected.losses[0]
    assert {name for name in expected.grads if not weight_of(name)} == FULL
    found, *_ = workers.run(world, adapted_outcome, parallel, lf.Precision())
    same(found, expected, GATE)


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("hsdp on 4", marks=pytest.mark.full)])
def test_no_number_depends_on_the_strategy_in_bfloat16(workers: Workers, reference: Any, layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    expected, wide = reference(BF16), reference(lf.Precision())
    assert expected.losses == pytest.approx(wide.losses, rel=2e-3)
    found, *_ = workers.run(world, adapted_outcome, parallel, BF16)
    assert found.losses == pytest.approx(expected.losses, rel=GATE)
    for name, grad in found.grads.items():
        assert off(grad, expected.grads[name]) <= GATE, name


# Runs: checkpoints and exports


def adapted_run(start: Path, **changes: Any) -> lf.Run:
    optim = lf.AdamW(lr=1e-2, eps=1e-3, ema=0.5)
    return small_run(**{"init": str(start), "model": None, "adapt": SOME, "steps": 4, "optim": optim, **changes})


def test_a_run_resumes_bit_for_bit_and_exports_adapters_and_the_merged_model(workers: Workers, tmp_path: Path) -> None:
    start = checkpoint(tmp_path / "start", "lerobot", prefix="model.", keep="head")
    run = adapted_run(start, save=lf.Save(every=2))
    whole, cut, moved = (tmp_path / name for name in ("whole", "cut", "moved"))
    workers.run(1, go, run, whole, tmp_path)
    workers.run(1, go, run, cut, tmp_path, 2)
    workers.run(1, go, run, cut, tmp_path)
    saved = tensors(whole, 4)
    assert metrics(cut) == metrics(whole)
    assert all(torch.equal(value, saved[name]) for name, value in tensors(cut, 4).items())
    workers.run(2, go, attrs.evolve(run, parallel=P(strategy="fsdp", micro_batch=1)), moved, tmp_path, 2)
    workers.run(2, go, attrs.evolve(run, parallel=P(strategy="zero1", micro_batch=1)), moved, tmp_path)
    for ours, theirs in zip(metrics(moved), metrics(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    trained = {name for name in spec.named_tensors(adapted()) if weight_of(name)}
    for kind in ("exp_avg", "ema"):
        kept = {name.removeprefix(f"{kind}/") for name in saved if name.startswith(f"{kind}/")}
        assert kept == {*trained, *FULL}
    # The base is as it was; hf/ has the average, merged, in the start's names and types.
    base = load_file(start / "model.safetensors")
    made = load_file(whole / "hf/model.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in made.items()} == {n: (t.shape, t.dtype) for n, t in base.items()}
    a, b = (saved[f"ema/vlm.layers.0.out.{side}"] for side in ("lora_a", "lora_b"))
    hf = "model.paligemma_with_expert.paligemma.model.language_model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(made[hf], (base[hf].float() + 1.5 * (b @ a)).bfloat16())
    assert not torch.equal(made[hf], base[hf])
    frozen = hf.replace("o_proj", "norm").replace("self_attn.norm", "input_layernorm")
    assert torch.equal(made[frozen], base[frozen])
    # PEFT's folder has what was trained, of the average too.
    adapter = load_file(whole / "adapter" / WEIGHTS)
    key = "base_model.model." + hf.removesuffix(".weight")
    assert torch.equal(adapter[f"{key}.lora_A.weight"], a)
    assert torch.equal(adapter[f"{key}.lora_B.weight"], b)
    config = json.loads((whole / "adapter" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6, str(start))
    export_folder(whole, tmp_path / "exported")
    assert (tmp_path / "exported/model.safetensors").read_bytes() == (whole / "hf/model.safetensors").read_bytes()


def told(run: lf.Run, folder: Path, cache: Path) -> str:
    try:
        go(run, folder, cache)
    except FAULTS as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_exports_follow_the_choice_and_a_resume_may_not_change_the_adapters(workers: Workers, tmp_path: Path) -> None:
    run = small_run(adapt=SOME, steps=1, save=lf.Save(lora="adapter"))
    workers.run(1, go, run, tmp_path / "run", tmp_path)
    assert (tmp_path / "run/adapter" / CONFIG).is_file()
    assert not (tmp_path / "run/hf").exists()
    workers.run(
        1, go, attrs.evolve(run, steps=2, save=lf.Save(lora="merged", export_every=1)), tmp_path / "run", tmp_path
    )
    assert (tmp_path / "run/hf/model.safetensors").is_file()
    other = attrs.evolve(run, steps=3, adapt=attrs.evolve(SOME, alpha=8.0))
    (text,) = workers.run(1, told, other, tmp_path / "run", tmp_path)
    assert "adapt.alpha: 6.0 -> 8.0" in text
    # Another starts from its adapters, and needs them no more once it has begun.
    begun = attrs.evolve(run, adapt=attrs.evolve(SOME, start=str(tmp_path / "run/adapter")))
    workers.run(1, go, begun, tmp_path / "begun", tmp_path)
    shutil.rmtree(tmp_path / "run/adapter")
    workers.run(1, go, attrs.evolve(begun, steps=2), tmp_path / "begun", tmp_path)
    # A run that starts from it has the merged weights, and may have adapters of its own.
    workers.run(1, go, run_from(tmp_path / "run", steps=1), tmp_path / "next", tmp_path)
    start = open_start(str(tmp_path / "run"), None)
    model = load_model(start, Ctx(device=cpu))
    made = dict(weights.export(TABLE, dict(model.named_parameters()).__getitem__))
    hf = load_file(tmp_path / "run/hf/model.safetensors")
    assert all(torch.equal(value, hf[name]) for name, value in made.items() if value.any())


def run_from(folder: Path, **changes: Any) -> lf.Run:
    return small_run(init=str(folder), model=None, adapt=ALL, **changes)


# PEFT folders


def saved_adapter(path: Path, model: nn.Module, cfg: lf.Lora, names: tuple[str, ...] = ()) -> Path:
    params = dict(model.named_parameters())
    trained = [name for name, param in params.items() if param.requires_grad]
    save_adapter(path, cfg, fitted(TABLE, names), params, trained, params.__getitem__, base="", write=True)
    return path


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def test_an_adapter_comes_back_from_its_folder_bit_for_bit(tmp_path: Path) -> None:
    model = adapted(SOME)
    folder = saved_adapter(tmp_path / "adapter", model, SOME)
    found = read_adapter(attrs.evolve(SOME, start=str(folder)), TABLE, 0, shapes_of(model))
    params = dict(model.named_parameters())
    assert {name for name, param in params.items() if param.requires_grad} < found.keys()
    # A module that is trained in part is kept whole.
    assert found.keys() - {name for name, param in params.items() if param.requires_grad} == {
        "vision.layers.1.fc1.bias"
    }
    assert all(torch.equal(value, params[name]) for name, value in found.items())
    # A larger rank has room: the model is the same, and the rest of A is drawn.
    more = lf.Lora(**{**attrs.asdict(SOME), "rank": 6, "alpha": 9.0, "start": str(folder)})
    wide = tiny()
    adapt(wide, more, TABLE)
    found = read_adapter(more, TABLE, 5, shapes_of(wide))
    for weight in adapted_weights(params):
        stem = weight.removesuffix(".weight")
        a, b = found[f"{stem}.lora_a"], found[f"{stem}.lora_b"]
        assert torch.equal(a[:4], params[f"{stem}.lora_a"])
        assert torch.equal(a[4:], first_values(f"{stem}.lora_a", tuple(a.shape), 5)[4:])
        assert torch.equal(b[:, :4], params[f"{stem}.lora_b"])
        assert not b[:, 4:].any()


def foreign(folder: Path, parts: str = "qv", **changes: Any) -> Path:
    """Writes an adapter as a trainer on Hugging Face's own modules makes it: each part has its own A."""
    gen = torch.Generator().manual_seed(3)
    stem = "base_model.model.paligemma_with_expert.paligemma.model.language_model.layers.0.self_attn."
    made = {}
    for part in parts:
        rows = 64 if part == "q" else 8
        made[f"{stem}{part}_proj.lora_A.weight"] = torch.randn(2, 64, generator=gen)
        made[f"{stem}{part}_proj.lora_B.weight"] = torch.randn(rows, 2, generator=gen)
    folder.mkdir()
    save_file(made, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": [f"{part}_proj" for part in parts]}
    (folder / CONFIG).write_text(json.dumps(config | changes))
    return folder


def test_a_foreign_adapter_with_an_a_for_each_part_computes_the_same(tmp_path: Path) -> None:
    cfg = lf.Lora(rank=4, alpha=16.0, targets=("vlm.layers.0.qkv",), start=str(foreign(tmp_path / "a")))
    model = tiny()
    adapt(model, cfg, TABLE)
    found = read_adapter(cfg, TABLE, 0, shapes_of(model))
    assert found.keys() == {"vlm.layers.0.qkv.lora_a", "vlm.layers.0.qkv.lora_b"}
    delta = cfg.scale * found["vlm.layers.0.qkv.lora_b"] @ found["vlm.layers.0.qkv.lora_a"]
    sides = load_file(tmp_path / "a" / WEIGHTS)
    by_part = {name.split("_proj")[0][-1] + name.split("lora_")[1][0]: value for name, value in sides.items()}
    expected = torch.cat([4.0 * by_part["qB"] @ by_part["qA"], torch.zeros(8, 64), 4.0 * by_part["vB"] @ by_part["vA"]])
    assert torch.allclose(delta, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("folder", "fields", "told"),
    [
        ({}, {"rank": 3, "alpha": 12.0}, "have adapters of rank 4 together, and adapt.rank = 3; set adapt.rank to 4"),
        ({}, {"alpha": 8.0}, r"multiplies its adapters by 4, and adapt by alpha / rank = 8 / 4; set adapt.alpha to 16"),
        (
            {},
            {"targets": ("vlm.layers.*.qkv",)},
            r"adapts nothing of vlm.layers.1.qkv.weight, which adapt.targets names",
        ),
        (
            {},
            {"targets": ("vlm.layers.1.qkv",)},
            r"does not fit adapt.targets and the model: base_model.*q_proj.lora_A",
        ),
        (
            {"use_dora": True},
            {},
            r"adapter_config.json: {'use_dora': True}; lf reads adapters of the type LORA without",
        ),
        ({"peft_type": "LOHA"}, {}, "'peft_type': 'LOHA'"),
        ({"r": "2"}, {}, "r = '2' and lora_alpha = 8 must be numbers"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    tmp_path: Path, folder: dict[str, Any], fields: dict[str, Any], told: str
) -> None:
    start = str(foreign(tmp_path / "a", **folder))
    cfg = lf.Lora(**{"rank": 4, "alpha": 16.0, "targets": ("vlm.layers.0.qkv",), "start": start, **fields})
    model = tiny()
    adapt(model, cfg, TABLE)
    with pytest.raises(ValueError, match=told):
        read_adapter(cfg, TABLE, 0, shapes_of(model))


def test_a_folder_of_another_model_or_none_is_refused(tmp_path: Path) -> None:
    model, cfg = adapted(SOME), attrs.evolve(SOME, start=str(tmp_path / "none"))
    with pytest.raises(
        ValueError, match=r"adapter_config.json is missing; give adapt.start the folder of a PEFT adapter"
    ):
        read_adapter(cfg, TABLE, 0, shapes_of(model))
    folder = saved_adapter(tmp_path / "a", model, SOME)
    stored = load_file(folder / WEIGHTS)
    key = next(name for name in stored if "o_proj.lora_B" in name)
    save_file({**stored, key: stored[key][1:].clone()}, folder / WEIGHTS)
    cfg = attrs.evolve(SOME, start=str(folder))
    with pytest.raises(
        ValueError, match=r"has A \[4, 64\] and B \[63, 4\], but the layer has 64 inputs and 64 outputs"
    ):
        read_adapter(cfg, TABLE, 0, shapes_of(model))
    del stored[key]
    save_file(stored, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"o_proj.lora_A.weight without base_model.*o_proj.lora_B.weight"):
        read_adapter(cfg, TABLE, 0, shapes_of(model))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_run_starts_from_an_adapter(tmp_path: Path, strategy: Any) -> None:
    model = adapted(SOME)
    cfg = attrs.evolve(SOME, start=str(saved_adapter(tmp_path / "adapter", model, SOME)))
    run = run_of(pi05_tiny, parallel=P(strategy=strategy), adapt=cfg)
    adapter = lambda shapes: read_adapter(cfg, TABLE, 0, shapes)  # noqa: E731
    engine = torch_engine(run, pi05_tiny, Ctx(device=cpu), adapter=adapter)
    params = dict(model.named_parameters())
    held = dict(engine.state.chunks[0].named_parameters())
    assert all(torch.equal(share(held[n]).local, p) for n, p in params.items() if weight_of(n) or n == "embed.weight")
    assert {name for name in whole_pieces(engine, engine.state) if weight_of(name)}


# The peft package itself


def hf_towers() -> nn.Module:
    """Returns transformers' own vision and language towers, with the weights of `tiny` in published names."""
    from transformers import GemmaConfig, GemmaModel, SiglipVisionConfig, SiglipVisionModel

    vision, vlm = pi05_tiny.vision, pi05_tiny.vlm
    seen = SiglipVisionConfig(
        hidden_size=vision.width,
        intermediate_size=vision.mlp,
        num_hidden_layers=vision.depth,
        num_attention_heads=vision.heads,
        image_size=vision.image,
        patch_size=vision.patch,
        vision_use_head=False,
    )
    said = GemmaConfig(
        vocab_size=pi05_tiny.vocab,
        hidden_size=vlm.width,
        intermediate_size=vlm.mlp,
        num_hidden_layers=vlm.depth,
        num_attention_heads=vlm.heads,
        head_dim=vlm.head_dim,
        num_key_value_heads=vlm.kv_heads,
    )
    root = place = nn.Module()
    for name in ("paligemma_with_expert", "paligemma", "model"):
        place.add_module(name, nn.Module())
        place = place.get_submodule(name)
    place.add_module("vision_tower", nn.ModuleDict({"vision_model": SiglipVisionModel(seen)}))
    place.add_module("language_model", GemmaModel(said))
    state = dict(weights.export(TABLE, dict(tiny().named_parameters()).__getitem__))
    root.load_state_dict({name: state[name] for name in root.state_dict()})
    return root


def test_the_peft_package_computes_what_an_exported_adapter_does_here(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    targets = ("vision.*", "vlm.layers.0.*", "vlm.layers.1.qkv")
    cfg = lf.Lora(rank=3, alpha=4.5, targets=targets, full=("vision.norm.*",))
    model = adapted(cfg)
    with torch.no_grad():
        model.get_parameter("vision.norm.bias").add_(0.5)
    wrapped = peft.PeftModel.from_pretrained(hf_towers(), saved_adapter(tmp_path / "adapter", model, cfg))
    towers = wrapped.base_model.model.paligemma_with_expert.paligemma.model
    gen = torch.Generator().manual_seed(7)
    images, x = torch.rand(2, 3, 28, 28, generator=gen) * 2 - 1, torch.randn(2, 5, 64, generator=gen)
    with torch.no_grad():
        expected = towers.vision_tower["vision_model"](pixel_values=images).last_hidden_state
        assert off(model.vision(images), expected) <= 2e-6  # type: ignore[operator]
        everything = torch.ones(2, 5, dtype=torch.bool)
        hidden, _ = model.vlm(x, positions(everything), everything)  # type: ignore[operator]
        mask = torch.zeros(2, 1, 5, 5)
        expected = towers.language_model(inputs_embeds=x, attention_mask=mask).last_hidden_state
        assert off(hidden, expected) <= 2e-6
        bare, _ = tiny().vlm(x, positions(everything), everything)
        assert off(bare, expected) > 1e-2
    # What it saves comes back, and what it merges is what `hf/` has.
    wrapped.save_pretrained(tmp_path / "again")
    found = read_adapter(attrs.evolve(cfg, start=str(tmp_path / "again")), TABLE, 0, shapes_of(model))
    assert found.keys() == {name for name, param in model.named_parameters() if param.requires_grad}
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in found.items())
    made = dict(weights.export(TABLE, merged(dict(model.named_parameters()).__getitem__, shapes_of(model), cfg.scale)))
    together = wrapped.merge_and_unload().state_dict()
    assert sum(not torch.equal(value, made[name]) for name, value in hf_towers().state_dict().items()) > 20
    assert all(off(value, made[name].detach()) <= 2e-6 for name, value in together.items())
