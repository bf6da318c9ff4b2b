"""Low-rank adapters (LoRA, arXiv:2106.09685) of a model's linear layers: which, how they start, and the merged weights.

The linear layer `x` has the canonical tensors `x.weight` and perhaps `x.bias`; adapted, it has `x.lora_a` and
`x.lora_b` too, and its merged weight is `weight + scale * B A`. Every other name is as it was.

Shapes: I inputs, O outputs, R rank.
"""

import fnmatch
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

import attrs
import torch
from attrs.validators import min_len
from torch import Tensor, nn

from lf.models.initialise import seed_of
from lf.models.layers.lora import LoraLinear
from lf.models.ranges import above, least
from lf.models.spec import Part
from lf.models.weights import WeightMap, pieces

A, B = ".lora_a", ".lora_b"
"""How the canonical names of an adapter's tensors end."""


@attrs.frozen(kw_only=True)
class Lora:
    """Low-rank adapters of linear layers; all else is frozen, but for the tensors that `full` names."""

    rank: int = attrs.field(default=8, validator=least(1))
    """Rank of each adapter: at most the inputs and the outputs of each layer."""
    alpha: float = attrs.field(default=16.0, validator=above(0.0))
    """The adapters are multiplied by `alpha / rank`."""
    targets: tuple[str, ...] = attrs.field(validator=min_len(1))
    """Glob patterns over the names of linear layers (the canonical name of the weight without `.weight`); `*` matches
    dots too. Layers that no output depends on are left out."""
    full: tuple[str, ...] = ()
    """Glob patterns over canonical names of other tensors that are trained, as they are; `*` as above."""
    start: str = ""
    """Folder of a PEFT adapter that the run starts from; empty starts from A drawn and B zero, which changes no output
    of the model."""

    @property
    def scale(self) -> float:
        """What the adapters are multiplied by."""
        return self.alpha / self.rank


def weight_of(name: str) -> str:
    """Returns the weight beside which a tensor of an adapter stands; empty for any other tensor."""
    stem, dot, kind = name.rpartition(".")
    return f"{stem}.weight" if f"{dot}{kind}" in (A, B) else ""


def sides(weight: str) -> tuple[str, str]:
    """Returns the names of A and B of the layer with this weight."""
    stem = weight.removesuffix(".weight")
    return stem + A, stem + B


def adapt(model: nn.Module, cfg: Lora, table: WeightMap) -> None:
    """Puts adapters beside the layers that `cfg` names, in place, without values, and freezes what it does not train.

    Raises ValueError for a pattern that names nothing to adapt or to train, for a rank above the layer's, and for a
    layer that the family's weight table does not cut by rows: no PEFT adapter could have it.
    """
    found = _targets(model, cfg)
    kept = _full(model, cfg, set(found))
    for name, module in found.items():
        if cfg.rank > min(module.in_features, module.out_features):
            raise ValueError(
                f"adapt.rank = {cfg.rank}, but {name} has {module.in_features} inputs and {module.out_features} "
                "outputs; lower the rank, or leave the layer out of adapt.targets"
            )
        _check_rows(table, f"{name}.weight", tuple(module.weight.shape))
    for param in model.parameters():
        param.requires_grad_(False)
    for name in kept:
        model.get_parameter(name).requires_grad_(True)
    for name, module in found.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoraLinear(module, cfg.rank, cfg.scale))


def _targets(model: nn.Module, cfg: Lora) -> dict[str, nn.Linear]:
    """Returns the layers to adapt by name, in the order of the model."""
    times = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    modules = {name: module for name, module in model.named_modules() if name}
    # A subclass may read its weight without calling itself.
    linears = {name: module for name, module in modules.items() if type(module) is nn.Linear}
    fit = {n: m for n, m in linears.items() if m.weight.requires_grad and times[id(m.weight)] == 1}
    chosen: set[str] = set()
    for pattern in cfg.targets:
        names = fnmatch.filter(fit, pattern)
        if not names:
            raise ValueError(f"adapt.targets: {_unfit(pattern, modules, linears, fit)}")
        chosen.update(names)
    return {name: module for name, module in fit.items() if name in chosen}


def _unfit(pattern: str, modules: Mapping[str, nn.Module], linears: Collection[str], fit: Collection[str]) -> str:
    some = ", ".join(list(fit)[:: max(1, len(fit) // 5)][:5])
    for name in fnmatch.filter(modules, pattern):
        why = (
            "is tied to another layer, or no output depends on it"
            if name in linears
            else f"is no linear layer but a {type(modules[name]).__name__}"
        )
        return f"{pattern!r} names no layer that can be adapted: {name} {why}; linear layers are such as {some}"
    return f"{pattern!r} names nothing in the model; linear layers are such as {some}"


def _full(model: nn.Module, cfg: Lora, adapted: Collection[str]) -> list[str]:
    """Returns the tensors that are trained as they are."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    kept: list[str] = []
    for pattern in cfg.full:
        names = fnmatch.filter(params, pattern)
        if not names:
            some = ", ".join(list(params)[:: max(1, len(params) // 5)][:5])
            raise ValueError(f"adapt.full: {pattern!r} names no tensor that is trained; names are such as {some}")
        both = [name for name in names if name.rpartition(".")[0] in adapted]
        if both:
            raise ValueError(
                f"adapt.full: {pattern!r} names {both[0]}, whose layer adapt.targets names too; train it in one way"
            )
        kept += names
    return kept


def _check_rows(table: WeightMap, weight: str, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless each HF tensor of a weight is some of its rows."""
    rule = table.by_lf[weight]
    for piece in pieces(rule, shape):
        if piece.axes != (0, 1) or piece.size[1] != shape[1] or not piece.hf.endswith(".weight"):
            raise ValueError(
                f"adapt.targets names {weight.removesuffix('.weight')}, which is {piece.hf} in Hugging Face's names "
                f"by a rule ({type(rule).__name__}) that no PEFT adapter can follow; leave it out"
            )


def first_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns an adapter's whole tensor before the first step: B is zero, and A uniform between +-1 / sqrt(I).

    That is PEFT's default. A is a function of (seed, name).
    """
    if name.endswith(B):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    return (torch.rand(shape, generator=generator) * 2.0 - 1.0) * shape[1] ** -0.5


def merged(get: Callable[[str], Tensor], names: Collection[str], scale: float) -> Callable[[str], Tensor]:
    """Returns a function from canonical names to whole tensors with the adapters inside, given one to what is saved.

    `names` are all canonical names, adapters' among them.
    """
    have = set(names)

    def whole(name: str) -> Tensor:
        a, b = sides(name)
        base = get(name)
        return torch.add(base, get(b) @ get(a), alpha=scale) if name.endswith(".weight") and a in have else base

    return whole


def added(
    weight: str, part: Part, read: Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor], rank: int, scale: float
) -> Tensor:
    """Returns what the adapter adds to a box of a weight; `read` returns a box of a tensor by its first index and size.

    Only the rows of B and the columns of A that the box needs are read.
    """
    a, b = sides(weight)
    (row, column), (rows, columns) = part.at, part.size
    return (read(b, (row, 0), (rows, rank)) @ read(a, (0, column), (rank, columns))) * scale


def adapted_weights(names: Collection[str]) -> Iterator[str]:
    """Yields the weights that have an adapter, in the order of `names`, which are all canonical names."""
    return (weight_of(name) for name in names if name.endswith(A))
