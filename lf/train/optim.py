"""Optimisers: from a config to a torch optimiser, which parameters decay, and the state that a checkpoint holds."""

import fnmatch
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lf.models.spec import no_rule, type_name
from lf.train.config import AdamW, OptimConfig, Sgd

_NORM = re.compile(r"(^|[._])(layer|rms|group|batch)?_?norm\d*([._]|$)")
_BIAS = re.compile(r"(^|[._])bias\d*$")
_NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}

Groups = list[dict[str, Any]]
"""Parameter groups as torch's optimisers take them: `params`, `names` (the module's, same order), `weight_decay`, and
`lr_factor` where it is not 1."""


@functools.singledispatch
def make_optimizer(cfg: OptimConfig, groups: Groups) -> torch.optim.Optimizer:
    """Returns the optimiser of the groups that `param_groups` made; its learning rate is set anew at each step.

    After its first step it must keep, for each parameter, everything that it will ever keep: a resume asks the
    checkpoint for exactly that.
    """
    raise no_rule(make_optimizer, cfg)


@make_optimizer.register
def _adamw(cfg: AdamW, groups: Groups) -> torch.optim.Optimizer:
    params = [param for group in groups for param in group["params"]]
    fused = all(param.device.type in ("cpu", "cuda") and param.is_floating_point() for param in params)
    return torch.optim.AdamW(
        [dict(group) for group in groups],
        lr=cfg.lr,
        betas=cfg.betas,
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        fused=fused,
    )


@make_optimizer.register
def _sgd(cfg: Sgd, groups: Groups) -> torch.optim.Optimizer:
    # torch.optim.SGD adds its weight decay to the gradient, so that momentum would smear it over later steps; lf's is
    # decoupled for every optimiser.
    groups = [{**group, "weight_decay": 0.0, "decoupled_decay": group["weight_decay"]} for group in groups]
    optimizer = torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum)
    optimizer.register_step_pre_hook(_decay)
    return optimizer


@torch.no_grad()
def _decay(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        if group["decoupled_decay"]:
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(1.0 - group["lr"] * group["decoupled_decay"])


def decays(name: str, param: Tensor) -> bool:
    """Returns whether weight decay applies: to tensors of two dimensions or more that are neither norms nor biases.

    Embeddings and output layers decay like any other matrix.
    """
    return param.ndim >= 2 and not _NORM.search(name) and not _BIAS.search(name)


def check_parts(cfg: OptimConfig, names: Collection[str]) -> None:
    """Raises ValueError for a pattern of `freeze` or `rates` that no tensor's name matches, or if all are frozen."""
    fields = [("optim.freeze", cfg.freeze), *((f"optim.rates[{i}].names", r.names) for i, r in enumerate(cfg.rates))]
    for field, patterns in fields:
        for pattern in patterns:
            if not any(_named(name, (pattern,)) for name in names):
                raise ValueError(
                    f"{field}: no tensor of the model matches {pattern!r}; names are such as "
                    f"{', '.join(sorted(names)[:: max(1, len(names) // 5)][:5])}"
                )
    if names and all(_named(name, cfg.freeze) for name in names):
        raise ValueError(f"optim.freeze = {cfg.freeze} names every tensor, so there is nothing to train; narrow it")
    for i, rate in enumerate(cfg.rates):
        if all(_named(name, cfg.freeze) for name in names if _named(name, rate.names)):
            raise ValueError(
                f"optim.rates[{i}].names = {rate.names} are all frozen by optim.freeze; drop one of the two"
            )


def freeze(named: Iterable[tuple[str, nn.Parameter]], cfg: OptimConfig) -> None:
    """Marks the parameters that `cfg.freeze` names as not trained."""
    for name, param in named:
        if _named(name, cfg.freeze):
            param.requires_grad_(False)


def param_groups(named: Iterable[tuple[str, nn.Parameter]], cfg: OptimConfig) -> Groups:
    """Returns the trainable parameters in groups of one decay and one learning rate, each in the order given.

    Those that decay come first; of two parts, the one whose first parameter came first.
    """
    split: dict[tuple[bool, float], list[tuple[str, nn.Parameter]]] = {}
    for name, param in named:
        if param.requires_grad:
            factor = next((rate.factor for rate in cfg.rates if _named(name, rate.names)), 1.0)
            split.setdefault((not decays(name, param), factor), []).append((name, param))
    return [
        {
            "params": [param for _, param in pairs],
            "names": [name for name, _ in pairs],
            "weight_decay": 0.0 if plain else cfg.weight_decay,
            **({} if factor == 1.0 else {"lr_factor": factor}),
        }
        for (plain, factor), pairs in sorted(split.items(), key=lambda item: item[0][0])
    ]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of a step: `rate` times each group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)


def _named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def state_tensors(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    """Returns what the optimiser keeps for a parameter, by name (`exp_avg`, `step` ...), for `restore_state`.

    Tensors are the optimiser's own, not copies; a Python number becomes a scalar tensor named `name:int` and the like.
    Empty before the first step. Raises ValueError for state of any other type.
    """
    found: dict[str, Tensor] = {}
    for name, value in optimizer.state.get(param, {}).items():
        kind = type(value).__name__
        if isinstance(value, Tensor):
            found[name] = value
        elif kind in _NUMBERS:
            found[f"{name}:{kind}"] = torch.tensor(value, dtype=_NUMBERS[kind][1])
        elif value is not None:
            raise ValueError(
                f"{type_name(optimizer)} keeps {name} as {type_name(value)} for each parameter, which a checkpoint "
                "cannot hold; keep it as a tensor or a number"
            )
    return found


def start_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives the optimiser the names, shapes and types of the state that it has after a step; values are to be replaced.

    It takes a step without gradients at learning rate 0. Some optimisers change weights all the same: restore them too.
    """
    before = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param in params:
        param.grad = None
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(values)


def restore_state(optimizer: torch.optim.Optimizer, param: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Copies the state of a parameter that `state_tensors` returned into the optimiser's own; see `start_state`.

    Raises ValueError where the names, shapes or types differ from what the optimiser has.
    """
    own = state_tensors(optimizer, param)
    if own.keys() != tensors.keys():
        raise ValueError(
            f"the saved state of {type_name(optimizer)} has {sorted(tensors)}, but this one keeps {sorted(own)}; "
            "resume with the optimiser that the checkpoint was made with"
        )
    for key, value in tensors.items():
        if (own[key].shape, own[key].dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"the saved {key} is {value.dtype} of shape {tuple(value.shape)}, but this optimiser keeps "
                f"{own[key].dtype} of shape {tuple(own[key].shape)}"
            )
        name, _, kind = key.partition(":")
        if kind:
            optimizer.state[param][name] = _NUMBERS[kind][0](value.item())
        else:
            own[key].copy_(value)
