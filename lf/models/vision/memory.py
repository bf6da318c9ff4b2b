"""What memory a tower and a projector take, and what they sum, counted on the meta device: shapes alone, no values.

Shapes: B pictures, heads, L patches of a picture, D head width, N patches, F numbers of a patch, M media tokens.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from lf.models.layers.shared import Share, set_share
from lf.models.media import Media
from lf.models.vision.projector import Projector, ProjectorModule
from lf.models.vision.tower import TowerModule, VisionConfig, build_tower, tower_of, unused


@attrs.frozen(kw_only=True)
class Taken:
    """Bytes that a forward and its backward take, besides weights, patches and features."""

    kept: int
    """What the forward keeps for the backward."""
    working: int
    """What is alive at most besides that."""
    sums: tuple[int, ...] = ()
    """Those of each sum over the ranks that encode together."""


@attrs.frozen(kw_only=True, eq=False)
class Counted(Share):
    """A share whose sums are counted and not made."""

    group: None = None
    """No other rank is there."""
    rank: int = 0
    """This rank's place: shares are alike."""
    sums: list[int] = attrs.field(factory=list)
    """Bytes of each sum until now."""

    def add(self, part: Tensor) -> None:
        """Counts a sum."""
        self.sums.append(part.nbytes)


@functools.lru_cache(maxsize=8)
def encoder_parts(vision: VisionConfig, projector: Projector, out: int, dtype: torch.dtype) -> nn.ModuleDict:
    """Returns a tower and a projector, `vision` and `projector`, on the meta device; what is not trained is frozen."""
    with torch.device("meta"):
        tower, joined = build_tower(vision), ProjectorModule(projector, tower_of(vision), out)
    for name in unused(vision):
        tower.get_parameter(name).requires_grad_(False)
    return nn.ModuleDict({"vision": tower, "projector": joined}).to(dtype)


@functools.lru_cache(maxsize=64)
def encoder_memory(
    vision: VisionConfig,
    projector: Projector,
    out: int,
    dtype: torch.dtype,
    media: tuple[Media, ...],
    *,
    again: bool,
    together: bool,
    ranks: int = 1,
) -> Taken:
    """Returns what encoding images and videos takes; with `again` the backward makes each layer's activations again.

    `ranks` encode them together, and it is what one of them takes. `together` is that of `taken`.
    """
    parts = copy.deepcopy(encoder_parts(vision, projector, out, dtype))
    tower, joined = parts["vision"], parts["projector"]
    assert isinstance(tower, TowerModule)
    assert isinstance(joined, ProjectorModule)
    tower.again = again
    tower.run = functools.partial(_run, tower)  # type: ignore[method-assign]
    share = Counted(size=ranks)
    set_share(parts, share if ranks > 1 else None)
    patches_NF = torch.empty(sum(item.patches for item in media), joined.tower.numbers, device="meta")
    found = taken(tower, joined, patches_NF, media, together=together)
    return attrs.evolve(found, sums=tuple(share.sums))


def taken(
    tower: TowerModule, joined: ProjectorModule, patches_NF: Tensor, media: Sequence[Media], *, together: bool
) -> Taken:
    """Returns what a tower and a projector take on their device.

    `together` says whether the gradients of all weights are alive at the end, or each goes as soon as it is there.
    """
    trained = [param for part in (tower, joined) for param in part.parameters() if param.requires_grad]
    with Alive() as alive:
        states, inner = tower(patches_NF, [grid for item in media for grid in item.grids])
        tokens, levels = joined.project(states, inner, media)
        made = [tokens] if levels is None else [tokens, levels]
        del states, inner, tokens, levels
        features = sum(each.nbytes for each in made)
        kept = alive.now - features
        backward = [torch.empty_like(each) for each in made]
        if together:
            grads = torch.autograd.grad(made, trained, backward, allow_unused=True)
            del grads
        else:
            hooks = [param.register_post_accumulate_grad_hook(_drop) for param in trained]
            torch.autograd.backward(made, backward)
            for hook in hooks:
                hook.remove()
    return Taken(kept=kept, working=alive.most - kept - features)


def _drop(param: Tensor) -> None:
    param.grad = None


def _run(tower: TowerModule, layer: Callable[..., Tensor], *args: Any) -> Tensor:
    """Does what the tower's `run` does, with fused attention, when the backward makes activations again too."""

    def fused(*args: Any) -> Tensor:
        with _FusedAttention():
            return layer(*args)

    return TowerModule.run(tower, fused, *args)


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that a block makes and has alive: `now`, and `most` of all times."""

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakIdKeyDictionary()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and counts what it makes."""
        for storage in _storages(args):
            self._known.setdefault(storage, None)
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage not in self._known:
                self._known[storage] = None
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage.nbytes())
        return out

    def _gone(self, size: int) -> None:
        self.now -= size


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, Tensor):
        yield value.untyped_storage()
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _storages(each)


class _FusedAttention(TorchFunctionMode):
    """Lets attention keep what torch's fused kernels keep; on the meta device it would make all scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _Fused.apply(*args)
        return func(*args, **(kwargs or {}))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BhLD: Tensor, k_BhLD: Tensor, v_BhLD: Tensor) -> Tensor:
        pictures, heads, length, width = q_BhLD.shape
        out = q_BhLD.new_empty(pictures, length, heads, width).transpose(1, 2)
        statistics = q_BhLD.new_empty(pictures, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q_BhLD, k_BhLD, v_BhLD, out, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q_BhLD, k_BhLD, v_BhLD, _, _ = ctx.saved_tensors
        return torch.empty_like(q_BhLD), torch.empty_like(k_BhLD), torch.empty_like(v_BhLD)
