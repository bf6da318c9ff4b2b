"""The questions lf asks of a model family, and the types of the answers.

A family is a frozen config class plus one function for each question, registered on that class in the file that
defines it (`@build_model.register`). Rules follow the class hierarchy, so a variant inherits what it does not change.

Shapes: B rows of a micro-batch, S positions of a row, H width, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from lf.devices.device import Device

if TYPE_CHECKING:
    from lf.models.media import Media

Batch = Mapping[str, Any]
"""What a family's `collate` makes: tensors by name; `ids`, the sample ids of the rows; and `count`, how many tokens
(or samples, where there are no tokens) it holds without padding."""

Output = Any
"""What `forward` returns: a tensor between pipeline stages, whatever `loss_terms` reads on the last one."""

Path = Literal["megatron", "torch"]
"""A train path: `megatron` is `train/megatron_step.py`, `torch` is `train/fsdp_step.py`."""


IGNORE = -100
"""Label of a position that is not trained, as in torch and transformers."""


@attrs.frozen(kw_only=True)
class ModelConfig:
    """A model: the type says which family, the fields say which size."""


@attrs.frozen(kw_only=True)
class Layout:
    """How many ranks each axis of parallelism has, and where this rank stands on it."""

    dp: int = 1
    """Data parallel ranks."""
    tp: int = 1
    """Tensor parallel ranks."""
    sp: bool = False
    """Whether tensor parallel ranks also share the sequence."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Model chunks of each pipeline stage."""
    stages: tuple[int, ...] = ()
    """Layers of each chunk, in the order of the layers; empty spreads them evenly."""
    cp: int = 1
    """Context parallel ranks."""
    cp_kind: Literal["gather", "ulysses"] = "gather"
    """How context parallel attention works."""
    ep: int = 1
    """Expert parallel ranks."""
    etp: int = 1
    """Tensor parallel ranks inside an expert."""
    apart: int = 0
    """Ranks that encode an image together, where all ranks encode before the pipeline runs; 0 where its first stage
    does, each rank for itself."""
    dp_rank: int = 0
    """This rank's place among the data parallel ranks."""
    tp_rank: int = 0
    """This rank's place among the tensor parallel ranks."""
    pp_rank: int = 0
    """This rank's pipeline stage."""
    cp_rank: int = 0
    """This rank's place among the context parallel ranks."""
    ep_rank: int = 0
    """This rank's place among the expert parallel ranks."""
    etp_rank: int = 0
    """This rank's place among the tensor parallel ranks of an expert."""


@contextlib.contextmanager
def text_errors(apart: int) -> Iterator[None]:
    """Makes errors name fields of `parallel` as those of `parallel.text` where images are apart (`Layout.apart`)."""
    try:
        yield
    except ValueError as error:
        if not apart:
            raise
        raise ValueError(str(error).replace("parallel.", "parallel.text.")) from error


@attrs.frozen(kw_only=True)
class Ctx:
    """Everything `build_model` may need besides the config; nothing is looked up globally."""

    device: Device
    """The kind of device the model lives on."""
    dtype: torch.dtype = torch.float32
    """Type of the parameters."""
    layout: Layout = Layout()
    """Degrees of parallelism, and this rank's place."""
    groups: Any = None
    """megatron-core's ProcessGroupCollection on the Megatron path, else None."""
    layers: Any = None
    """The layer backend: a megatron-core BackendSpecProvider on the Megatron path, else None."""
    options: tuple[tuple[str, Any], ...] = ()
    """megatron-core TransformerConfig fields that the parallel config decides (recompute and the like)."""
    pre: bool = True
    """Whether this pipeline stage holds the embedding."""
    post: bool = True
    """Whether this pipeline stage holds the output layer and the loss."""
    chunk: int = 0
    """Which of its model chunks this pipeline stage builds, from 0."""
    meta: bool = False
    """Build on the meta device: shapes and names, no memory."""


@attrs.frozen(kw_only=True)
class ShardSpec:
    """Where the torch path cuts a module; no process group is needed to make one."""

    fsdp_units: tuple[str, ...] = ()
    """Glob patterns of the submodules that become one FSDP unit each; `*` stands for one part of a dotted name. What a
    forward leaves out on one rank alone must be no unit: it then belongs to the unit around it, where it may."""
    recompute_units: tuple[str, ...] = ()
    """Glob patterns of the submodules whose activations may be recomputed; `*` as above."""
    float32: tuple[str, ...] = ()
    """Glob patterns of the tensors that compute in float32 where the others do not; `*` matches dots too."""


@attrs.frozen(kw_only=True)
class Part:
    """A box of a global tensor and where it lies in this rank's tensor."""

    at: tuple[int, ...]
    """First index of the box in the global tensor, one number a dimension."""
    local: tuple[int, ...]
    """First index of the box in this rank's tensor."""
    size: tuple[int, ...]
    """Extent of the box."""


@attrs.frozen(kw_only=True)
class Placed:
    """One tensor of this rank as boxes of the global tensor with the canonical name."""

    name: str
    """Canonical lf name: equal in every layout and layer backend."""
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    parts: tuple[Part, ...]
    """The boxes that this rank holds; together they fill its tensor, except padded rows."""
    owner: bool = True
    """Whether this rank is the one that saves these boxes (False on replicas)."""
    replica: int = 0
    """This rank's place among the data parallel ranks that hold the same boxes."""


@runtime_checkable
class Accounted(Protocol):
    """A module that has loss terms of its own, beside those of its output, and state that follows each step by rule."""

    def start_pass(self, weights: Mapping[str, float]) -> None:
        """Makes ready for the micro-batches of a pass; `weights` are those of `loss_weights` over the global batch."""

    def own_terms(self) -> dict[str, Tensor]:
        """Returns this rank's share of the sum of each such term over the pass."""

    def after_update(self) -> None:
        """Follows an update of the weights; every rank calls it."""


@attrs.frozen(kw_only=True)
class InitRule:
    """How the tensors whose canonical names match a pattern start."""

    pattern: str
    """Glob pattern over canonical names; the first rule that matches holds."""
    kind: Literal["normal", "ones", "zeros"]
    """Normal draws, all ones, or all zeros."""
    std: float = 0.0
    """Standard deviation of the normal draws."""


@attrs.frozen(kw_only=True)
class Load:
    """What a rank computes at a time, as planners state it."""

    rows: int
    """Rows of a micro-batch, before context parallel ranks share it."""
    length: int
    """Tokens of a row."""
    itemsize: int = 4
    """Bytes of a parameter and of an activation."""
    recompute: tuple[str, ...] = ()
    """What the backward makes again: nothing, ("full",) for whole layers, or the names of modules."""
    packed: bool = True
    """Whether rows may hold several documents, so that a micro-batch runs as one packed row."""
    cpu: bool = False
    """Whether torch's layers run on a CPU, where norms work on float32 copies and attention keeps masks and parts."""
    media: tuple["Media", ...] = ()
    """Images and videos of the row that has most of them."""
    usual: float = 1.0
    """Share of them that rows have on average, 0 to 1."""
    media_again: bool = False
    """Whether the backward makes the activations of whoever encodes them again, layer by layer."""
    micro: int = 1
    """Micro-batches of a step, whose images are encoded together where `Layout.apart`."""


@attrs.frozen(kw_only=True)
class Weight:
    """A parameter as a rank holds it."""

    name: str
    """What it is, without the number of its layer."""
    size: int
    """Elements on this rank."""
    padding: int = 0
    """Elements of them that are padding."""
    itemsize: int = 0
    """Bytes of an element where they are not those of `Load.itemsize`, else 0."""
    expert: bool = False
    """Whether it belongs to an expert, so that other ranks hold the same one than those that share the rest."""
    summed: bool = False
    """Whether its gradient is summed over the tensor parallel ranks after the backward."""
    tied: bool = False
    """Whether the first and the last pipeline stage both hold it."""
    frozen: bool = False
    """Whether no gradient is taken and no optimiser moves it."""


@attrs.frozen(kw_only=True)
class Message:
    """A collective that a micro-batch needs, its calls of forward, backward and recomputation together."""

    op: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"]
    """What it does."""
    axis: str
    """The ranks that take part: a degree of parallelism by name, `mp` (tp and pp together), `replica` (and cp), or
    `apart`, those that encode an image together."""
    size: int
    """Bytes of one call: of the whole tensor, before a reduce-scatter and after an all-gather; of what a rank sends."""
    calls: int = 1
    """Calls of one micro-batch."""


@attrs.frozen(kw_only=True)
class Block:
    """A part of a model chunk on one rank, once or in several layers: what it holds, keeps, computes and sends.

    Numbers are those of one of them, and of one micro-batch, or of a whole step where it says so.
    """

    name: str
    """What it is."""
    chunk: int = 0
    """Which model chunk of the pipeline stage it is in."""
    step: bool = False
    """Whether it works once for all micro-batches of a step: forward before the pipeline runs, backward after it."""
    layers: tuple[int, ...] = ()
    """The layers (from 0) that have it, each its own; empty where it belongs to no layer."""
    weights: tuple[Weight, ...] = ()
    """Its parameters, in the order of the module's."""
    saved: tuple[tuple[str, int], ...] = ()
    """Bytes that the forward keeps for the backward, by name."""
    working: int = 0
    """Bytes that it holds besides, while it runs itself."""
    forward: float = 0.0
    """Floating point operations of the forward; the backward has twice as many."""
    again: float = 0.0
    """Operations of the forward that the backward repeats."""
    messages: tuple[Message, ...] = ()
    """What it sends, within a step."""

    @property
    def count(self) -> int:
        """How many there are."""
        return max(1, len(self.layers))


@attrs.frozen(kw_only=True)
class Golden:
    """What lf makes of the inputs that a public implementation recorded."""

    outputs: Mapping[str, Tensor]
    """Outputs by their recorded names."""
    loss: Tensor
    """The loss whose gradients were recorded, with its graph."""


def type_name(value: object) -> str:
    """Returns the full name of a value's type, as errors print it."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def no_rule(question: Callable[..., Any], cfg: object) -> NotImplementedError:
    """Returns the error of a question (a singledispatch function) that has no rule for a value's type."""
    name = question.__name__
    return NotImplementedError(
        f"{name} has no rule for {type_name(cfg)}; add one with @{name}.register in the file that defines it"
    )


def has_rule(question: Any, cfg: object) -> bool:
    """Returns whether a family has a rule of its own for a question, a `singledispatch` function."""
    return question.dispatch(type(cfg)) is not question.dispatch(object)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns what a module must be saved with: its parameters and persistent buffers, by name, each tensor once."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    seen = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


@functools.singledispatch
def build_model(cfg: ModelConfig, ctx: Ctx) -> nn.Module:
    """Returns the module of this rank with uninitialised or default weights; works on the meta device."""
    raise no_rule(build_model, cfg)


@functools.singledispatch
def forward(cfg: ModelConfig, model: nn.Module, batch: Batch) -> Output:
    """Calls `model(...)` exactly once on a micro-batch and returns what `loss_terms` reads."""
    raise no_rule(forward, cfg)


@functools.singledispatch
def loss_weights(cfg: ModelConfig, batch: Batch) -> dict[str, Tensor]:
    """Returns each loss term's weight in a micro-batch (a scalar), from the batch alone.

    The step sums them over the whole global batch before the first forward.
    """
    raise no_rule(loss_weights, cfg)


@functools.singledispatch
def loss_terms(cfg: ModelConfig, output: Output, batch: Batch) -> dict[str, Tensor]:
    """Returns each loss term's sum over a micro-batch (a scalar), under the names of `loss_weights`."""
    raise no_rule(loss_terms, cfg)


@functools.singledispatch
def loss_coefficients(cfg: ModelConfig) -> dict[str, float]:
    """Returns the factor of each loss term in the total; a term not named has 1."""
    return {}


@functools.singledispatch
def shard_spec(cfg: ModelConfig) -> ShardSpec:
    """Returns where the torch path cuts the module."""
    raise no_rule(shard_spec, cfg)


@functools.singledispatch
def weight_map(cfg: ModelConfig) -> Any:
    """Returns the `WeightMap` between canonical lf names and Hugging Face names."""
    raise no_rule(weight_map, cfg)


@functools.singledispatch
def hf_config(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the Hugging Face `config.json` of the model, as a dict."""
    raise no_rule(hf_config, cfg)


@functools.singledispatch
def init_rules(cfg: ModelConfig) -> tuple[InitRule, ...]:
    """Returns how weights start when no checkpoint is given; every tensor must match a rule."""
    raise no_rule(init_rules, cfg)


@functools.singledispatch
def flops(cfg: ModelConfig, rows: int, length: int) -> float:
    """Returns the floating point operations of forward and backward, without recompute, of `rows` rows of `length`."""
    raise no_rule(flops, cfg)


@functools.singledispatch
def blocks(cfg: ModelConfig, layout: Layout, load: Load) -> tuple[Block, ...]:
    """Returns what a rank of the pipeline stage `layout.pp_rank` holds and does, in the order of the model.

    Ranks of a stage are alike; where they are not, the answer is that of the one with most. Nothing is built.
    """
    raise no_rule(blocks, cfg)


@functools.singledispatch
def fake_batch(cfg: ModelConfig, rows: int, length: int, seed: int) -> Batch:
    """Returns a micro-batch of random data, for tests, plans and benchmarks."""
    raise no_rule(fake_batch, cfg)


@functools.singledispatch
def collate(cfg: ModelConfig, rows: Sequence[Mapping[str, Any] | None], like: Mapping[str, Any]) -> Batch:
    """Returns the micro-batch made of the rows that a source gives; None becomes a row `like` that one, of weight 0.

    All micro-batches of a step have one shape, those of None alone too: pipeline stages agree on it beforehand.
    """
    raise no_rule(collate, cfg)


@functools.singledispatch
def draw(cfg: ModelConfig, batch: Batch, seed: int, step: int) -> Batch:
    """Returns the micro-batch with the noise and times of a step, where the loss of a family has some.

    Each row's are functions of (seed, step, what is drawn, its id) alone, so neither ranks nor micro-batches change
    them, and none has to be saved. The step calls it before `forward`; an evaluation with seed and step 0.
    """
    return batch


@functools.singledispatch
def sample(cfg: ModelConfig, model: nn.Module, batch: Batch) -> Any:
    """Returns what a generative family makes of a micro-batch that `draw` has given its noise; the caller has no_grad.

    Robot policies return normalised action chunks [B, H, D].
    """
    raise no_rule(sample, cfg)


@functools.singledispatch
def prompt(cfg: ModelConfig, task: str, state: np.ndarray) -> str:
    """Returns the text that a robot policy reads, given the task's text and the normalised state [d]."""
    raise no_rule(prompt, cfg)


Affine = tuple[Sequence[float], Sequence[float]]
"""Shift and scale of each dim: a scaled number is (x - shift) / scale."""


@functools.singledispatch
def robot_files(
    cfg: ModelConfig, config: Mapping[str, Any], state: Affine | None, actions: Affine, delta: bool
) -> dict[str, bytes]:
    """Returns files, by name, that other software needs beside the weights to run a robot policy.

    `config` is the config.json of the export; a file of that name replaces it. `delta` says whether actions are
    differences to the state.
    """
    return {}


@functools.singledispatch
def prompt_limit(cfg: ModelConfig) -> int:
    """Returns the most tokens of a prompt that a robot policy takes, its field `prompt`; 0 sets no limit."""
    return 0


@functools.singledispatch
def golden(cfg: ModelConfig, model: nn.Module, inputs: Mapping[str, Tensor], config: Mapping[str, Any]) -> Golden:
    """Returns what a public implementation recorded of such a model, computed by lf from its recorded inputs.

    `config` is the config.json of the recording.
    """
    raise no_rule(golden, cfg)


@functools.singledispatch
def paths(cfg: ModelConfig) -> tuple[Path, ...]:
    """Returns the train paths that this family runs on."""
    return ("torch",)


@functools.singledispatch
def check_layout(cfg: ModelConfig, layout: Layout, length: int) -> None:
    """Raises ValueError, with the cure, where a layout does not fit the model and rows of `length`."""


@functools.singledispatch
def slice_batch(cfg: ModelConfig, batch: Batch, layout: Layout) -> Batch:
    """Returns a context parallel rank's part of a micro-batch; without context parallel ranks, the batch."""
    if layout.cp > 1:
        raise no_rule(slice_batch, cfg)
    return batch


@functools.singledispatch
def check_model(cfg: ModelConfig, data: Mapping[str, int]) -> None:
    """Raises ValueError when the model cannot take the data, described by `data`: `vocab` and `length`.

    Without a rule of its own, a family whose config has the field `vocab` refuses larger ids than it has.
    """
    vocab = getattr(cfg, "vocab", None)
    if isinstance(vocab, int) and data.get("vocab", 0) > vocab:
        raise ValueError(f"model.vocab = {vocab}, but the data has token id {data['vocab'] - 1}; raise model.vocab")


def text_batch(
    rows: Sequence[Mapping[str, Any] | None], like: Mapping[str, Any] | None = None, vocab: int | None = None
) -> Batch:
    """Returns the micro-batch of rows of text: `tokens`, `labels`, `positions` [B, S], and `lengths` of the documents.

    A row has `tokens` and `labels` of S ids, the `lengths` of its documents, how many positions are `real` (the others
    are padding; kept for each row), and an `id`. Positions start again at every document. None becomes padding as long
    as `like`. Raises ValueError, with the row's id, for a row of another length, and for a token that is not
    below `vocab`, where that is given.
    """
    for row in rows:
        if row is not None and vocab is not None:
            _check_ids(row, vocab)
    size = next(len(row["tokens"]) for row in (like, *rows) if row is not None)
    blank: Mapping[str, Any] = {
        "tokens": np.zeros(size, np.int64),
        "labels": np.full(size, IGNORE, np.int64),
        "lengths": (size,),
        "real": 0,
        "id": "padding",
    }
    full = [blank if row is None else row for row in rows]
    for row in full:
        found = len(row["tokens"]), len(row["labels"]), sum(row["lengths"])
        if found != (size,) * 3:
            raise ValueError(
                f"row {row['id']} has {found[0]} tokens, {found[1]} labels and documents of {found[2]} together, where "
                f"rows of this source have {size} of each; pad its rows to one length, with labels {IGNORE}"
            )
    lengths = tuple(int(n) for row in full for n in row["lengths"])
    positions = np.concatenate([np.arange(n) for n in lengths])
    return {
        "tokens": torch.from_numpy(np.stack([row["tokens"] for row in full]).astype(np.int64)),
        "labels": torch.from_numpy(np.stack([row["labels"] for row in full]).astype(np.int64)),
        "positions": torch.from_numpy(positions).reshape(len(full), size),
        "lengths": lengths,
        "ids": tuple(row["id"] for row in full),
        "real": tuple(int(row["real"]) for row in full),
        "count": sum(row["real"] for row in full),
    }


def _check_ids(row: Mapping[str, Any], vocab: int) -> None:
    labels = np.asarray(row["labels"])
    for name, ids in (("tokens", np.asarray(row["tokens"])), ("labels", labels[labels != IGNORE])):
        wrong = ids[(ids < 0) | (ids >= vocab)]
        if len(wrong):
            raise ValueError(
                f"row {row['id']}: {name} has id {wrong[0]}, and those of the model go from 0 to {vocab - 1}; give "
                "rows of this model's tokenizer, or raise model.vocab"
            )


def fake_text_batch(vocab: int, rows: int, length: int, seed: int) -> Batch:
    """Returns a micro-batch of random token ids, one document a row."""
    tokens = np.random.default_rng(seed).integers(0, vocab, (rows, length + 1))
    return text_batch(
        [
            {"tokens": row[:-1], "labels": row[1:], "lengths": (length,), "real": length, "id": f"fake:{seed}:{i}"}
            for i, row in enumerate(tokens)
        ]
    )
