"""From a run to the facts that a plan rests on; no data is opened and no weight is read."""

from pathlib import Path

import torch

from lf.data.config import DataConfig, Mixture
from lf.models import hf
from lf.models.spec import blocks, has_rule, type_name
from lf.parallel.config import MegatronParallel
from lf.plan.estimate import Job
from lf.train.config import OptimConfig, Run
from lf.train.optim import make_optimizer, state_tensors

SAMPLE = 4096
"""Numbers of the parameter that an optimiser is tried on."""


def job_of(run: Run, world: int, *, length: int = 0, cpu: bool = False) -> Job:
    """Returns the facts of a run on `world` ranks; `length` is the tokens of a row where the data does not say.

    Raises ValueError where the run cannot be planned.
    """
    if not isinstance(run.parallel, MegatronParallel):
        raise ValueError(
            f"parallel = {type(run.parallel).__name__}: plans are made for the Megatron path alone; set parallel to "
            "lf.MegatronParallel(...)"
        )
    model = run.model
    if model is None:
        if not run.init:
            raise ValueError("model = None and init is empty, so there is nothing to plan; set model, or init=FOLDER")
        model = hf.read_config(Path(run.init).expanduser(), None)
    if not has_rule(blocks, model):
        raise ValueError(f"parallel = MegatronParallel: nothing says what {type_name(model)} costs, so it has no plan")
    if not (length or row_length(run.data)):
        raise ValueError(f"data = {type_name(run.data)} does not say how long a row is; give --length TOKENS")
    return Job(
        model=model,
        parallel=run.parallel,
        world=world,
        batch=run.batch,
        length=length or row_length(run.data),
        itemsize=getattr(torch, run.precision.params).itemsize,
        state=state_bytes(run.optim),
        packed=not getattr(run.data, "cross_documents", False),
        cpu=cpu,
    )


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
