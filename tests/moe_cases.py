"""Models with experts, latent attention and further heads, and the layouts that tests compare them in."""

import attrs

import lf
from lf.models.decoder import Attention, DecoderConfig, Experts, Mla, Mlp, Mtp
from lf.models.decoder_facts import kv_heads
from lf.models.layers.rope import Rope, YarnScaling
from tests.cases import DENSE

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
    "heads and experts": attrs.evolve(BASE, experts=SOFTMAX, mtp=Mtp(depth=2), tied=True),
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
    "tp2 ep2": (2, P(tp=2, ep=2, micro_batch=2)),
    "pp2": (2, P(pp=2)),
    "pp2 vpp2": (2, P(pp=2, vpp=2)),
    "cp2": (2, P(cp=2)),
    "cp2 ep2": (2, P(cp=2, ep=2)),
    "cp2 ulysses": (2, P(cp=2, cp_kind="ulysses")),
    "ep4": (4, P(ep=4)),
    "tp2 ep2 etp2": (4, P(tp=2, ep=2, etp=2, micro_batch=2)),
    "pp2 tp2 ep2": (4, P(pp=2, tp=2, ep=2)),
    "tp2 cp2 ep4": (4, P(tp=2, cp=2, ep=4)),
    "pp2 cp2 ep2": (4, P(pp=2, cp=2, ep=2)),
    "pp4": (4, P(pp=4)),
}

WIDE: dict[str, tuple[int, lf.MegatronParallel]] = {
    "tp2 pp2 ep2 dp2": (8, P(tp=2, pp=2, ep=2)),
    "tp2 cp2 ep4 etp2 dp2": (8, P(tp=2, cp=2, ep=4, etp=2)),
    "tp2 pp2 cp2 ep4": (8, P(tp=2, pp=2, cp=2, ep=4)),
    "pp4 ep2 dp2": (8, P(pp=4, ep=2)),
    "pp2 vpp2 tp2 ep2 dp2": (8, P(pp=2, vpp=2, tp=2, ep=2)),
    "ep8": (8, P(ep=8)),
}
"""Layouts of eight processes, in the full product only."""


def fits(model: str, layout: str) -> bool:
    """Returns whether a layout of the tables can hold a model."""
    cfg, (_, parallel) = MODELS[model], {**LAYOUTS, **WIDE}[layout]
    modules = parallel.recompute_modules if parallel.recompute == "selective" else ()
    if cfg.experts is None and (parallel.ep * parallel.etp > 1 or {"moe", "moe_act"} & set(modules)):
        return False
    if "mla_up_proj" in modules and not isinstance(cfg.attention, Mla):
        return False
    if "shared_experts" in modules and not (cfg.experts and cfg.experts.shared):
        return False
    return parallel.cp_kind != "ulysses" or kv_heads(cfg.attention) % (parallel.tp * parallel.cp) == 0
