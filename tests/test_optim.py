"""Optimisers and their states, which tensors decay or are frozen, and the schedules."""

import itertools
from collections.abc import Callable

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lf.train.config import AdamW, Constant, Cosine, Linear, OptimConfig, Rate, ScheduleConfig, Sgd, Wsd
from lf.train.optim import (
    check_parts,
    decays,
    freeze,
    make_optimizer,
    param_groups,
    restore_state,
    set_rate,
    start_state,
    state_tensors,
)
from lf.train.schedule import check_schedule, factor


@attrs.frozen(kw_only=True)
class Rectified(OptimConfig):
    """An optimiser that lf does not know, as a user writes it."""


@make_optimizer.register
def _(cfg: Rectified, groups: list) -> torch.optim.Optimizer:
    return torch.optim.RAdam(groups, lr=cfg.lr, decoupled_weight_decay=True)


class Counting(torch.optim.Optimizer):
    """Keeps Python numbers, as older optimisers do."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["scale"] = state.get("scale", 1.0) * 0.9
                param -= group["lr"] * param.grad * state["scale"] / state["count"]


@attrs.frozen(kw_only=True)
class CountingConfig(OptimConfig):
    """Its config."""


@make_optimizer.register
def _(cfg: CountingConfig, groups: list) -> torch.optim.Optimizer:
    return Counting(groups, {"lr": cfg.lr})


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"embedding": nn.Embedding(11, 6), "input_layernorm": nn.LayerNorm(6), "out": nn.Linear(6, 5, bias=True)}
    )


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for index, param in enumerate(module.parameters()):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + index))
        optimizer.step()


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in module.parameters()]


CONFIGS = [
    AdamW(lr=1e-2),
    Sgd(lr=1e-2, momentum=0.9, weight_decay=0.1),
    Sgd(lr=1e-2),
    Rectified(lr=1e-2, weight_decay=0.1),
    CountingConfig(lr=1e-2),
]


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: type(cfg).__name__)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "has_state"])
def test_three_steps_restore_three_steps_is_six_steps(cfg: OptimConfig, fresh: bool) -> None:
    straight = model()
    train(straight, make_optimizer(cfg, param_groups(straight.named_parameters(), cfg)), range(6))

    first = model()
    before = make_optimizer(cfg, param_groups(first.named_parameters(), cfg))
    train(first, before, range(3))
    saved = {name: state_tensors(before, param) for name, param in first.named_parameters()}
    saved = {name: {key: value.clone() for key, value in state.items()} for name, state in saved.items()}

    second = model()
    after = make_optimizer(cfg, param_groups(second.named_parameters(), cfg))
    if fresh:
        groups = [dict(group) for group in after.param_groups]
        start_state(after)
        assert after.param_groups == groups
        assert all(param.grad is None for param in second.parameters())
    else:
        train(second, after, range(20, 22))
    second.load_state_dict(first.state_dict())
    for name, param in second.named_parameters():
        restore_state(after, param, saved[name])
    for name, param in second.named_parameters():
        again = state_tensors(after, param)
        assert again.keys() == saved[name].keys()
        for key, value in again.items():
            assert value.dtype == saved[name][key].dtype
            assert torch.equal(value, saved[name][key])
    train(second, after, range(3, 6))
    for a, b in zip(weights(straight), weights(second), strict=True):
        assert torch.equal(a, b)


def test_the_state_is_named() -> None:
    module = model()
    cfg = AdamW()
    optimizer = make_optimizer(cfg, param_groups(module.named_parameters(), cfg))
    param = module["out"].weight
    assert state_tensors(optimizer, param) == {}
    train(module, optimizer, range(2))
    state = state_tensors(optimizer, param)
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert state["step"].item() == 2


def test_a_state_that_does_not_fit_is_refused() -> None:
    module = model()
    cfg = AdamW()
    optimizer = make_optimizer(cfg, param_groups(module.named_parameters(), cfg))
    train(module, optimizer, range(1))
    param = module["out"].weight
    state = state_tensors(optimizer, param)
    for wrong, message in (
        ({"momentum_buffer": state["exp_avg"]}, r"has \['momentum_buffer'\], but this one keeps \['exp_avg', "),
        ({}, r"has \[\], but this one keeps \['exp_avg', "),
        ({**state, "exp_avg": state["exp_avg"].T}, r"exp_avg is torch.float32 of shape \(6, 5\), but .* \(5, 6\)"),
        ({**state, "exp_avg": state["exp_avg"].double()}, r"exp_avg is torch.float64 .* keeps torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            restore_state(optimizer, param, wrong)
    # A fresh optimiser would take anything, and its kernels read beyond what is too short.
    unused = make_optimizer(cfg, param_groups(model().named_parameters(), cfg))
    with pytest.raises(ValueError, match=r"has \['exp_avg', 'exp_avg_sq', 'step'\], but this one keeps \[\]"):
        restore_state(unused, unused.param_groups[0]["params"][0], state)
    optimizer.state[param]["history"] = [1.0]
    with pytest.raises(ValueError, match=r"keeps history as builtins\.list"):
        state_tensors(optimizer, param)


def test_fused_adamw_is_the_plain_one() -> None:
    cfg = AdamW(lr=1e-2)
    ours, plain = model(), model()
    optimizer = make_optimizer(cfg, param_groups(ours.named_parameters(), cfg))
    assert all(group["fused"] for group in optimizer.param_groups)
    reference = torch.optim.AdamW(
        param_groups(plain.named_parameters(), cfg), lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, foreach=False, fused=False
    )
    train(ours, optimizer, range(10))
    train(plain, reference, range(10))
    for a, b in zip(weights(ours), weights(plain), strict=True):
        assert (a - b).abs().max() <= 1e-6


def test_parameters_on_the_meta_device_have_an_optimizer_too() -> None:
    module = nn.Linear(2, 3, device="meta")
    cfg = AdamW()
    assert len(make_optimizer(cfg, param_groups(module.named_parameters(), cfg)).param_groups) == 2


@pytest.mark.parametrize("cfg", [AdamW(lr=0.1, weight_decay=0.5), Sgd(lr=0.1, momentum=0.9, weight_decay=0.5)])
def test_weight_decay_is_decoupled(cfg: OptimConfig) -> None:
    param = nn.Parameter(torch.full((2, 2), 8.0))
    optimizer = make_optimizer(cfg, param_groups([("w", param)], cfg))
    for step in range(1, 4):
        param.grad = torch.zeros(2, 2)
        optimizer.step()
        torch.testing.assert_close(param.detach(), torch.full((2, 2), 8.0 * 0.95**step))


@pytest.mark.parametrize(
    ("name", "shape", "decay"),
    [
        ("embedding.word_embeddings.weight", (8, 4), True),
        ("output_layer.weight", (8, 4), True),
        ("layers.0.attention.qkv.weight", (8, 4), True),
        ("patch_embed.proj.weight", (4, 3, 2, 2), True),
        ("layers.0.input_layernorm.weight", (4,), False),
        ("layers.0.qkv.layer_norm_weight", (2, 4), False),
        ("blocks.0.norm1.weight", (2, 4), False),
        ("layers.0.self_attn.q_norm.weight", (2, 4), False),
        ("model.rmsnorm.weight", (2, 4), False),
        ("layers.0.attention.qkv.bias", (8,), False),
        ("experts.linear_fc1.bias0", (2, 8), False),
        ("experts.expert_bias", (2, 8), False),
        ("relative_attention_bias.weight", (8, 4), True),
        ("normal_projection.weight", (8, 4), True),
        ("scale", (), False),
    ],
)
def test_what_decays(name: str, shape: tuple[int, ...], decay: bool) -> None:
    assert decays(name, torch.empty(shape)) is decay


def test_groups_keep_order_and_leave_out_what_is_frozen() -> None:
    module = model()
    module["out"].bias.requires_grad_(False)
    cfg = AdamW(weight_decay=0.2)
    groups = param_groups(module.named_parameters(), cfg)
    assert [group["names"] for group in groups] == [
        ["embedding.weight", "out.weight"],
        ["input_layernorm.weight", "input_layernorm.bias"],
    ]
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
    assert groups[0]["params"][1] is module["out"].weight
    assert [len(group) for group in groups] == [3, 3]
    make_optimizer(cfg, groups)
    assert [len(group) for group in groups] == [3, 3]
    module["input_layernorm"].requires_grad_(False)
    assert len(param_groups(module.named_parameters(), cfg)) == 1


def test_parts_have_their_own_rate_and_frozen_ones_none() -> None:
    module = model()
    rates = (Rate(names=("embed*", "*.bias"), factor=0.5), Rate(names=("*.weight",), factor=2.0))
    cfg = AdamW(weight_decay=0.2, freeze=("out.bias",), rates=rates)
    check_parts(cfg, dict(module.named_parameters()).keys())
    freeze(module.named_parameters(), cfg)
    assert not module["out"].bias.requires_grad
    groups = param_groups(module.named_parameters(), cfg)
    assert [(group["names"], group["weight_decay"], group["lr_factor"]) for group in groups] == [
        (["embedding.weight"], 0.2, 0.5),
        (["out.weight"], 0.2, 2.0),
        (["input_layernorm.weight"], 0.0, 2.0),
        (["input_layernorm.bias"], 0.0, 0.5),
    ]
    optimizer = make_optimizer(cfg, groups)
    set_rate(optimizer, 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.2, 0.2, 0.05]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"freeze": ("encoder.*",)}, r"optim.freeze: no tensor of the model matches 'encoder.\*'; names are such as "),
        ({"rates": (Rate(names=("out.*", "in.*"), factor=2.0),)}, r"optim.rates\[0\].names: no tensor .* 'in.\*'"),
        ({"freeze": ("*",)}, "names every tensor"),
        ({"freeze": ("out.*",), "rates": (Rate(names=("out.bias",), factor=2.0),)}, "all frozen by optim.freeze"),
    ],
)
def test_parts_that_mean_nothing_are_refused(change: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_parts(AdamW(**change), dict(model().named_parameters()).keys())


def test_a_config_without_a_rule_says_what_to_write() -> None:
    with pytest.raises(NotImplementedError, match=r"no rule for lf.train.config.OptimConfig; add one with @make_optim"):
        make_optimizer(OptimConfig(), [])
    with pytest.raises(NotImplementedError, match=r"no rule for lf.train.config.ScheduleConfig; add one with @factor"):
        factor(ScheduleConfig(), 1, 2)


@pytest.mark.parametrize(
    ("schedule", "steps", "expected"),
    [
        (Constant(), 3, [1, 1, 1]),
        (Constant(warmup=4), 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        (Linear(warmup=2), 6, [0.5, 1, 0.75, 0.5, 0.25, 0]),
        (Linear(final=0.5), 5, [0.9, 0.8, 0.7, 0.6, 0.5]),
        (Cosine(warmup=2, final=0.0), 6, [0.5, 1, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5, 0]),
        (Cosine(warmup=2, final=0.2), 4, [0.5, 1, 0.6, 0.2]),
        (Wsd(warmup=2, decay=2), 6, [0.5, 1, 1, 1, 0.5, 0]),
        (Wsd(decay=4, final=0.2), 4, [0.8, 0.6, 0.4, 0.2]),
        (Wsd(), 3, [1, 1, 1]),
        (Cosine(warmup=3), 3, [1 / 3, 2 / 3, 1]),
    ],
)
def test_schedules_in_closed_form(schedule: ScheduleConfig, steps: int, expected: list[float]) -> None:
    check_schedule(schedule, steps)
    assert [factor(schedule, step, steps) for step in range(1, steps + 1)] == pytest.approx(expected)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    kind=st.sampled_from([Constant, Cosine, Linear, Wsd]),
    warmup=st.integers(0, 30),
    decay=st.integers(1, 30),
    rest=st.integers(1, 30),
    final=st.floats(0.0, 1.0),
)
def test_schedules_rise_then_fall_to_final(
    kind: Callable[..., ScheduleConfig], warmup: int, decay: int, rest: int, final: float
) -> None:
    args = {"final": final} if kind is not Constant else {}
    schedule = kind(warmup=warmup, **args, **({"decay": decay} if kind is Wsd else {}))
    steps = warmup + decay + rest
    check_schedule(schedule, steps)
    values = [factor(schedule, step, steps) for step in range(1, steps + 1)]
    assert all(0.0 <= value <= 1.0 + 1e-12 for value in values)
    assert values[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    after = values[max(warmup - 1, 0) :]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    assert values[-1] == pytest.approx(1.0 if kind is Constant else final)


@pytest.mark.parametrize(
    ("schedule", "steps", "message"),
    [
        (Cosine(warmup=11), 10, r"optim.schedule.warmup = 11 exceeds steps = 10; .* steps to 11 or more"),
        (Wsd(warmup=6, decay=5), 10, r"warmup = 6 and optim.schedule.decay = 5 together exceed steps = 10"),
    ],
)
def test_a_schedule_longer_than_the_run_is_refused(schedule: ScheduleConfig, steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_schedule(schedule, steps)
