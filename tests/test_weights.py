"""Rules of the weight map: inverse of themselves, read box by box with no more bytes than needed, strict."""

import functools
import json
import math
import tempfile
from collections import Counter
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lf.models.hf_folder import HfFolder, open_folder
from lf.models.hf_save import write_safetensors
from lf.models.spec import Part, Placed
from lf.models.weights import (
    Carried,
    Duplicate,
    FusedQkv,
    LfRule,
    Piece,
    Same,
    Stack,
    WeightMap,
    check,
    export,
    hf_names,
    hf_shapes,
    lf_shape,
    lf_shapes,
    pieces,
    read,
    remember,
    report,
    to_hf,
    whole,
)

quick = settings(max_examples=25, deadline=None, derandomize=True)


def dense_map(config: dict) -> WeightMap:
    """The rules of a Llama, Qwen2 or Qwen3 checkpoint."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    fused = functools.partial(FusedQkv, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    kind = config["model_type"]
    rules = [
        Same("embedding", "model.embed_tokens.weight"),
        Same("final_norm", "model.norm.weight"),
        Carried("*.rotary_emb.inv_freq"),
    ]
    if config["tie_word_embeddings"]:
        rules.append(Duplicate("lm_head.weight", "model.embed_tokens.weight"))
    else:
        rules.append(Same("head", "lm_head.weight"))
    for layer in range(config["num_hidden_layers"]):
        hf, lf = f"model.layers.{layer}", f"layers.{layer}"
        for part in ("weight", "bias") if kind == "qwen2" else ("weight",):
            rules.append(fused(f"{lf}.qkv.{part}", *(f"{hf}.self_attn.{x}_proj.{part}" for x in "qkv")))
        rules += [
            Same(f"{lf}.proj", f"{hf}.self_attn.o_proj.weight"),
            Stack(f"{lf}.fc1", (f"{hf}.mlp.gate_proj.weight", f"{hf}.mlp.up_proj.weight")),
            Same(f"{lf}.fc2", f"{hf}.mlp.down_proj.weight"),
            Same(f"{lf}.norm1", f"{hf}.input_layernorm.weight"),
            Same(f"{lf}.norm2", f"{hf}.post_attention_layernorm.weight"),
        ]
        if kind == "qwen3":
            rules += [Same(f"{lf}.{x}_norm", f"{hf}.self_attn.{x}_norm.weight") for x in "qk"]
    return WeightMap(tuple(rules))


def dense_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The lf shapes that go with `dense_map`."""
    vocab = config["vocab_size"]
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    qkv = (heads + 2 * config["num_key_value_heads"]) * head_dim
    shapes = {"embedding": (vocab, hidden), "head": (vocab, hidden), "final_norm": (hidden,)}
    layer = {"qkv.weight": (qkv, hidden), "qkv.bias": (qkv,), "proj": (hidden, heads * head_dim)}
    layer |= {"fc1": (2 * ffn, hidden), "fc2": (hidden, ffn), "norm1": (hidden,), "norm2": (hidden,)}
    layer |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(config["num_hidden_layers"]) for name, shape in layer.items()}
    made = dense_map(config).by_lf
    return {name: shape for name, shape in shapes.items() if name in made}


def box(name: str, shape: tuple[int, ...], at: tuple[int, ...], size: tuple[int, ...]) -> Placed:
    """A tensor of which one rank holds one box."""
    return Placed(name=name, shape=shape, parts=(Part(at=at, local=(0,) * len(shape), size=size),))


def folder_of(path: Path, tensors: dict[str, Tensor]) -> HfFolder:
    """A folder with these tensors."""
    path.mkdir(exist_ok=True)
    write_safetensors(path / "model.safetensors", tensors, {"format": "pt"})
    return open_folder(path)


def counting(folder: HfFolder) -> tuple[HfFolder, Counter]:
    """The folder, and a count of the bytes that are asked of each tensor's file."""
    count: Counter = Counter()

    class Slice:
        def __init__(self, name: str, inner: object) -> None:
            self.name, self.inner = name, inner

        def __getitem__(self, where: object) -> Tensor:
            values = self.inner[where]
            count[self.name] += values.nbytes
            return values

    class Handle:
        def __init__(self, inner: object) -> None:
            self.inner = inner

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self.inner.get_slice(name))

    return attrs.evolve(folder, handles={file: Handle(inner) for file, inner in folder.handles.items()}), count


@attrs.frozen
class Experts(LfRule):
    """One HF tensor an expert, transposed, stacked in lf: a rule kind that lf does not have."""

    hf: tuple[str, ...]


@hf_names.register
def _(rule: Experts) -> tuple[str, ...]:
    return rule.hf


@lf_shape.register
def _(rule: Experts, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    return (len(rule.hf), *reversed(shapes[rule.hf[0]]))


@pieces.register
def _(rule: Experts, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    return tuple(Piece(hf, (0, 0), (e, 0, 0), (1, *shape[1:]), (2, 1)) for e, hf in enumerate(rule.hf))


sizes = st.integers(1, 5)


@st.composite
def rules(draw: st.DrawFn) -> tuple[LfRule, tuple[int, ...]]:
    """A rule, and the shape of its lf tensor."""
    rest = tuple(draw(st.lists(sizes, max_size=2)))
    kind = draw(st.sampled_from([Same, Stack, FusedQkv, Experts]))
    if kind is Same:
        return Same("lf", "a"), tuple(draw(st.lists(sizes, max_size=3)))
    if kind is Stack:
        rows = tuple(draw(st.lists(sizes, min_size=1, max_size=4)))
        names = tuple("abcd"[: len(rows)])
        equal = len(set(rows)) == 1 and draw(st.booleans())
        return Stack("lf", names, rows=() if equal else rows), (sum(rows), *rest)
    if kind is FusedQkv:
        groups, ratio, head_dim = draw(sizes), draw(sizes), draw(sizes)
        rule = FusedQkv("lf", "q", "k", "v", heads=groups * ratio, kv_heads=groups, head_dim=head_dim)
        return rule, (groups * (ratio + 2) * head_dim, *rest)
    experts = draw(sizes)
    return Experts("lf", tuple(f"e{i}" for i in range(experts))), (experts, draw(sizes), draw(sizes))


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors of these shapes in which every number is another one."""
    first, made = 1, {}
    for name, shape in shapes.items():
        made[name] = torch.arange(first, first + math.prod(shape)).float().reshape(shape)
        first += math.prod(shape)
    return made


@given(rules())
@quick
def test_pieces_tile_both_sides(case):
    rule, shape = case
    assert lf_shape(rule, hf_shapes(rule, shape)) == shape
    tensors = numbered(hf_shapes(rule, shape))
    seen = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    covered = torch.zeros(shape)
    for piece in pieces(rule, shape):
        size = tuple(piece.size[axis] for axis in piece.axes)
        seen[piece.hf][tuple(slice(a, a + s) for a, s in zip(piece.hf_at, size, strict=True))] += 1
        covered[tuple(slice(a, a + s) for a, s in zip(piece.lf_at, piece.size, strict=True))] += 1
    assert set(seen) == set(hf_names(rule))
    assert all(bool((count == 1).all()) for count in seen.values())
    assert bool((covered == 1).all())


@given(rules(), st.data())
@quick
def test_round_trip_and_boxes(case, data):
    rule, shape = case
    tensors = numbered(hf_shapes(rule, shape))
    weights = WeightMap((rule,))
    with tempfile.TemporaryDirectory() as path:
        folder = folder_of(Path(path), tensors)
        check(weights, folder, {"lf": shape})
        assert lf_shapes(weights, folder) == {"lf": shape}
        full = read(weights, folder, whole("lf", shape))
        assert full.shape == shape
        back = to_hf(rule, full)
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name], tensors[name]) for name in tensors)
        starts = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
        size = tuple(data.draw(st.integers(1, extent - at)) for extent, at in zip(shape, starts, strict=True))
        part = read(weights, folder, box("lf", shape, starts, size))
        assert torch.equal(part, full[tuple(slice(a, a + s) for a, s in zip(starts, size, strict=True))])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "hidden"), [(6, 2, 24, 64), (5, 1, 7, 33), (3, 3, 9, 20), (8, 2, 3, 5)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_fused_qkv_is_grouped_by_key_value_head(tmp_path, heads, kv_heads, head_dim, hidden, bias):
    ratio, rest = heads // kv_heads, () if bias else (hidden,)
    rule = FusedQkv("qkv", "q", "k", "v", heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    shape = (kv_heads * (ratio + 2) * head_dim, *rest)
    tensors = numbered(hf_shapes(rule, shape))
    views = [tensors[x].reshape(kv_heads, (ratio if x == "q" else 1) * head_dim, *rest) for x in "qkv"]
    fused = read(WeightMap((rule,)), folder_of(tmp_path, tensors), whole("qkv", shape))
    assert torch.equal(fused, torch.cat(views, 1).reshape(shape))


def test_row_boxes_read_only_their_rows(tmp_path):
    stack = Stack("fc1", ("gate", "up"))
    qkv = FusedQkv("qkv", "q", "k", "v", heads=8, kv_heads=4, head_dim=3)
    weights = WeightMap((stack, qkv, Same("proj", "o"), Same("embedding", "e")))
    shapes = {"fc1": (24, 8), "qkv": (48, 8), "proj": (8, 24), "embedding": (10, 8)}
    tensors = {}
    for name, shape in shapes.items():
        tensors |= numbered(hf_shapes(weights.by_lf[name], shape))
    folder = folder_of(tmp_path, tensors)

    def bytes_of(placed: Placed) -> dict[str, int]:
        counted, count = counting(folder)
        read(weights, counted, placed)
        return dict(count)

    row = 8 * 4
    halves = (Part(at=(0, 0), local=(0, 0), size=(6, 8)), Part(at=(12, 0), local=(6, 0), size=(6, 8)))
    assert bytes_of(Placed(name="fc1", shape=(24, 8), parts=halves)) == {"gate": 6 * row, "up": 6 * row}
    assert bytes_of(box("qkv", (48, 8), (12, 0), (12, 8))) == {"q": 6 * row, "k": 3 * row, "v": 3 * row}
    assert bytes_of(box("qkv", (48, 8), (13, 0), (4, 8))) == {"q": 4 * row}
    assert bytes_of(box("proj", (8, 24), (0, 6), (8, 6))) == {"o": 8 * 6 * 4}
    assert bytes_of(box("embedding", (10, 8), (6, 0), (4, 8))) == {"e": 4 * row}


def test_parts_lie_where_they_are_placed(tmp_path):
    weights = WeightMap((Stack("fc1", ("gate", "up")),))
    tensors = numbered({"gate": (4, 3), "up": (4, 3)})
    parts = (Part(at=(2, 0), local=(0, 0), size=(2, 3)), Part(at=(6, 0), local=(2, 0), size=(2, 3)))
    placed = Placed(name="fc1", shape=(8, 3), parts=parts)
    folder = folder_of(tmp_path, tensors)
    second = torch.cat([tensors["gate"][2:], tensors["up"][2:]])
    assert torch.equal(read(weights, folder, placed), second)
    assert torch.equal(read(weights, folder, placed, dtype=torch.bfloat16), second.bfloat16())
    nothing = read(weights, folder, attrs.evolve(placed, parts=()))
    assert (nothing.shape, nothing.dtype) == ((0, 3), torch.float32)


def test_integers_keep_their_dtype_and_mixed_floats_widen(tmp_path):
    weights = WeightMap((Same("ids", "ids"), Stack("fc1", ("gate", "up"))))
    tensors = {"ids": torch.arange(4), "gate": torch.ones(2, 2, dtype=torch.bfloat16), "up": torch.full((2, 2), 1 / 3)}
    folder = folder_of(tmp_path, tensors)
    assert read(weights, folder, whole("ids", (4,)), dtype=torch.bfloat16).dtype == torch.int64
    fc1 = read(weights, folder, whole("fc1", (4, 2)))
    assert fc1.dtype == torch.float32
    assert torch.equal(fc1[2:], tensors["up"])


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ((Same("a", "x"), Same("b", "x")), "1 HF tensors stand in two rules: x"),
        ((Same("a", "x"), Stack("a", ("y", "z"))), "1 lf tensors stand in two rules: a"),
        ((Same("a", "x.inv_freq"), Carried("*.inv_freq")), r"x\.inv_freq stand in a rule and match a Carried"),
        ((Same("a", "x"), Duplicate("head", "embed")), "head is a duplicate of embed"),
    ],
)
def test_a_name_has_one_rule(rules, said):
    with pytest.raises(ValueError, match=said):
        WeightMap(rules)


def test_heads_must_be_groups():
    with pytest.raises(ValueError, match="heads = 6 must be a multiple of kv_heads = 4"):
        FusedQkv("qkv", "q", "k", "v", heads=6, kv_heads=4, head_dim=8)


def test_check_counts_and_names_every_fault(tmp_path):
    weights = WeightMap(
        (Same("a", "hf.a"), Same("b", "hf.b"), Same("c", "hf.c"), Same("gone", "hf.d"), Carried("old.*"))
    )
    tensors = {
        "hf.a": torch.zeros(2, 3),
        "hf.renamed": torch.zeros(2),
        "hf.c": torch.zeros(4),
        "hf.d": torch.zeros(1),
        "old.x": torch.zeros(1),
    }
    with pytest.raises(ValueError, match="the weights do not fit the model; nothing was loaded") as caught:
        check(weights, folder_of(tmp_path, tensors), {"a": (2, 4), "b": (2,), "c": (4,), "new": (1,)})
    said = str(caught.value)
    assert str(tmp_path) in said
    for line in (
        "1 missing in the folder: hf.b",
        "1 unexpected in the folder: hf.renamed in model.safetensors",
        "1 of the wrong shape: hf.a in model.safetensors is [2, 3], the model needs [2, 4]",
        "1 in the model without a rule: new",
        "1 in a rule but not in the model: gone",
    ):
        assert line in said
    assert "old.x" not in said


def test_check_without_a_model_takes_the_shapes_that_the_folder_makes(tmp_path):
    qkv = FusedQkv("qkv", "q", "k", "v", heads=4, kv_heads=2, head_dim=2)
    weights = WeightMap((qkv, Stack("fc1", ("gate", "up")), Same("norm", "n")))
    good = {"q": (8, 3), "k": (4, 3), "v": (4, 3), "gate": (5, 3), "up": (5, 3), "n": (3,)}
    check(weights, folder_of(tmp_path / "good", numbered(good)))
    unfit = folder_of(tmp_path / "unfit", numbered(good | {"q": (4, 3), "up": (6, 3)}))
    with pytest.raises(ValueError, match=r"qkv has 12 rows; 4 heads, 2 kv_heads and head_dim 2 make 16, fc1 has 11"):
        check(weights, unfit)
    del good["up"]
    with pytest.raises(ValueError, match="1 missing in the folder: up") as caught:
        check(weights, folder_of(tmp_path / "less", numbered(good)))
    assert "fc1" not in str(caught.value)


def test_check_says_which_lf_shape_no_tensors_make(tmp_path):
    rule = FusedQkv("qkv", "q", "k", "v", heads=4, kv_heads=2, head_dim=2)
    folder = folder_of(tmp_path, {name: torch.zeros(4, 2) for name in "qkv"})
    with pytest.raises(ValueError, match="qkv has 12 rows; 4 heads, 2 kv_heads and head_dim 2 make 16"):
        check(WeightMap((rule,)), folder, {"qkv": (12, 2)})
    with pytest.raises(ValueError, match="fc1 has 7 rows"):
        pieces(Stack("fc1", ("gate", "up")), (7, 2))


def test_duplicates_must_be_equal(tmp_path):
    weights = WeightMap((Same("embedding", "embed"), Duplicate("head", "embed")))
    embed = torch.randn(4, 3).bfloat16()
    shapes = {"embedding": (4, 3)}
    check(weights, folder_of(tmp_path / "absent", {"embed": embed}), shapes)
    check(weights, folder_of(tmp_path / "same", {"embed": embed, "head": embed.float()}), shapes)
    with pytest.raises(ValueError, match="1 stored twice with different values: head and embed"):
        check(weights, folder_of(tmp_path / "other", {"embed": embed, "head": embed + 1}), shapes)


def test_export_asks_for_each_tensor_once_and_follows_training(tmp_path):
    weights = WeightMap((Stack("fc1", ("gate", "up")), Same("embedding", "embed"), Duplicate("a_head", "embed")))
    tensors = {"a_head": torch.ones(2, 2), "gate": torch.ones(1, 2), "embed": torch.ones(2, 2), "up": torch.ones(1, 2)}
    source = remember(weights, folder_of(tmp_path, tensors))
    asked = Counter()

    def get(name: str) -> Tensor:
        asked[name] += 1
        return torch.full((2, 2), 7.0)

    written = list(export(weights, get, source))
    assert [name for name, _ in written] == ["a_head", "gate", "embed", "up"]
    assert all(bool((tensor == 7).all()) for _, tensor in written)
    assert asked == {"fc1": 1, "embedding": 1}
    assert {name for name, _ in export(weights, get)} == {"gate", "up", "embed"}
    assert {tensor.dtype for _, tensor in export(weights, get, source, dtype=torch.bfloat16)} == {torch.bfloat16}


def test_values_that_the_stored_dtype_cannot_hold_are_not_exported(tmp_path):
    weights = WeightMap((Same("a", "hf.a"), Same("b", "hf.b")))
    source = remember(weights, folder_of(tmp_path, {"hf.a": torch.ones(2).half(), "hf.b": torch.ones(2).half()}))
    values = {"a": torch.tensor([65504.0, -1.0]), "b": torch.tensor([1.0, -7e4])}
    exported = export(weights, values.__getitem__, source)
    assert torch.equal(next(exported)[1], values["a"].half())
    with pytest.raises(ValueError, match=r"hf\.b has values up to 7e\+04, and torch\.float16.* ends at 6\.55e\+04"):
        next(exported)
    values["b"] = torch.tensor([torch.inf, 1.0])  # Which the weights are, whatever holds them.
    assert dict(export(weights, values.__getitem__, source))["hf.b"].isinf().any()


def test_export_refuses_the_source_of_another_model(tmp_path):
    source = remember(
        WeightMap((Same("a", "x"), Same("b", "y"))), folder_of(tmp_path, {"x": torch.ones(1), "y": torch.ones(1)})
    )
    with pytest.raises(
        ValueError, match=r"1 tensors that the weight map does not name \(y\) and lacks 1 that it does \(z\)"
    ):
        next(export(WeightMap((Same("a", "x"), Same("b", "z"))), lambda name: torch.ones(1), source))


def test_report_has_a_line_for_every_tensor(tmp_path):
    weights = WeightMap((Stack("fc1", ("gate", "up")), Carried("*.inv_freq")))
    tensors = {"gate": torch.ones(1, 2), "up": torch.ones(1, 2), "r.inv_freq": torch.ones(3)}
    rows = report(weights, folder_of(tmp_path, tensors))
    assert json.loads(json.dumps(rows)) == [
        {"key": "gate", "rule": "Stack", "lf": "fc1", "shape": [1, 2], "dtype": "F32", "file": "model.safetensors"},
        {"key": "up", "rule": "Stack", "lf": "fc1", "shape": [1, 2], "dtype": "F32", "file": "model.safetensors"},
        {"key": "r.inv_freq", "rule": "Carried", "lf": None, "shape": [3], "dtype": "F32", "file": "model.safetensors"},
    ]
