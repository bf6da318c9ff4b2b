"""Models with experts, latent attention and further heads, and the steps that tests compare between layouts."""

from typing import Any

import attrs

import lf
from lf.models.decoder import Attention, DecoderConfig, Experts, Mla, Mlp, Mtp
from lf.models.layers.rope import Rope, YarnScaling
from tests.cases import DENSE, dealt, gradients, megatron, off, ragged, run_of, trained

__all__ = ["off"]

SOFTMAX = Experts(count=8, top_k=2, width=24, balance="sequence", balance_coef=0.02, z_coef=0.01)
GATED = attrs.evolve(SOFTMAX, renormalise=False, shared=40, shared_gate=True, dense=(1,))
SIGMOID = Experts(
    count=8,
    top_k=3,
    width=16,
    score="sigmoid",
    scale=2.5,
    groups=4,
    group_top_k=2,
    bias=True,
    bias_rate=0.01,
    shared=16,
    dense=(0,),
    balance="sequence",
    balance_coef=0.05,
)
LATENT = Mla(heads=4, q_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, v_dim=12)
YARN = Rope(theta=1e4, scaling=YarnScaling(factor=4.0, original=16, mscale=1.0, mscale_all_dim=1.0))

BASE: DecoderConfig = attrs.evolve(DENSE, layers=4)
MODELS: dict[str, DecoderConfig] = {
    "softmax": attrs.evolve(BASE, experts=SOFTMAX),
    "shared": attrs.evolve(BASE, experts=GATED, tied=True),
    "latent": attrs.evolve(BASE, attention=LATENT, rope=YARN, mlp=Mlp(width=64)),
    "heads": attrs.evolve(BASE, mtp=Mtp(depth=2, coef=0.5)),
    "tied heads": attrs.evolve(BASE, mtp=Mtp(), tied=True),
    "all": attrs.evolve(BASE, attention=LATENT, rope=YARN, experts=SIGMOID, mtp=Mtp(depth=1, coef=0.3)),
    "allgather": attrs.evolve(BASE, experts=attrs.evolve(SOFTMAX, dispatch="allgather", balance="none")),
    "max": attrs.evolve(
        BASE,
        attention=Attention(heads=4, kv_heads=2, head_dim=16, qk_norm=True, qk_norm_over="all"),
        experts=attrs.evolve(SIGMOID, groups=4, group_rank="max", score="softmax", bias=False, balance="none"),
    ),
}

P = lf.MegatronParallel
LAYOUTS: dict[str, tuple[int, lf.MegatronParallel]] = {
    "one micro-batch": (1, P(micro_batch=8)),
    "one, recompute": (1, P(micro_batch=2, recompute="full")),
    "dp2": (2, P(micro_batch=2)),
    "ep2": (2, P(ep=2)),
    "ep2, two rows": (2, P(ep=2, micro_batch=2)),
    "selective": (
        2,
        P(
            tp=2,
            ep=2,
            recompute="selective",
            recompute_modules=("core_attn", "mlp", "layernorm", "moe_act"),
        ),
    ),
    "selective, latent": (
        2,
        P(tp=2, recompute="selective", recompute_modules=("core_attn", "mla_up_proj", "shared_experts")),
    ),
    "selective moe": (2, P(pp=2, recompute="selective", recompute_modules=("moe",))),
    "ep2, recompute": (2, P(ep=2, recompute="full", micro_batch=2)),
    "tp2": (2, P(tp=2)),
    "tp2 etp2": (2, P(tp=2, etp=2)),
    "tp2 ep2": (2, P(tp=2, ep=2)),
    "pp2": (2, P(pp=2)),
    "pp2 vpp2": (2, P(pp=2, vpp=2)),
    "cp2": (2, P(cp=2)),
    "cp2 ep2": (2, P(cp=2, ep=2)),
    "cp2 ulysses": (2, P(cp=2, cp_kind="ulysses")),
    "ep4": (4, P(ep=4)),
    "ep2 etp2 tp2": (4, P(tp=2, ep=2, etp=2)),
    "pp2 ep2 tp2": (4, P(pp=2, ep=2, tp=2)),
    "pp2 tp2 cp1 dp1": (4, P(pp=2, tp=2, ep=2)),
    "tp2 cp2 ep4": (4, P(tp=2, cp=2, ep=4)),
    "pp2 cp2": (4, P(pp=2, cp=2, ep=2)),
    "pp4": (4, P(pp=4)),
}


def one_step(model: str, parallel: lf.MegatronParallel) -> Any:
    """Returns every gradient of one step, its norm, the loss and the terms."""
    engine, ctx = megatron(run_of(MODELS[model], optim=lf.AdamW(clip=0.0), parallel=parallel))
    rows = ragged(MODELS[model], 8, 24, seed=3)
    return gradients(engine, ctx, dealt(rows, parallel.micro_batch, ctx.layout))


def three_steps(model: str, parallel: lf.MegatronParallel, optim: lf.OptimConfig) -> Any:
    """Returns the losses of three steps and the weights after them."""
    engine, ctx = megatron(run_of(MODELS[model], optim=optim, parallel=parallel))
    rows = ragged(MODELS[model], 8, 24, seed=3)
    return trained(engine, dealt(rows, parallel.micro_batch, ctx.layout), 3)
