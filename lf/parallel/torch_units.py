"""Where the torch path cuts a module: its units by pattern, what they make again or compile, what stays float32."""

import fnmatch
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lf.models.spec import ModelConfig, ShardSpec, type_name

Say = Callable[[str], None]
"""Takes a line for the user."""


def units(model: nn.Module, cfg: ModelConfig, field: str, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Returns the submodules that the patterns of a field of `ShardSpec` name, outer ones first.

    Raises ValueError for a pattern that matches none.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if _fits(name, pattern)}
        if not matches:
            raise _unmatched(cfg, field, pattern, names)
        found |= matches
    return {name: module for name, module in model.named_modules() if name in found}


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _unmatched(cfg: ModelConfig, field: str, pattern: str, names: Sequence[str]) -> ValueError:
    some = ", ".join(names[:: max(1, len(names) // 5)][:5])
    return ValueError(
        f"shard_spec of {type_name(cfg)}: {field} has {pattern!r}, which names nothing in the model; names are such as "
        f"{some}"
    )


def wide_names(model: nn.Module, cfg: ModelConfig, spec: ShardSpec) -> frozenset[str]:
    """Returns the parameters that compute in float32 where the others do not. Raises ValueError as `units` does."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in spec.float32:
        if not fnmatch.filter(names, pattern):
            raise _unmatched(cfg, "float32", pattern, names)
    return frozenset(name for name in names if any(fnmatch.fnmatchcase(name, p) for p in spec.float32))


def wide_modules(model: nn.Module, cfg: ModelConfig, wide: frozenset[str]) -> dict[str, nn.Module]:
    """Returns the outermost modules of which every parameter is among `wide`; together they hold all of those.

    Raises ValueError where the parameters of a module itself are of both kinds: FSDP gathers them in one type.
    """
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        names = {f"{prefix}{name}" for name, _ in module.named_parameters()}
        if not names & wide:
            return
        # A list of modules is never called itself, and FSDP gathers a module's parameters when it is called.
        called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if names <= wide and called and prefix:
            found[prefix[:-1]] = module
            return
        own = sorted(f"{prefix}{name}" for name, _ in module.named_parameters(recurse=False))
        if wide.intersection(own):
            raise ValueError(
                f"shard_spec of {type_name(cfg)}: float32 names {sorted(wide.intersection(own))}, and their module "
                f"holds others too ({sorted(names - wide)[:3]}); fsdp and hsdp gather a module in one type. Give them "
                "a module of their own, or use the strategy ddp or zero1"
            )
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.")

    visit(model, "")
    return found


def compile_units(modules: Sequence[nn.Module], device: str, say: Say) -> None:
    """Compiles the forward of each module. One that cannot be compiled runs as it is, and `say` is told so, once.

    The compiler is tried on a small function first, so that one that is not there is told before the first step.
    """
    told: list[Exception] = []

    def tell(error: Exception, what: str) -> None:
        if not told:
            told.append(error)
            reason = " ".join([line for line in str(error).splitlines() if line.strip()][:2])
            name = type(error).__name__
            say(f"parallel.compile: torch.compile fails on {what} ({name}: {reason}), which runs as it is")

    try:
        torch.compile(_probe)(torch.ones(8, device=device))
    except Exception as error:
        tell(error, "x + 1, so on every unit")
        return
    for module in modules:
        module.forward = _compiled(module.forward, type(module).__name__, tell)


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x + 1.0


def _compiled(inner: Callable[..., Any], name: str, tell: Callable[[Exception, str], None]) -> Callable[..., Any]:
    from torch._dynamo.exc import TorchDynamoException

    now = torch.compile(inner)

    # A module that has failed never goes back: what it makes again in the backward must be what it made at first.
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal now
        try:
            return now(*args, **kwargs)
        except TorchDynamoException as error:
            # An error of the module itself comes again here, as its own.
            result = inner(*args, **kwargs)
            tell(error, name)
            now = inner
            return result

    return forward
