"""From a run to the facts that a plan rests on; no weight is read, and of data the grids of images alone."""

from pathlib import Path

import attrs
import torch

from lf.data.config import DataConfig, Mixture
from lf.data.outline import outline
from lf.data.source import Rows, has_outlines
from lf.models import hf
from lf.models.media import Media, takes_media
from lf.models.spec import ModelConfig, blocks, has_rule, type_name
from lf.parallel.config import Hetero, megatron_part
from lf.plan.estimate import Job
from lf.train.config import OptimConfig, Run
from lf.train.optim import make_optimizer, state_tensors
from lf.train.run import open_reading

SAMPLE = 4096
"""Numbers of the parameter that an optimiser is tried on."""
ROWS = 256
"""Rows of data whose images are looked at: the order of an epoch is random."""


def job_of(run: Run, world: int, *, length: int = 0, media: tuple[Media, ...] | None = None, cpu: bool = False) -> Job:
    """Returns the facts of a run on `world` ranks.

    `length` is the tokens of a row where the data does not say; `media` are its images and videos, None those of the
    data. Raises ValueError where the run cannot be planned.
    """
    text = megatron_part(run.parallel)
    if text is None:
        raise ValueError(
            f"parallel = {type(run.parallel).__name__}: plans are made for the Megatron path alone; set parallel to "
            "lf.MegatronParallel(...) or lf.Hetero(...)"
        )
    if run.balance is not None and (run.balance.tokens or run.balance.patches):
        raise ValueError(
            "balance.tokens and balance.patches cap micro-batches, whose number a plan cannot know then; set both to 0 "
            "to plan"
        )
    model = run.model
    if model is None:
        if not run.init:
            raise ValueError("model = None and init is empty, so there is nothing to plan; set model, or init=FOLDER")
        model = hf.read_config(Path(run.init).expanduser(), None)
    if not has_rule(blocks, model):
        raise ValueError(
            f"parallel = MegatronParallel: nothing says what {type_name(model)} costs, so it has no plan; "
            "give a decoder or a vision-language model, or a rule of `blocks` for its type"
        )
    if not (length or row_length(run.data)):
        raise ValueError(f"data = {type_name(run.data)} does not say how long a row is; give --length TOKENS")
    vision = run.parallel.vision if isinstance(run.parallel, Hetero) else None
    if vision is not None and not takes_media(model):
        raise ValueError(
            f"parallel = Hetero: {type_name(model)} has no images to encode; set parallel to what parallel.text is"
        )
    most, usual, known = _images(run, model, media)
    return Job(
        model=model,
        parallel=attrs.evolve(text, micro_batch=run.parallel.micro_batch),
        vision=vision,
        world=world,
        batch=run.batch,
        length=length or row_length(run.data),
        itemsize=getattr(torch, run.precision.params).itemsize,
        state=state_bytes(run.optim),
        packed=not getattr(run.data, "cross_documents", False),
        cpu=cpu,
        media=most,
        usual=usual,
        known=known,
    )


def _images(run: Run, model: ModelConfig, declared: tuple[Media, ...] | None) -> tuple[tuple[Media, ...], float, str]:
    """Returns the images of the fullest row, the share of its patches that rows have on average, and what says so."""
    if not takes_media(model):
        if declared:
            raise ValueError(f"--images = {len(declared)}, but {type_name(model)} takes no images; leave it out")
        return (), 1.0, ""
    if declared is not None:
        return declared, 1.0, "as declared"
    try:
        rows, _ = open_reading(run, model)
        found = [_media(rows, index) for index in range(min(ROWS, len(rows)))]
    except (ValueError, OSError) as error:
        raise ValueError(
            f"the data cannot say what images a row has ({error}); declare them by --images and --grid, or mend it"
        ) from error
    patches = [sum(item.patches for item in media) for media in found]
    most = max(patches)
    usual = sum(patches) / (len(patches) * most) if most else 1.0
    return found[patches.index(most)], usual, f"the fullest of the data's first {len(found):,}"


def _media(rows: Rows, index: int) -> tuple[Media, ...]:
    """Returns the images and videos of a row of the first epoch, unread where the source can tell them so."""
    row = outline(rows, 0, index) if has_outlines(rows) else rows.row(0, index)
    return tuple(row.get("media", ()))


def row_length(data: DataConfig) -> int:
    """Returns the tokens of a row as the config states them, 0 where it does not."""
    if isinstance(data, Mixture):
        return row_length(data.parts[0].data)
    return int(getattr(data, "seq_len", 0))


def state_bytes(cfg: OptimConfig) -> float:
    """Returns the bytes that an optimiser keeps of each number, found by a step on a small float32 parameter."""
    parameter = torch.nn.Parameter(torch.zeros(SAMPLE))
    optimizer = make_optimizer(cfg, [{"params": [parameter], "names": ["weight"], "weight_decay": 0.0}])
    parameter.grad = torch.zeros(SAMPLE)
    optimizer.step()
    return sum(kept.nbytes for kept in state_tensors(optimizer, parameter).values() if kept.ndim) / SAMPLE
