"""How a run is spread over ranks: the degrees as data, and the rules they must obey."""

from typing import Literal

import attrs
from attrs.validators import ge

from lf.models.spec import Layout, text_errors


@attrs.frozen(kw_only=True)
class ParallelConfig:
    """How a run is spread over ranks."""

    micro_batch: int = attrs.field(default=1, validator=ge(1))
    """Rows of a micro-batch: what one forward takes."""


@attrs.frozen(kw_only=True)
class MegatronParallel(ParallelConfig):
    """The Megatron path; data parallel takes the ranks that the other degrees leave."""

    tp: int = attrs.field(default=1, validator=ge(1))
    """Tensor parallel ranks; they share every matrix."""
    sp: bool = True
    """Whether tensor parallel ranks also share the sequence between the matrices (sequence parallel)."""
    pp: int = attrs.field(default=1, validator=ge(1))
    """Pipeline stages."""
    vpp: int = attrs.field(default=1, validator=ge(1))
    """Model chunks of each pipeline stage (interleaved schedule)."""
    stages: tuple[int, ...] = ()
    """Layers of each of the pp * vpp chunks, in the order of the layers; empty spreads them evenly."""
    cp: int = attrs.field(default=1, validator=ge(1))
    """Context parallel ranks; they share every sequence."""
    cp_kind: Literal["gather", "ulysses"] = "gather"
    """How context parallel attention works: keys and values are gathered, or heads are exchanged for sequence."""
    ep: int = attrs.field(default=1, validator=ge(1))
    """Expert parallel ranks; they share the experts of every layer."""
    etp: int = attrs.field(default=1, validator=ge(1))
    """Tensor parallel ranks inside an expert."""
    recompute: Literal["none", "full", "selective"] = "none"
    """What the backward makes again instead of keeping it: nothing, whole layers, or `recompute_modules` only."""
    recompute_modules: tuple[
        Literal["core_attn", "mlp", "layernorm", "moe", "shared_experts", "moe_act", "mla_up_proj"], ...
    ] = ("core_attn",)
    """What `selective` makes again."""
    overlap: bool = True
    """Whether gradient reduction and parameter gathering run beside compute; it changes no number."""


@attrs.frozen(kw_only=True)
class Hetero(ParallelConfig):
    """The Megatron path with images apart: all ranks encode those of a step, then the text model's pipeline runs.

    The tower is data parallel over the text model's tensor, context and pipeline parallel ranks. Its weights are whole
    on each of them.
    """

    vision: MegatronParallel = MegatronParallel()
    """How the tower and the projector are spread: `tp` ranks share the heads and inner widths of an image, and divide
    tp * cp * pp of `text`; `recompute` may be `full`. Other fields stay as they are."""
    text: MegatronParallel = MegatronParallel()
    """How the decoder is spread; `micro_batch` is that of the whole."""


def megatron_part(cfg: ParallelConfig) -> MegatronParallel | None:
    """Returns how the Megatron path's model is spread, None on another path."""
    if isinstance(cfg, Hetero):
        return cfg.text
    return cfg if isinstance(cfg, MegatronParallel) else None


@attrs.frozen(kw_only=True)
class TorchParallel(ParallelConfig):
    """The torch path: every rank computes the whole model on its share of the rows; `strategy` says who keeps it."""

    strategy: Literal["ddp", "zero1", "fsdp", "hsdp"] = "ddp"
    """Who keeps what: `ddp` everything on every rank; `zero1` float32 main weights, averages and optimiser state on one
    rank each; `fsdp` also cuts weights and gradients, which are gathered unit by unit, so that a forward must call the
    same units on every rank; `hsdp` does so within `replicas` groups of ranks."""
    replicas: int = attrs.field(default=1, validator=ge(1))
    """Groups of ranks that each hold the whole model, for `hsdp`."""
    recompute: bool = False
    """Whether the backward makes the activations of the family's `recompute_units` again instead of keeping them."""
    compile: bool = False
    """Whether torch.compile compiles the family's units; where it fails, a line says so and they run without it."""


def resolve(cfg: ParallelConfig, world: int) -> Layout:
    """Returns the layout of `world` ranks; raises ValueError with the cure where the degrees cannot be."""
    if isinstance(cfg, Hetero):
        _check_hetero(cfg)
        with text_errors(cfg.vision.tp):
            return attrs.evolve(resolve(cfg.text, world), apart=cfg.vision.tp)
    if isinstance(cfg, TorchParallel):
        _check_replicas(cfg, world)
    if not isinstance(cfg, MegatronParallel):
        return Layout(dp=world)
    dense, expert = cfg.tp * cfg.cp * cfg.pp, cfg.etp * cfg.ep * cfg.pp
    for names, product in (("tp * cp * pp", dense), ("etp * ep * pp", expert)):
        if world % product:
            values = " * ".join(str(getattr(cfg, name)) for name in names.split(" * "))
            raise ValueError(
                f"parallel.{names} = {values} = {product} does not divide the world of {world} ranks; "
                f"start a multiple of {product} ranks, or lower a degree"
            )
    if cfg.vpp > 1 and cfg.pp == 1:
        raise ValueError(f"parallel.vpp = {cfg.vpp} needs parallel.pp > 1; set vpp to 1 or pp to 2 or more")
    if cfg.stages and len(cfg.stages) != cfg.pp * cfg.vpp:
        raise ValueError(
            f"parallel.stages has {len(cfg.stages)} entries, but there are pp * vpp = {cfg.pp} * {cfg.vpp} = "
            f"{cfg.pp * cfg.vpp} chunks; give one number for each"
        )
    if cfg.stages and min(cfg.stages) < 1:
        raise ValueError(f"parallel.stages = {cfg.stages} has an empty chunk; give each at least one layer")
    return Layout(
        dp=world // dense,
        tp=cfg.tp,
        sp=cfg.sp and cfg.tp > 1,
        pp=cfg.pp,
        vpp=cfg.vpp,
        stages=cfg.stages,
        cp=cfg.cp,
        cp_kind=cfg.cp_kind,
        ep=cfg.ep,
        etp=cfg.etp,
    )


def _check_hetero(cfg: Hetero) -> None:
    default = MegatronParallel()
    for field in attrs.fields(MegatronParallel):
        value = getattr(cfg.vision, field.name)
        if field.name not in ("tp", "recompute") and value != getattr(default, field.name):
            raise ValueError(
                f"parallel.vision.{field.name} = {value!r}: a tower has tp and recompute alone, and its images are "
                f"spread over all ranks; leave parallel.vision.{field.name} at {getattr(default, field.name)!r}"
            )
    shared = cfg.text.tp * cfg.text.cp * cfg.text.pp
    if shared % cfg.vision.tp:
        raise ValueError(
            f"parallel.vision.tp = {cfg.vision.tp} does not divide the parallel.text.tp * cp * pp = {cfg.text.tp} * "
            f"{cfg.text.cp} * {cfg.text.pp} = {shared} ranks that share a model; set it to a divisor of {shared}"
        )
    if cfg.vision.recompute == "selective":
        raise ValueError("parallel.vision.recompute = 'selective': a tower makes whole layers again; set full or none")
    if cfg.text.micro_batch != default.micro_batch:
        raise ValueError(
            f"parallel.text.micro_batch = {cfg.text.micro_batch}: rows of a micro-batch are parallel.micro_batch; set "
            "that, and leave this at 1"
        )


def _check_replicas(cfg: TorchParallel, world: int) -> None:
    if cfg.strategy != "hsdp" and cfg.replicas > 1:
        raise ValueError(
            f"parallel.replicas = {cfg.replicas} is for hsdp, and parallel.strategy = {cfg.strategy!r}; set replicas "
            "to 1, or strategy to hsdp"
        )
    if cfg.strategy == "hsdp" and (cfg.replicas == 1 or world % cfg.replicas):
        raise ValueError(
            f"parallel.replicas = {cfg.replicas} must be 2 or more and divide the world of {world} ranks for hsdp; "
            "change it, or set parallel.strategy to fsdp"
        )
