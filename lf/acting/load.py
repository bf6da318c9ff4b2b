"""Policies from run folders, from exports and, untrained, from configs.

Shapes: H steps of an action chunk, a dims of an action.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lf.acting.observe import action_dims, observed_row, state_dims
from lf.acting.policy import Observation, Policy
from lf.config import from_json, load_classes, read_text
from lf.data.acting import ActingFacts
from lf.data.hf_tokenizer import Tokenizer, read_tokenizer
from lf.data.lerobot import make_prompt
from lf.data.lerobot_choose import Prompt
from lf.data.normalise import decode_actions
from lf.data.source import acting_of
from lf.devices.detect import detect, require
from lf.models.spec import Ctx, ModelConfig, check_model, collate, draw, has_rule, prompt, sample, type_name
from lf.train.checkpoint import CheckpointError
from lf.train.config import Run
from lf.train.folder import ACTING, TOKENIZER
from lf.train.names import EMA, key
from lf.train.reader import Reader
from lf.train.run import open_reading
from lf.train.start import Start, from_checkpoint, load_model, newest, open_start

Dtype = Literal["float32", "bfloat16"]
"""What a policy computes in."""


@attrs.frozen(kw_only=True, eq=False)
class Found:
    """What a policy is made of, before its weights are read."""

    start: Start
    """The model and its weights."""
    facts: ActingFacts
    """The robot."""
    tokenizer: Tokenizer | None
    """What its prompts are written in, None for a policy without."""
    where: str
    """Where it came from, as errors name it."""


def load_policy(
    folder: str | Path,
    *,
    device: str = "cpu",
    averaged: bool | None = None,
    config_file: str = "",
    dtype: Dtype = "float32",
    say: Callable[[str], None] = lambda text: None,
) -> Policy:
    """Returns the policy of a run folder (its newest good checkpoint), or of a Hugging Face folder with `acting.json`.

    `averaged` takes the running average of the weights or not; None does as the exports of the run. `config_file` is
    executed first, for a model whose class is in it; no file of the folder is executed unasked. `say` is told of
    damaged checkpoints that were passed over. Raises ValueError where the folder is no policy's or lacks what acting
    needs, CheckpointError where no checkpoint is good.
    """
    path = Path(folder).expanduser()
    if config_file:
        load_classes(config_file)
    found = _of_run(path, averaged, say) if (path / "checkpoints").is_dir() else _of_export(path, averaged)
    return _policy(found, device, dtype, 0)


def untrained_policy(run: Run, *, device: str = "cpu", dtype: Dtype = "float32") -> Policy:
    """Returns the policy that a run starts from, scaled as its data says: a baseline for the trained one.

    Raises ValueError for what is wrong with the run's data, or where it is no robot's.
    """
    start = open_start(run.init, run.model)
    rows, tokenizer = open_reading(run, start.model)
    facts = acting_of(rows)
    if facts is None:
        raise ValueError(f"data is {type_name(run.data)}, which is no robot's; give a run on LeRobotData")
    return _policy(Found(start=start, facts=facts, tokenizer=tokenizer, where="run"), device, dtype, run.seed)


def _of_run(path: Path, averaged: bool | None, say: Callable[[str], None]) -> Found:
    reader, skipped = newest(path)
    for one in skipped:
        say(f"skipped {one.path}: {one.reason}")
    text, source = reader.meta.get("acting"), str(reader.path)
    if not isinstance(text, str):
        text, source = _beside(path), str(path / ACTING)
    kept = any(name.startswith(key(EMA, "")) for name in reader.names)
    if averaged and not kept:
        raise ValueError(f"{reader.path} has no average of the weights (optim.ema was 0); do not ask for it")
    chosen = bool(reader.meta.get("averaged")) if averaged is None else averaged
    return Found(
        start=from_checkpoint(path, reader, averaged=chosen),
        facts=_facts(text, source),
        tokenizer=_tokenizer_of(path, reader),
        where=str(reader.path),
    )


def _tokenizer_of(path: Path, reader: Reader) -> Tokenizer | None:
    # An import states no tokenizer, and has one where the imported folder had.
    stated = reader.meta.get("tokenizer", {} if not (path / TOKENIZER).is_dir() else None)
    if stated == {}:
        return None
    found = read_tokenizer(path / TOKENIZER)
    if stated is not None and found.fingerprint != stated.get("sha256"):
        raise CheckpointError(f"{path / TOKENIZER} is not what {reader.path} was trained with; put its files back")
    return found


def _of_export(path: Path, averaged: bool | None) -> Found:
    if averaged is not None:
        raise ValueError(f"{path} is no run folder, and has one set of weights; leave `averaged` out")
    start, facts = open_start(str(path), None), _facts(_beside(path), str(path / ACTING))
    tokenizer = read_tokenizer(path) if any(path.glob("tokenizer*")) else None
    return Found(start=start, facts=facts, tokenizer=tokenizer, where=str(path))


def _beside(path: Path) -> str:
    file = path / ACTING
    if not file.is_file():
        raise ValueError(
            f"{path} has no {ACTING}, which says how states and actions are scaled, which cameras there are and how "
            "often the robot acts; train the policy on the robot's data and give its run folder or hf/ (a run of an "
            "older lf: for one step more), or put such a file there"
        )
    return read_text(file)


def _facts(text: str, source: str) -> ActingFacts:
    facts = from_json(text, source=source, kind=ActingFacts)
    assert isinstance(facts, ActingFacts)
    return facts


def _policy(found: Found, device: str, dtype: Dtype, seed: int) -> Policy:
    model, facts = found.start.model, found.facts
    _check(found)
    target = detect(device)
    if dtype == "bfloat16":
        require(target, "bf16", "dtype", "take float32")
    text = functools.partial(prompt, model) if has_rule(prompt, model) else None
    module = load_model(found.start, Ctx(device=target, dtype=getattr(torch, dtype)), seed).eval()
    return Policy(
        cameras=facts.cameras,
        state_dims=state_dims(facts),
        action_dims=action_dims(facts),
        horizon=facts.chunk,
        fps=facts.fps,
        act=functools.partial(
            _act, model, module, facts, make_prompt(text, found.tokenizer, found.where), target.torch_type
        ),
    )


def _check(found: Found) -> None:
    model, facts = found.start.model, found.facts
    if not has_rule(sample, model):
        raise ValueError(f"{found.where}: {type_name(model)} has no rule for `sample`, so it is no policy")
    if facts.normalisers.actions is None:
        raise ValueError(f"{found.where}: the data has no actions; train on data with some (actions=...)")
    if facts.beyond:
        raise ValueError(
            f"{found.where}: the policy was trained on {', '.join(facts.beyond)} of its data, which one observation "
            "cannot give; train without them"
        )
    vocab = {} if found.tokenizer is None else {"vocab": found.tokenizer.vocab}
    check_model(model, {"action_dims": action_dims(facts), "length": facts.chunk, **vocab})


def _act(
    model: ModelConfig,
    module: nn.Module,
    facts: ActingFacts,
    words: Prompt | None,
    device: str,
    seen: Sequence[Observation],
    seeds: Sequence[int],
) -> list[NDArray[np.float32]]:
    if len(seen) != len(seeds):
        raise ValueError(f"{len(seen)} observations came with {len(seeds)} seeds; give one each")
    if not seen:
        return []
    batch = policy_batch(model, facts, words, seen, [str(seed) for seed in seeds])
    with torch.inference_mode():
        chunks = sample(model, module, _on(batch, device)).float().cpu().numpy()
    dims = action_dims(facts)
    raw = [decode_actions(facts.normalisers, c[:, :dims], one.state) for c, one in zip(chunks, seen, strict=True)]
    for number, chunk in enumerate(raw):
        if not np.isfinite(chunk).all():
            raise ValueError(f"the policy's answer to observation {number} is not finite; its weights are broken")
    return raw


def policy_batch(
    model: ModelConfig, facts: ActingFacts, words: Prompt | None, seen: Sequence[Observation], ids: Sequence[str]
) -> dict[str, Any]:
    """Returns the micro-batch of observations with its noise, each row's a function of its id alone.

    It is the one that training makes of the same frames, except for actions (zeros) and what counts in a loss.
    """
    rows = [observed_row(facts, words, one, ident) for one, ident in zip(seen, ids, strict=True)]
    return dict(draw(model, collate(model, rows, rows[0]), 0, 0))


def _on(batch: Mapping[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
