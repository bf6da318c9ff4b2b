"""Data sources: rows found by index, whose order is a function of (seed, epoch) alone.

A source of your own is a `DataConfig` subclass and one rule, `@open_data.register`, in the same file.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, Protocol

import attrs

from lf.data.acting import ActingFacts, acting_facts
from lf.data.cache import key_of
from lf.data.config import ChatData, DataConfig, LatentData, LeRobotData, MediaData, Mixture, TextData
from lf.data.files import file_digests, find_files
from lf.data.hf_tokenizer import Tokenizer
from lf.data.latents import LatentRows, MediaRows, check_encoders, open_latents, open_media
from lf.data.lerobot import LeRobotRows, check_alike, fit_rows, make_prompt, open_lerobot
from lf.data.lerobot_choose import Most
from lf.data.lerobot_meta import read_meta
from lf.data.multimodal import ChatRows, chat_texts, open_chat
from lf.data.normalise import Floats, Normalisers
from lf.data.outline import outline
from lf.data.text import TextRows, open_text, read_texts, text_key
from lf.models.media import MediaRules
from lf.models.spec import has_rule, no_rule
from lf.plan.order import deal, hash_keys, integer_weights

_COMMON = (
    *("vocab", "length", "cameras", "state_dims", "action_dims"),
    *("channels", "condition_channels", "text_dim", "text_length", "image_dim", "encoder"),
)
"""Facts that parts of a mixture have in common, or of which the largest counts."""

Row = dict[str, Any]
"""One row: what a family's `collate` reads, and `id`, which names the row's content."""


class Rows(Protocol):
    """Rows that are found by index, with no state."""

    def __len__(self) -> int:
        """Returns the rows of one epoch."""
        ...

    def row(self, epoch: int, index: int) -> Row:
        """Returns row `index` of an epoch, both counted from 0; equal arguments give equal rows."""
        ...

    def describe(self) -> dict[str, int]:
        """Returns facts of the source; a run goes on only where they are what they were.

        Those of text are `documents`, `tokens`, `rows`, `vocab` (largest id + 1), `length` of a row and `content`.
        """
        ...


@attrs.frozen(kw_only=True)
class DataCtx:
    """Everything that opening a source may need besides its config."""

    seed: int
    """Seed of the order."""
    cache_dir: Path
    """Folder of what is built once and kept: token ids, tokenizers."""
    tokenizer: Tokenizer | None = None
    """The run's tokenizer, None where it has none."""
    prompt: Callable[[str, Floats], str] | None = None
    """Makes the text that the run's policy reads of a task and a scaled state; None where there is none."""
    prompt_limit: int = 0
    """Most tokens of it that the policy takes (`model.prompt`); 0 sets no limit."""
    media: MediaRules | None = None
    """What the run's model makes of images and videos; None where it takes none."""
    path: str = "data"
    """Where the config stands in the run, as errors name it."""
    normalisers: Normalisers | None = None
    """Normalisers of robot data to use (those of training, when held-out data is opened); None takes the config's."""
    training: bool = True
    """Whether the rows are trained on: pictures of others are never changed at random."""


@attrs.frozen(kw_only=True)
class Texts:
    """The texts of a source, before any tokenizer. Nothing is read before it is asked for."""

    key: Callable[[], str]
    """Returns a hash of the texts' content."""
    read: Callable[[], Iterator[str]]
    """Returns the texts, one a document, in a fixed order."""


@functools.singledispatch
def open_data(cfg: DataConfig, ctx: DataCtx) -> Rows:
    """Returns the rows of a source; raises ValueError with file and line where its content is no good."""
    raise no_rule(open_data, cfg)


@functools.singledispatch
def texts(cfg: DataConfig, ctx: DataCtx) -> Texts:
    """Returns the texts of a source, which a tokenizer may be trained on."""
    raise no_rule(texts, cfg)


def locate(rows: Sized, k: int) -> tuple[int, int]:
    """Returns the epoch and the index in it of row `k` of a run, all counted from 0."""
    if not len(rows):
        raise ValueError("the data source has no rows; give it samples")
    return divmod(k, len(rows))


@open_data.register
def _(cfg: TextData, ctx: DataCtx) -> TextRows:
    return open_text(cfg, tokenizer=ctx.tokenizer, seed=ctx.seed, cache_dir=ctx.cache_dir, where=ctx.path)


@open_data.register
def _(cfg: ChatData, ctx: DataCtx) -> ChatRows:
    return open_chat(
        cfg, tokenizer=ctx.tokenizer, rules=ctx.media, seed=ctx.seed, cache_dir=ctx.cache_dir, where=ctx.path
    )


@open_data.register
def _(cfg: LeRobotData, ctx: DataCtx) -> Rows:
    rows = _open_robot(cfg, ctx)
    return _scaled(rows, [rows], ctx)


@open_data.register
def _(cfg: LatentData, ctx: DataCtx) -> LatentRows:
    return open_latents(cfg, seed=ctx.seed, cache_dir=ctx.cache_dir, where=ctx.path)


@open_data.register
def _(cfg: MediaData, ctx: DataCtx) -> MediaRows:
    return open_media(cfg, seed=ctx.seed, where=ctx.path)


def _open_robot(cfg: LeRobotData, ctx: DataCtx) -> LeRobotRows:
    prompt = make_prompt(ctx.prompt, ctx.tokenizer, ctx.path)
    most = Most(data=cfg.max_prompt, model=ctx.prompt_limit, where=ctx.path)
    return open_lerobot(
        cfg, prompt=prompt, most=most, seed=ctx.seed, cache_dir=ctx.cache_dir, where=ctx.path, training=ctx.training
    )


def normalisers_of(rows: Rows) -> Normalisers | None:
    """Returns the normalisers that all robot data of a source is scaled by; None where it has none."""
    parts = _robots(rows)
    return parts[0].normalisers if parts else None


def acting_of(rows: Rows) -> ActingFacts | None:
    """Returns what acting needs to know of a source of robot data; None where it has none."""
    parts = _robots(rows)
    return acting_facts(parts) if parts else None


def robot_names(rows: Rows) -> str:
    """Returns the names of a source's robot datasets, with the features of their actions; empty where it has none."""
    parts = _robots(rows)
    return "; ".join(dict.fromkeys(f"{part.name}: {', '.join(part.cfg.actions)}" for part in parts))


def _robots(rows: Rows) -> list[LeRobotRows]:
    if isinstance(rows, MixedRows):
        return [robot for part in rows.parts for robot in _robots(part)]
    return [rows] if isinstance(rows, LeRobotRows) else []


@texts.register
def _(cfg: TextData, ctx: DataCtx) -> Texts:
    files = find_files(cfg, ctx.path)
    side = () if cfg.part == "all" else (cfg.part, cfg.held_out)
    return Texts(
        key=lambda: key_of(text_key(cfg, files, ctx.cache_dir), *side),
        read=lambda: read_texts(cfg, files),
    )


@texts.register
def _(cfg: ChatData, ctx: DataCtx) -> Texts:
    files = find_files(cfg, ctx.path)
    side = () if cfg.part == "all" else (cfg.part, cfg.held_out)
    return Texts(
        key=lambda: key_of("chats with roles", file_digests(files, ctx.cache_dir), *side),
        read=lambda: chat_texts(cfg, files),
    )


@attrs.frozen(kw_only=True, eq=False)
class MixedRows:
    """Rows of several sources in fixed proportions.

    The interleaving goes on for ever; each part starts its own next epoch when it is through. An epoch of the mixture
    is as many rows as its parts have together, so with weights in proportion to the parts it is one pass over each.
    """

    parts: tuple[Rows, ...]
    """The sources."""
    weights: tuple[int, ...]
    """Their shares of the rows."""

    def __len__(self) -> int:
        """Returns the rows of one epoch."""
        return sum(len(part) for part in self.parts)

    @property
    def threads(self) -> int:
        """How many rows are worth reading at once."""
        return max(getattr(part, "threads", 1) for part in self.parts)

    def row(self, epoch: int, index: int) -> Row:
        """Returns a row of the part whose turn it is; its id begins with the part's number."""
        at, k = self.part(epoch, index)
        row = self.parts[at].row(*locate(self.parts[at], k))
        return {**row, "id": f"{at}/{row['id']}"}

    def part(self, epoch: int, index: int) -> tuple[int, int]:
        """Returns which part's turn a row is, and the number of its own row, counted from 0 over all epochs."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of an epoch of {len(self)} rows")
        return deal(epoch * len(self) + index, self.weights)

    def describe(self) -> dict[str, int]:
        """Returns the facts that every part has: sizes are the largest of the parts, the others are sums."""
        facts = [part.describe() for part in self.parts]
        names = [name for name in facts[0] if all(name in fact for fact in facts)]
        merge: dict[str, Callable[[list[int]], int]] = dict.fromkeys(_COMMON, max)
        return {name: merge.get(name, sum)([fact[name] for fact in facts]) for name in names}


@outline.register
def _(rows: MixedRows, epoch: int, index: int) -> dict[str, Any]:
    at, k = rows.part(epoch, index)
    told = outline(rows.parts[at], *locate(rows.parts[at], k))
    return {**told, "id": f"{at}/{told['id']}"}


def has_outlines(rows: Rows) -> bool:
    """Returns whether a source tells what its rows cost without reading them."""
    return all(map(has_outlines, rows.parts)) if isinstance(rows, MixedRows) else has_rule(outline, rows)


@open_data.register
def _(cfg: Mixture, ctx: DataCtx) -> Rows:
    rows = _mix(cfg, ctx)
    robots = _robots(rows)
    if not robots:
        return rows
    check_alike(robots, ctx.path)
    # One model sees all parts, so they are scaled alike.
    return _scaled(rows, robots, ctx)


def _mix(cfg: Mixture, ctx: DataCtx) -> MixedRows:
    parts = tuple(_open_part(part.data, _part_ctx(ctx, at)) for at, part in enumerate(cfg.parts))
    check_encoders([part.describe() for part in parts], ctx.path)
    kinds = {bool(_robots(part)) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"{ctx.path}.parts are of robots and of texts; a mixture has parts of one kind")
    lengths = [part.describe().get("length") for part in parts]
    if len(set(lengths)) > 1 and kinds == {False}:
        raise ValueError(f"{ctx.path}.parts have rows of {lengths} tokens; rows of a mixture must be of one length")
    return MixedRows(parts=parts, weights=integer_weights([part.weight for part in cfg.parts]))


def _open_part(cfg: DataConfig, ctx: DataCtx) -> Rows:
    """Opens a part of a mixture; robot data is not scaled yet."""
    if isinstance(cfg, Mixture):
        return _mix(cfg, ctx)
    return _open_robot(cfg, ctx) if type(cfg) is LeRobotData else open_data(cfg, ctx)


def _scaled(rows: Rows, robots: Sequence[LeRobotRows], ctx: DataCtx) -> Rows:
    """Returns rows whose robot data, `robots`, is scaled by what the context gives, or else by the config's."""
    if ctx.normalisers is not None:
        return _with(rows, ctx.normalisers, f"{ctx.path}: the scaling of the training data")
    where = robots[0].cfg.normalise.file or f"{ctx.path}.normalise"
    return _with(rows, fit_rows(robots, ctx.cache_dir, ctx.path), where)


def _with(rows: Rows, norms: Normalisers, where: str) -> Rows:
    if isinstance(rows, MixedRows):
        return attrs.evolve(rows, parts=tuple(_with(part, norms, where) for part in rows.parts))
    return rows.scaled(norms, where) if isinstance(rows, LeRobotRows) else rows


@texts.register
def _(cfg: LeRobotData, ctx: DataCtx) -> Texts:
    tasks = tuple(read_meta(Path(cfg.path).expanduser()).tasks.values())
    return Texts(key=lambda: key_of(tasks), read=lambda: iter(tasks))


@texts.register
def _(cfg: Mixture, ctx: DataCtx) -> Texts:
    parts = [texts(part.data, _part_ctx(ctx, at)) for at, part in enumerate(cfg.parts)]
    return Texts(
        key=lambda: key_of(*(part.key() for part in parts)),
        read=lambda: itertools.chain.from_iterable(part.read() for part in parts),
    )


def _part_ctx(ctx: DataCtx, at: int) -> DataCtx:
    return attrs.evolve(ctx, seed=hash_keys(ctx.seed, at), path=f"{ctx.path}.parts[{at}].data")
