"""A run as one frozen value, and its parts."""

from typing import Any, Literal

import attrs
from attrs.validators import and_, ge, gt, le, lt, min_len

from lf.data.config import DataConfig, TokenizerConfig
from lf.models.lora import Lora
from lf.models.spec import ModelConfig
from lf.parallel.config import MegatronParallel, ParallelConfig
from lf.plan.work import Rates

MAY_CHANGE: dict[str, Any] = {"resume": True}
"""Metadata of a field of `Run` that a resume may change."""


@attrs.frozen(kw_only=True)
class ScheduleConfig:
    """The factor on the learning rate as a function of the step."""

    warmup: int = attrs.field(default=0, validator=ge(0))
    """Steps over which the factor rises linearly from near 0 to 1."""


@attrs.frozen(kw_only=True)
class Constant(ScheduleConfig):
    """Warm-up, then 1."""


@attrs.frozen(kw_only=True)
class Cosine(ScheduleConfig):
    """Warm-up, then half a cosine from 1 to `final` at the last step."""

    final: float = attrs.field(default=0.1, validator=and_(ge(0.0), le(1.0)))
    """Factor at the last step."""


@attrs.frozen(kw_only=True)
class Linear(ScheduleConfig):
    """Warm-up, then a straight line from 1 to `final` at the last step."""

    final: float = attrs.field(default=0.0, validator=and_(ge(0.0), le(1.0)))
    """Factor at the last step."""


@attrs.frozen(kw_only=True)
class Wsd(ScheduleConfig):
    """Warm-up, stable at 1, then a straight line to `final` over the last `decay` steps."""

    decay: int = attrs.field(default=0, validator=ge(0))
    """Steps of the decay at the end."""
    final: float = attrs.field(default=0.0, validator=and_(ge(0.0), le(1.0)))
    """Factor at the last step."""


@attrs.frozen(kw_only=True)
class Rate:
    """A learning rate of its own for a part of the model."""

    names: tuple[str, ...] = attrs.field(validator=min_len(1))
    """Glob patterns over canonical names of tensors; `*` matches dots too."""
    factor: float = attrs.field(validator=gt(0.0))
    """Multiplies `lr` there, at every step."""


@attrs.frozen(kw_only=True)
class OptimConfig:
    """An optimiser: the type says which. A class of your own needs one rule, `@make_optimizer.register`."""

    lr: float = attrs.field(default=3e-4, validator=gt(0.0))
    """Learning rate where the schedule's factor is 1."""
    schedule: ScheduleConfig = Constant()
    """Factor on the learning rate by step."""
    clip: float = attrs.field(default=1.0, validator=ge(0.0))
    """Largest gradient norm; 0 clips nothing."""
    weight_decay: float = attrs.field(default=0.0, validator=ge(0.0))
    """Decoupled weight decay; norms and biases have none."""
    freeze: tuple[str, ...] = ()
    """Glob patterns over canonical names of tensors that are not trained: they get no gradient, no decay and no
    optimiser state, and are saved and exported as they are."""
    rates: tuple[Rate, ...] = ()
    """Parts with a learning rate of their own; the first that names a tensor holds."""
    ema: float = attrs.field(default=0.0, validator=and_(ge(0.0), lt(1.0)))
    """Decay of a running average of the trained weights, in float32 from the first weights on; 0 keeps none. Held-out
    losses are those of the average where there is one, and exports have it unless `save.averaged` is off. Training, a
    resume and a run whose `init` is this run's folder go on from the trained weights."""


def _rates(owner: object, field: "attrs.Attribute[Any]", value: Any) -> None:
    wrong = [rate for rate in value if isinstance(rate, (int, float)) and (rate < 0 or rate >= 1)]
    if wrong:
        raise ValueError(f"{field.name} = {value} must be at least 0 and below 1; change {wrong[0]}")


@attrs.frozen(kw_only=True)
class AdamW(OptimConfig):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101)."""

    weight_decay: float = attrs.field(default=0.1, validator=ge(0.0))
    """Decoupled weight decay; norms and biases have none."""
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.95), validator=_rates)
    """Decay rates of the two moments."""
    eps: float = attrs.field(default=1e-8, validator=gt(0.0))
    """Added to the root of the second moment."""


@attrs.frozen(kw_only=True)
class Sgd(OptimConfig):
    """Stochastic gradient descent."""

    momentum: float = attrs.field(default=0.0, validator=ge(0.0))
    """Decay rate of the velocity; 0 keeps none."""


@attrs.frozen(kw_only=True)
class Precision:
    """Number formats."""

    params: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that compute; with bfloat16 the optimiser keeps float32 main weights."""


@attrs.frozen(kw_only=True)
class Eval:
    """Evaluation on held-out data; off without `data`."""

    data: DataConfig | None = None
    """Where the held-out rows come from."""
    every: int = attrs.field(default=0, validator=ge(0))
    """Steps between evaluations; 0 evaluates at the end only."""
    batches: int = attrs.field(default=0, validator=ge(0))
    """Global batches of an evaluation; 0 takes one pass over the data."""


@attrs.frozen(kw_only=True)
class Log:
    """What is reported while a run goes on; `metrics.jsonl` is always written."""

    every: int = attrs.field(default=10, validator=ge(1))
    """Steps between lines on the terminal."""
    tensorboard: bool = False
    """Whether to write TensorBoard files (needs the extra `log`)."""
    wandb: str = ""
    """Weights & Biases project to report to (needs the extra `log`); empty reports nowhere."""


def _some_rate(owner: object, field: "attrs.Attribute[Any]", value: Rates | None) -> None:
    if value is not None and not any(attrs.astuple(attrs.evolve(value, steps=0.0))):
        raise ValueError(f"{field.name} are 0 for all that rows have, so none costs anything; give others, or None")


@attrs.frozen(kw_only=True)
class Balance:
    """Rows of a step go to ranks and micro-batches by what they cost, so that ranks wait less for each other.

    The rows of a step stay, and so do loss and gradients, but for losses over whole micro-batches (`switch` and
    `global` of `Experts.balance`) and experts of limited capacity. Sources that know the sizes of their rows tell them;
    the rows of others are read by turns, and those that change ranks are sent.
    """

    rates: Rates | None = attrs.field(default=None, validator=_some_rate)
    """What work takes, as `bench.py rates` measures it; None takes every operation as equally fast."""
    tokens: int = attrs.field(default=0, validator=ge(0))
    """Most tokens of a micro-batch, padding included; 0 is any. Rows without room make further micro-batches."""
    patches: int = attrs.field(default=0, validator=ge(0))
    """Most patches of the images and videos of a micro-batch, which the memory of their tower grows with; 0 is any."""


@attrs.frozen(kw_only=True)
class Save:
    """Checkpoints and exports."""

    every: int = attrs.field(default=0, validator=ge(0))
    """Steps between checkpoints; 0 saves at the end and on a signal only."""
    keep: int = attrs.field(default=2, validator=ge(1))
    """Complete checkpoints to keep."""
    background: bool = False
    """Whether checkpoints are written beside the training. A save then holds a step up while its tensors are copied, or
    while the save before is still written; each rank takes as much memory of its host more as it saves. What was
    written is read again and compared before the checkpoint counts. A save that fails ends the run after the step that
    goes on; evaluations, exports, signals and the end wait for it."""
    export_every: int = attrs.field(default=0, validator=ge(0))
    """Steps between Hugging Face exports to `hf_step_<n>/`; the end always exports to `hf/`."""
    averaged: bool = True
    """Whether exports have the running average of the weights where `optim.ema` keeps one, or the trained weights."""
    lora: Literal["both", "merged", "adapter"] = "both"
    """What a run with `adapt` exports: the model with the adapters merged into its weights (`hf/`), the adapters as a
    PEFT folder (`adapter/`), or both."""


@attrs.frozen(kw_only=True)
class Profile:
    """A window of steps recorded with torch.profiler."""

    start: int = attrs.field(default=0, validator=ge(0))
    """First step of the window; 0 records nothing."""
    steps: int = attrs.field(default=3, validator=ge(1))
    """Steps of the window."""


@attrs.frozen(kw_only=True)
class Run:
    """One training run. Fields that a resume may change say so; any other change needs a new `--out`."""

    model: ModelConfig | None = None
    """The model; None takes the one in `init`."""
    init: str = ""
    """Hugging Face folder, or run folder of lf, whose weights the run starts from; empty starts from random weights."""
    tokenizer: TokenizerConfig | None = None
    """The tokenizer; None takes the one in `init`, or none."""
    data: DataConfig
    """Where training rows come from."""
    batch: int = attrs.field(default=8, validator=ge(1))
    """Rows of one step over all ranks."""
    optim: OptimConfig = AdamW()
    """The optimiser."""
    adapt: Lora | None = None
    """Low-rank adapters that are trained in place of the weights; None trains the weights. For the torch path."""
    parallel: ParallelConfig = attrs.field(default=MegatronParallel(), metadata=MAY_CHANGE)
    """How the run is spread over ranks. A resume may change it."""
    balance: Balance | None = attrs.field(default=None, metadata=MAY_CHANGE)
    """How rows are spread over ranks by what they cost; None takes them by turns. A resume may change it."""
    precision: Precision = Precision()
    """Number formats."""
    steps: int = attrs.field(default=1000, validator=ge(1), metadata=MAY_CHANGE)
    """Optimiser steps of the run. A resume may change it."""
    seed: int = attrs.field(default=0, validator=ge(0))
    """Seed of weights, order and every random draw."""
    eval: Eval = attrs.field(default=Eval(), metadata=MAY_CHANGE)
    """Evaluation. A resume may change it."""
    log: Log = attrs.field(default=Log(), metadata=MAY_CHANGE)
    """Reports. A resume may change it."""
    save: Save = attrs.field(default=Save(), metadata=MAY_CHANGE)
    """Checkpoints. A resume may change it."""
    profile: Profile = attrs.field(default=Profile(), metadata=MAY_CHANGE)
    """Profiler window. A resume may change it."""
