"""Images apart from the pipeline: all ranks encode those of a pass, then the decoder runs, then towers go backward.

The weights of the tower and the projector are those of the first pipeline stage: its ranks optimise and save them.
Other stages have a copy: every pass gives it what the last step changed. Gradients are of sums over the global batch,
so they are only added: over the tensor parallel ranks and stages here, over the others as those of every weight.

Where the tower is frozen, what it gives for the images of the next step can be made beside the step that runs: by a
thread, which sends nothing.

Shapes: L levels of the tower and one, N features that this rank makes, M that it takes, H width.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lf.models.layers.shared import set_share
from lf.models.media import Media, build_encoder, media_flops, media_tokens
from lf.models.spec import Batch, Ctx, ModelConfig
from lf.parallel.hetero import Replica, replica
from lf.plan.encode import Images, StepPlan, shares, step_plan
from lf.plan.pipeline import most_held
from lf.train.config import OptimConfig
from lf.train.exchange import Exchange
from lf.train.optim import freeze


@attrs.frozen(kw_only=True, eq=False)
class Apart:
    """What encodes images on this rank."""

    cfg: ModelConfig
    """The model."""
    encoder: Any
    """Tower and projector: those of the model on the first stage, a copy on others."""
    chunk: Any
    """The first chunk of the model where it has them, None on other stages."""
    replica: Replica
    """The ranks that share the model."""
    ctx: Ctx
    """The context of this rank."""

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return [param for param in self.encoder.parameters() if param.requires_grad]

    @property
    def tensors(self) -> list[Tensor]:
        """All parameters and buffers."""
        return [*self.encoder.parameters(), *self.encoder.buffers()]

    @torch.no_grad()
    def copy(self, tensors: Sequence[Tensor]) -> None:
        """Gives later stages the tensors of the first one. Every rank calls it."""
        if self.ctx.layout.pp == 1:
            return
        works = [dist.broadcast(each.data, group=self.ctx.groups.pp, group_src=0, async_op=True) for each in tensors]
        for work in works:
            work.wait()

    @property
    def ahead(self) -> Callable[[list[Batch]], list[Batch]] | None:
        """What gives micro-batches the `states` of this rank's images, for a thread; None where the tower is trained.

        None too where ranks encode together: their messages are those of one thread.
        """
        if not self.encoder.fixed or self.replica.share is not None:
            return None
        device = self.ctx.device.torch_type
        beside = contextlib.nullcontext() if device == "cpu" else torch.Stream(device=device)
        return functools.partial(_encode_ahead, self, beside)


def apart(cfg: ModelConfig, chunks: Sequence[Any], optim: OptimConfig, ctx: Ctx, *, recompute: bool) -> Apart:
    """Returns what encodes images on this rank; `chunks` are those of its model. Every rank of the world calls it."""
    first = ctx.layout.pp_rank == 0
    if first:
        encoder = chunks[0].module.encoder()
    else:
        encoder = build_encoder(cfg, ctx)
        freeze(encoder.named_parameters(), optim)
    encoder.recompute(recompute)
    made = Apart(
        cfg=cfg,
        encoder=encoder,
        chunk=chunks[0] if first else None,
        replica=replica(ctx.layout, ctx.device.torch_type),
        ctx=ctx,
    )
    set_share(encoder, made.replica.share)
    made.copy(made.tensors)
    return made


def _encode_ahead(apart: Apart, beside: Any, micro: list[Batch]) -> list[Batch]:
    """Returns the micro-batches of a step, the first with the `states` of this rank's images of all of them.

    The device computes them beside what other threads give it.
    """
    own = shares([_costs(apart.cfg, batch) for batch in micro], apart.replica.size)[apart.replica.rank]
    with torch.no_grad(), beside:
        states = _states(apart, micro, own)
    if isinstance(beside, torch.Stream):
        # Whoever has them need not wait, and has read them when its step ends, before their memory is used again.
        beside.synchronize()
    return [{**micro[0], "states": states}, *micro[1:]]


def _states(apart: Apart, micro: Sequence[Batch], own: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    parts = [micro[0]["patches"][:0]]
    for batch, mine in zip(micro, own, strict=True):
        split = batch["patches"].split([item.patches for item in batch["media"]]) if batch["media"] else ()
        parts += [split[i] for i in mine]
    media, _ = own_media(apart.cfg, micro, own)
    made: tuple[Tensor, ...] = apart.encoder.states(torch.cat(parts).to(apart.ctx.device.torch_type), media)
    return made


def begin(apart: Apart, micro: Sequence[Batch], *, train: bool) -> Exchange:
    """Encodes this rank's images of a pass, as far as that is not done, and sends their features off."""
    layout = apart.ctx.layout
    _copy_trained(apart)
    plan = plan_of(apart, micro)
    first = (1.0, *(0.0,) * (layout.vpp - 1))
    depth = most_held(0, layout.pp, len(micro), first)[0]
    taken = [len(batch["places"][apart.replica.rank][0]) if layout.pp_rank == 0 else 0 for batch in micro]
    exchange = Exchange(plan, apart.replica, taken, depth)
    own = plan.encodes[apart.replica.rank]
    media, at = own_media(apart.cfg, micro, own)
    grows = train and bool(apart.trained)
    with torch.set_grad_enabled(grows):
        states = micro[0]["states"] if "states" in micro[0] else _states(apart, micro, own)
        exchange.start(apart.encoder(states, media), at, backward=grows)
    return exchange


def plan_of(apart: Apart, micro: Sequence[Batch]) -> StepPlan:
    """Returns the plan of a pass, the same on all ranks of a replica."""
    layout = apart.ctx.layout
    images = [
        Images(
            features=tuple(media_tokens(apart.cfg, item) for item in batch["media"]),
            costs=_costs(apart.cfg, batch),
            taken=tuple(taken.numpy() for _, taken in batch["places"]),
        )
        for batch in micro
    ]
    # Without sequence parallelism tensor parallel ranks take the same features, and each has their whole gradients.
    returns = [layout.sp or rank % layout.tp == 0 for rank in range(layout.cp * layout.tp)]
    return step_plan(images, apart.replica.size, returns, layout.apart)


def _costs(cfg: ModelConfig, batch: Batch) -> tuple[float, ...]:
    """Returns what encoding each image of a micro-batch costs: what decides who does, be it ahead or not."""
    return tuple(media_flops(cfg, item) for item in batch["media"])


def own_media(
    cfg: ModelConfig, micro: Sequence[Batch], own: Sequence[Sequence[int]]
) -> tuple[list[Media], dict[int, slice]]:
    """Returns the media of a rank, and where the features of each micro-batch will be."""
    media: list[Media] = []
    at, made = {}, 0
    for number, (batch, mine) in enumerate(zip(micro, own, strict=True)):
        media += [batch["media"][i] for i in mine]
        start, made = made, made + sum(media_tokens(cfg, batch["media"][i]) for i in mine)
        at[number] = slice(start, made)
    return media, at


def features(exchange: Exchange, batch: Batch, number: int, place: int) -> Batch:
    """Returns a micro-batch with what a rank of the first stage has of its images."""
    leaf = exchange.take(number)
    slots = batch["places"][place][0].to(leaf.device, non_blocking=True)
    return {**batch, "features": leaf, "slots": slots}


def end(apart: Apart, exchange: Exchange) -> None:
    """Takes the towers backward, and adds their gradients to those of the first stage's weights."""
    trained = apart.trained
    if trained:
        _add(apart, trained, _weight_gradients(exchange, trained))
    exchange.finish()


def _weight_gradients(exchange: Exchange, trained: Sequence[nn.Parameter]) -> list[Tensor | None]:
    made, grad = exchange.made, exchange.gradients()
    if not made.requires_grad:
        return [None] * len(trained)
    return list(torch.autograd.grad([made], list(trained), [grad], allow_unused=True))


def _add(apart: Apart, trained: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    flat = torch.cat(
        [
            torch.zeros(param.numel(), device=param.device) if grad is None else grad.flatten().float()
            for param, grad in zip(trained, grads, strict=True)
        ]
    )
    dist.all_reduce(flat, group=apart.ctx.groups.mp)
    if apart.chunk is None:
        return
    for param, total in zip(trained, flat.split([param.numel() for param in trained]), strict=True):
        param.main_grad.add_(total.view_as(param))  # type: ignore[attr-defined]
        if apart.chunk.ddp_config.overlap_grad_reduce:
            apart.chunk.param_to_bucket_group[param].register_grad_ready(param, apart.chunk.force_all_reduce)


@torch.no_grad()
def _copy_trained(apart: Apart) -> None:
    """Gives later stages the weights that the last step has changed."""
    chunk = apart.chunk
    if chunk is not None and chunk.ddp_config.overlap_param_gather:
        for param in apart.trained:
            chunk.param_to_bucket_group[param].finish_param_sync()
    apart.copy(apart.trained)
