"""The torch layers of the Megatron path against plain formulas, and what a packed micro-batch and dropout must keep.

Shapes: S queries, K keys, B rows, N heads, G key heads, D head width, T tokens of a packed micro-batch, V vocabulary.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lf
from lf.devices.cpu import cpu
from lf.devices.kunlun import kunlun
from lf.models import spec
from lf.models.decoder import Attention, DecoderConfig
from lf.models.layers.loss import token_losses
from lf.models.spec import IGNORE, Ctx, Layout, text_batch
from lf.parallel.config import MegatronParallel
from lf.parallel.mcore_compat import prepare_megatron
from lf.parallel.megatron import make_context
from tests.cases import ALONE, DENSE, dealt, gradients, megatron, off, ragged, run_of
from tests.workers import Workers

ROOT = Path(__file__).parents[1]
CLOSE = 5e-6
"""Largest absolute difference of fp32 attention from fp64, for values near 1."""
CARD = attrs.evolve(kunlun, name="cuda", capabilities=frozenset({"bf16", "fused_kernels"}))
WITH_TE = attrs.evolve(CARD, capabilities=CARD.capabilities | {"transformer_engine"})


@pytest.fixture(scope="module")
def ctx(one_process: None) -> Ctx:
    """The context of one process on the CPU."""
    return make_context(MegatronParallel(), Layout(), cpu, torch.float32)


def seed(number: int) -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(number, tp_rank=0, ep_rank=0, etp_rank=0)


def core_of(ctx: Ctx, attention: Attention, *, mask: str = "causal", layer: int = 1, scale: float | None = None) -> Any:
    """Returns the core attention of one layer (counted from 1)."""
    from megatron.core.transformer.enums import AttnMaskType

    from lf.models.gpt_spec import transformer_config
    from lf.models.layers.attention import TorchAttention

    config = transformer_config(attrs.evolve(DENSE, attention=attention), ctx)
    return TorchAttention(config, layer, AttnMaskType[mask], "self", softmax_scale=scale, pg_collection=ctx.groups)


def softmax_attention(
    q_SBND: Tensor, k_KBGD: Tensor, v_KBGD: Tensor, *, causal: bool, window: int = 0, scale: float | None = None
) -> Tensor:
    """Returns [S, B, N*D] in double precision; queries are the last S of the K positions."""
    q, k, v = q_SBND.double(), k_KBGD.double(), v_KBGD.double()
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("sbnd,kbnd->bnsk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    at = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    seen = torch.arange(k.shape[0])[None]
    hidden = torch.zeros_like(seen > at)
    if causal:
        hidden |= seen > at
    if window:
        hidden |= seen <= at - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bnsk,kbnd->sbnd", weights, v).flatten(2)


def draw(*shapes: tuple[int, ...], number: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def pulled(out: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the gradients of the leaves for one fixed random gradient of the output."""
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.autograd.grad(out, leaves, pull.to(out.dtype))


def near(value: Tensor, reference: Tensor) -> None:
    limit = CLOSE * max([1.0, *reference.abs().flatten().tolist()])
    torch.testing.assert_close(value.double(), reference.double(), rtol=0.0, atol=limit)


# The norm.


@pytest.mark.parametrize("parallel", [False, True], ids=["alone", "sequence_parallel"])
def test_the_norm_is_the_formula_and_tells_of_sequence_parallel(ctx: Ctx, parallel: bool) -> None:
    from lf.models.gpt_spec import transformer_config
    from lf.models.layers.megatron import TorchNorm

    layout = Layout(tp=2, sp=True) if parallel else Layout()
    norm = TorchNorm(transformer_config(DENSE, attrs.evolve(ctx, layout=layout)), 24, eps=1e-3)
    assert norm.weight.sequence_parallel is parallel
    (x,) = draw((5, 2, 24))
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1.0, 2.0, 24))
    x64, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    wanted = x64 / (x64.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    near(norm(x), wanted)
    for value, reference in zip(pulled(norm(x), (x, norm.weight)), pulled(wanted, (x64, weight)), strict=True):
        near(value, reference)


def test_the_norm_has_the_type_of_the_parameters(ctx: Ctx) -> None:
    from lf.models.gpt_spec import transformer_config
    from lf.models.layers.megatron import TorchNorm

    norm = TorchNorm(transformer_config(DENSE, attrs.evolve(ctx, dtype=torch.bfloat16)), 8)
    assert norm.weight.dtype == norm(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert torch.equal(norm.weight, torch.ones(8, dtype=torch.bfloat16))


# The layer backend.


def test_float32_and_devices_without_transformer_engine_run_torch_layers() -> None:
    prepare_megatron(cpu)
    from lf.models.layers.megatron import TorchProvider, provider

    assert isinstance(provider(cpu, torch.bfloat16), TorchProvider)
    assert isinstance(provider(kunlun, torch.bfloat16), TorchProvider)
    assert isinstance(provider(WITH_TE, torch.float32), TorchProvider)
    assert type(provider(WITH_TE, torch.bfloat16)).__name__ == "TESpecProvider"


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_transformer_engine_layer_has_megatrons_own_modules(
    ctx: Ctx, monkeypatch: pytest.MonkeyPatch, qk_norm: bool
) -> None:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.spec_utils import ModuleSpec

    from lf.models.gpt_spec import layer_spec
    from lf.models.layers.megatron import provider

    layers = provider(WITH_TE, torch.bfloat16)
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", type(layers), raising=False)
    monkeypatch.setattr(type(layers), "layer_norm", lambda self, rms_norm=False, for_qk=False: f"norm {for_qk}")
    wanted = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
    cfg = attrs.evolve(DENSE, attention=attrs.evolve(DENSE.attention, qk_norm=qk_norm))
    made = layer_spec(cfg, attrs.evolve(ctx, layers=layers), 0)

    def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
        if isinstance(value, ModuleSpec):
            yield path, value.module
            yield f"{path}.params", value.params
            yield from flat(value.submodules, f"{path}.submodules")
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                if name != "sharded_state_dict_keys_map":
                    yield from flat(getattr(value, name), f"{path}.{name}")
        else:
            yield path, value

    assert dict(flat(made)) == dict(flat(wanted))


# Attention.


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 2)]),
    length=st.integers(1, 9),
    rows=st.integers(1, 3),
    window=st.integers(0, 5),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.7]),
)
def test_attention_is_a_masked_softmax(
    ctx: Ctx, heads: tuple[int, int], length: int, rows: int, window: int, causal: bool, scale: float | None
) -> None:
    window = window if causal else 0
    attention = Attention(
        heads=heads[0], kv_heads=heads[1], head_dim=8, window=window, window_layers=(1,) if window else ()
    )
    core = core_of(ctx, attention, mask="causal" if causal else "no_mask", layer=2, scale=scale)
    q, k, v = leaves = draw((length, rows, heads[0], 8), (length, rows, heads[1], 8), (length, rows, heads[1], 8))
    out = core(q, k, v)
    wanted = softmax_attention(q, k, v, causal=causal, window=window, scale=scale)
    near(out, wanted)
    for value, reference in zip(pulled(out, leaves), pulled(wanted, leaves), strict=True):
        near(value, reference)


def test_the_mask_of_the_call_comes_before_that_of_the_layer(ctx: Ctx) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    core = core_of(ctx, Attention(heads=2, kv_heads=2, head_dim=8))
    q, k, v = draw((5, 1, 2, 8), (5, 1, 2, 8), (5, 1, 2, 8))
    near(core(q, k, v, attn_mask_type=AttnMaskType.no_mask), softmax_attention(q, k, v, causal=False))
    near(core(q, k, v, attn_mask_type=AttnMaskType.causal), softmax_attention(q, k, v, causal=True))


def test_a_window_holds_in_its_layers_only(ctx: Ctx) -> None:
    attention = Attention(heads=2, kv_heads=2, head_dim=8, window=2, window_layers=(1,))
    q, k, v = draw((6, 1, 2, 8), (6, 1, 2, 8), (6, 1, 2, 8))
    near(core_of(ctx, attention, layer=1)(q, k, v), softmax_attention(q, k, v, causal=True))
    near(core_of(ctx, attention, layer=2)(q, k, v), softmax_attention(q, k, v, causal=True, window=2))


def packed(lengths: Sequence[int]) -> Any:
    from lf.models.decoder import _packing

    return _packing(tuple(lengths), torch.device("cpu"))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), window=st.integers(0, 3), mask=st.booleans())
def test_packed_documents_are_separate_runs(ctx: Ctx, lengths: list[int], window: int, mask: bool) -> None:
    window = window if mask else 0
    attention = Attention(heads=4, kv_heads=2, head_dim=8, window=window, window_layers=(1,) if window else ())
    core = core_of(ctx, attention, mask="causal" if mask else "no_mask", layer=2)
    total = sum(lengths)
    q, k, v = leaves = draw((total, 4, 8), (total, 2, 8), (total, 2, 8))
    out = core(q, k, v, packed_seq_params=packed(lengths))
    assert out.shape == (total, 32)
    rows = zip(*(torch.split(t, lengths) for t in leaves), strict=True)
    wanted = torch.cat(
        [softmax_attention(*(t[:, None] for t in row), causal=mask, window=window)[:, 0] for row in rows]
    )
    near(out, wanted)
    for value, reference in zip(pulled(out, leaves), pulled(wanted, leaves), strict=True):
        near(value, reference)


def test_the_packing_says_where_documents_end() -> None:
    made = packed((3, 1, 4))
    assert made.cu_seqlens_q.tolist() == made.cu_seqlens_kv.tolist() == [0, 3, 4, 8]
    assert made.cu_seqlens_q.dtype == torch.int32
    assert (made.qkv_format, made.max_seqlen_q, made.max_seqlen_kv, made.lengths) == ("thd", 4, 4, (3, 1, 4))


def test_a_document_does_not_touch_another_at_all(ctx: Ctx) -> None:
    core = core_of(ctx, Attention(heads=4, kv_heads=2, head_dim=8))
    lengths = (4, 5, 3)
    q, k, v = leaves = draw((12, 4, 8), (12, 2, 8), (12, 2, 8))
    out = core(q, k, v, packed_seq_params=packed(lengths))
    for grad in torch.autograd.grad(out[4:9].sum(), leaves, retain_graph=True):
        assert not grad[:4].any()
        assert not grad[9:].any()
        assert grad[4:9].any()
    with torch.no_grad():
        for leaf in leaves:
            leaf[4:9] = torch.nan
    again = core(q, k, v, packed_seq_params=packed(lengths))
    assert torch.equal(again[:4], out[:4])
    assert torch.equal(again[9:], out[9:])
    assert again[4:9].isnan().all()


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("chunks", [(1,) * 9, (4, 1, 3, 1), (9,)], ids=str)
def test_a_cache_gives_what_one_call_gives(ctx: Ctx, chunks: tuple[int, ...], window: int) -> None:
    from lf.models.layers.attention import key_value_cache

    attention = Attention(heads=4, kv_heads=2, head_dim=8, window=window, window_layers=(1,) if window else ())
    core = core_of(ctx, attention, layer=2)
    q, k, v = draw((9, 2, 4, 8), (9, 2, 2, 8), (9, 2, 2, 8))
    with torch.no_grad():
        with key_value_cache(core) as cached:
            assert cached
            pieces = [core(*row) for row in zip(*(torch.split(t, chunks) for t in (q, k, v)), strict=True)]
        assert core.cache is None
        near(torch.cat(pieces), softmax_attention(q, k, v, causal=True, window=window))


def test_layers_that_cannot_keep_anything_say_so() -> None:
    from lf.models.layers.attention import key_value_cache

    with key_value_cache(torch.nn.Linear(2, 2)) as cached:
        assert not cached


def test_dropout_keeps_the_mean_and_draws_from_the_ranks_own_state(ctx: Ctx) -> None:
    core = core_of(ctx, Attention(heads=2, kv_heads=1, head_dim=8, dropout=0.5))
    q, k, v = draw((6, 2, 2, 8), (6, 2, 1, 8), (6, 2, 1, 8))
    seed(0)
    before = torch.get_rng_state()
    with torch.no_grad():
        first = core(q, k, v)
        assert torch.equal(before, torch.get_rng_state())
        assert not torch.equal(core(q, k, v), first)
        seed(0)
        assert torch.equal(core(q, k, v), first)
        mean = torch.stack([core(q, k, v) for _ in range(2000)]).double().mean(0)
        whole = softmax_attention(q, k, v, causal=True)
        assert float((first - whole).abs().max()) > 0.1
        assert float((mean - whole).abs().max()) < 0.15
        core.eval()
        near(core(q, k, v), whole)


# The loss over a padded vocabulary.


@settings(max_examples=20, deadline=None, derandomize=True)
@given(vocab=st.integers(2, 9), padding=st.integers(0, 5), data=st.data())
def test_padded_columns_and_ignored_labels_are_nothing(vocab: int, padding: int, data: st.DataObject) -> None:
    labels = data.draw(st.lists(st.sampled_from([IGNORE, *range(vocab)]), min_size=6, max_size=6))
    labels_BS = torch.tensor(labels).view(2, 3)
    (logits,) = draw((3, 2, vocab + padding))
    with torch.no_grad():
        logits[..., vocab:] = 1e4
    losses = token_losses(logits, labels_BS, vocab, IGNORE, ALONE)
    assert losses.dtype == torch.float32
    log_p = logits[..., :vocab].detach().double().log_softmax(-1).transpose(0, 1)
    wanted = -log_p.gather(-1, labels_BS.clamp(min=0)[..., None])[..., 0] * (labels_BS != IGNORE)
    near(losses, wanted)
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    assert not grad[..., vocab:].any()
    assert not grad.transpose(0, 1)[labels_BS == IGNORE].any()
    kept = labels_BS != IGNORE
    expected = log_p[kept].exp() - F.one_hot(labels_BS[kept], vocab)
    near(grad.transpose(0, 1)[kept][:, :vocab], expected)


def test_the_loss_of_half_precision_logits_is_single() -> None:
    logits = torch.randn(4, 2, 7).bfloat16()
    losses = token_losses(logits, torch.ones(2, 4, dtype=torch.long), 5, IGNORE, ALONE)
    assert losses.dtype == torch.float32
    near(losses, -logits[..., :5].double().log_softmax(-1)[..., 1].t())


# Whole models.


def model_of(ctx: Ctx, cfg: DecoderConfig) -> torch.nn.Module:
    engine, _ = megatron(run_of(cfg))
    return engine.state.chunks[0].module


def run(
    cfg: DecoderConfig, model: torch.nn.Module, batches: Sequence[spec.Batch]
) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Returns logits [T, V] of the micro-batches one after the other, their loss, and every gradient of it."""
    weights = {"lm": sum(float(spec.loss_weights(cfg, batch)["lm"]) for batch in batches)}
    model.zero_grad()
    logits, loss = [], 0.0
    for batch in batches:
        terms = spec.loss_terms(cfg, spec.forward(cfg, model, batch), batch)
        part = terms["lm"] / weights["lm"]
        part.backward()
        loss += float(part.detach())
        with torch.no_grad():
            bare = {name: value for name, value in batch.items() if name != "labels"}
            logits.append(spec.forward(cfg, model, bare).flatten(0, 1)[:, : cfg.vocab])
    grads = {n: p.main_grad.clone() + (0 if p.grad is None else p.grad) for n, p in model.named_parameters()}
    for param in model.parameters():
        param.main_grad.zero_()
    return torch.cat(logits), loss, grads


VARIANTS = {
    "untied": DENSE,
    "tied, padded": attrs.evolve(DENSE, tied=True, vocab_multiple=64),
    "bias, window": attrs.evolve(
        DENSE, attention=Attention(heads=4, kv_heads=4, head_dim=12, qkv_bias=True, window=4, window_layers=(1,))
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_packed_row_is_its_documents_one_by_one(ctx: Ctx, name: str) -> None:
    cfg = VARIANTS[name]
    model = model_of(ctx, cfg)
    (row,) = ragged(cfg, 1, 24, seed=5)
    ends = torch.tensor(row["lengths"]).cumsum(0).tolist()
    assert len(ends) > 1
    alone = [
        {**row, "tokens": row["tokens"][e - n : e], "labels": row["labels"][e - n : e], "lengths": (n,)}
        for n, e in zip(row["lengths"], ends, strict=True)
    ]
    logits, loss, grads = run(cfg, model, [text_batch([row])])
    logits_, loss_, grads_ = run(
        cfg, model, [text_batch([document]) for document in alone if any(document["labels"] != IGNORE)]
    )
    kept = torch.cat([torch.full((len(d["tokens"]),), bool(any(d["labels"] != IGNORE))) for d in alone])
    assert off(logits[kept], logits_) < 5e-6
    assert loss == pytest.approx(loss_, rel=1e-6)
    for key, grad in grads.items():
        assert off(grad, grads_[key]) < 5e-6, key


def test_documents_of_a_row_do_not_see_each_other(ctx: Ctx) -> None:
    model = model_of(ctx, DENSE)
    (row,) = ragged(DENSE, 1, 24, seed=5)
    first = row["lengths"][0]
    other = {**row, "tokens": row["tokens"].copy()}
    other["tokens"][first:] = (other["tokens"][first:] + 1) % DENSE.vocab
    (a, *_), (b, *_) = (run(DENSE, model, [text_batch([r])]) for r in (row, other))
    assert torch.equal(a[:first], b[:first])
    assert not torch.equal(a[first:], b[first:])


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_padding_in_the_vocabulary_stay_zero(ctx: Ctx, tied: bool) -> None:
    cfg = attrs.evolve(DENSE, tied=tied, vocab_multiple=64)
    engine, _ = megatron(run_of(cfg, optim=lf.AdamW(lr=1e-2, weight_decay=0.1)))
    model = engine.state.chunks[0].module
    padded = [p for n, p in model.named_parameters() if p.shape[0] == 192 and p.ndim == 2 and "fc1" not in n]
    assert len(padded) == (1 if tied else 2)
    assert all(not param[cfg.vocab :].any() for param in padded)
    *_, grads = run(cfg, model, [text_batch(ragged(cfg, 2, 24, seed=1))])
    for name, grad in grads.items():
        if grad.shape[0] == 192 and "fc1" not in name:
            assert not grad[cfg.vocab :].any()
            assert grad[: cfg.vocab].any()
    engine.step(engine.state, [text_batch(ragged(cfg, 2, 24, seed=1))])
    assert all(not param[cfg.vocab :].any() for param in padded)


# Dropout in a step.

DROPS = attrs.evolve(DENSE, attention=attrs.evolve(DENSE.attention, dropout=0.3))


def dropped(
    order: tuple[int, ...],
    *,
    step: int = 0,
    number: int = 0,
    named: str = "row",
    recompute: Literal["none", "full"] = "none",
    cfg: DecoderConfig = DROPS,
) -> Any:
    """Returns the gradients of one step over micro-batches taken in an order and dealt to the ranks in turn."""
    run = run_of(cfg, seed=number, optim=lf.AdamW(clip=0.0), parallel=lf.MegatronParallel(recompute=recompute))
    engine, ctx = megatron(run)
    first = megatron(run_of(cfg))[0].state.chunks[0].module
    with torch.no_grad():  # Another seed draws other weights too; the test is about dropout alone.
        for mine, theirs in zip(engine.state.chunks[0].module.parameters(), first.parameters(), strict=True):
            mine.copy_(theirs)
    engine = attrs.evolve(engine, state=attrs.evolve(engine.state, step=step))
    rows = [{**row, "id": row["id"].replace("row", named)} for row in ragged(cfg, 8, 24, seed=3)]
    micro = dealt(rows, 2, Layout())
    return gradients(engine, ctx, [micro[i] for i in order][dist.get_rank() :: dist.get_world_size()])


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(off(value, b[name]) for name, value in a.items())


ORDER = (0, 1, 2, 3)


def changed(order: tuple[int, ...], change: dict[str, Any]) -> Any:
    return dropped(order, **change)


def test_dropout_is_a_function_of_seed_step_and_samples(workers: Workers) -> None:
    (reference, _, loss, _), *_ = workers.run(1, dropped, ORDER)
    (again, _, loss_, _), *_ = workers.run(1, dropped, ORDER)
    assert loss == loss_
    assert all(torch.equal(again[name], value) for name, value in reference.items())
    for world, order in ((1, (3, 1, 2, 0)), (2, ORDER), (2, (2, 3, 1, 0))):
        for grads, _, loss_, _ in workers.run(world, dropped, order):
            assert loss_ == pytest.approx(loss, rel=1e-6)
            assert worst(grads, reference) < 5e-6, (world, order)
    for change in ({"step": 1}, {"number": 1}, {"named": "line"}, {"cfg": DENSE}):
        (other, *_), *_ = workers.run(1, changed, ORDER, change)
        assert worst(other, reference) > 1e-2, change


def test_recompute_repeats_the_dropout(workers: Workers) -> None:
    (plain, *rest), *_ = workers.run(1, dropped, ORDER)
    (again, *rest_), *_ = workers.run(1, changed, ORDER, {"recompute": "full"})
    assert rest == rest_
    assert all(torch.equal(again[name], value) for name, value in plain.items())


# Devices that are not there: construction only.

ON_META = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from lf.models.layers.megatron import TorchProvider
from lf.models.spec import Ctx, Layout, build_model
from lf.parallel.mcore_compat import prepare_megatron
from lf.parallel.megatron import placements, process_groups
from tests.test_megatron_layers import CARD, VARIANTS

prepare_megatron(CARD)
groups = process_groups(Layout())
for cfg in VARIANTS.values():
    ctx = Ctx(device=CARD, dtype=torch.bfloat16, groups=groups, layers=TorchProvider(), meta=True)
    held = placements(build_model(cfg, ctx), ctx)
    assert {param.device.type for param, _ in held} == {"meta"}
    print(len(held))
"""


def fresh(code: str) -> list[str]:
    """Returns the lines that a new process prints, whose megatron-core may be on another device than this one's."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_torch_layers_of_a_card_are_built_on_meta_without_one(ctx: Ctx) -> None:
    from lf.parallel.megatron import placements

    assert [int(line) for line in fresh(ON_META)] == [
        len(placements(model_of(ctx, cfg), ctx)) for cfg in VARIANTS.values()
    ]


NAMES = """
import torch
import torch.distributed as dist
if not torch.cuda.is_available():
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: torch.device("meta")
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    torch.cuda.get_device_properties = lambda *args: type("Card", (), {"major": 9, "minor": 0})()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from lf.models.layers.megatron import TorchProvider, provider
from lf.models.spec import Ctx, Layout, build_model
from lf.parallel.mcore_compat import prepare_megatron
from lf.parallel.megatron import placements, process_groups
from tests.test_megatron_layers import VARIANTS, WITH_TE

prepare_megatron(WITH_TE)
groups = process_groups(Layout())
for cfg in VARIANTS.values():
    found = []
    for layers in (TorchProvider(), provider(WITH_TE, torch.bfloat16)):
        ctx = Ctx(device=WITH_TE, dtype=torch.bfloat16, groups=groups, layers=layers, meta=True)
        model = build_model(cfg, ctx)
        found.append({p.name: (p.shape, p.parts, p.owner, t.dtype) for t, p in placements(model, ctx)})
        fused = [n for n, _ in model.named_parameters() if n.endswith("linear_qkv.layer_norm_weight")]
        assert len(fused) == (0 if len(found) == 1 else cfg.layers), fused
    assert found[0] == found[1], set(found[0]) ^ set(found[1])
print(len(VARIANTS), "models")
"""


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="TransformerEngine is not installed")
def test_transformer_engine_layers_have_the_canonical_names_and_shapes() -> None:
    assert fresh(NAMES)[-1] == f"{len(VARIANTS)} models"
