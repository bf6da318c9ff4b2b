"""What each part of a decoder holds, keeps, computes and sends on one rank, from its config alone."""

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs

from lf.models.decoder_facts import is_sparse, mtp_depth, padded_vocab, rope_width
from lf.models.layer_costs import (
    INDEX,
    STATISTIC,
    WIDE,
    Rank,
    attention,
    collective,
    feed_forward,
    norm,
    norm_saved,
)
from lf.models.layers.rope import rotated_dims
from lf.models.spec import Block, Layout, Load, Message, Weight

if TYPE_CHECKING:
    from lf.models.decoder import DecoderConfig

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def decoder_blocks(cfg: "DecoderConfig", layout: Layout, load: Load) -> tuple[Block, ...]:
    """Returns the blocks of the pipeline stage `layout.pp_rank`; see `lf.models.spec.blocks`."""
    rank = Rank(cfg=cfg, layout=layout, load=load)
    found = []
    for chunk, layers in enumerate(stage_layers(cfg, layout)):
        place = chunk * layout.pp + layout.pp_rank
        first, last = place == 0, place == layout.pp * layout.vpp - 1
        parts = [*([embedding(rank)] if first else []), table(rank), *layer_blocks(rank, layers)]
        parts += [output(rank), *further_heads(rank)] if last else []
        found += [attrs.evolve(block, chunk=chunk) for block in (*parts, *hand_over(rank, first, last))]
    return tuple(found)


def stage_layers(cfg: "DecoderConfig", layout: Layout) -> tuple[range, ...]:
    """Returns the layers of each model chunk of the pipeline stage `layout.pp_rank`."""
    chunks = layout.pp * layout.vpp
    counts = layout.stages or tuple(cfg.layers // chunks + (i < cfg.layers % chunks) for i in range(chunks))
    ends = (0, *itertools.accumulate(counts))
    return tuple(range(ends[at], ends[at + 1]) for at in range(layout.pp_rank, chunks, layout.pp))


def vocab_weight(rank: Rank, name: str) -> Weight:
    """Returns the embedding or the output layer, with its share of the padded rows."""
    cfg, tp = rank.cfg, rank.layout.tp
    shared = cfg.tied if name == OUTPUT else cfg.tied or mtp_depth(cfg) > 0
    tied = shared and rank.layout.pp > 1
    rows = padded_vocab(cfg, tp) // tp
    # Where only some ranks have padding, this one has none.
    return Weight(name=name, size=rows * cfg.hidden, padding=max(0, rows - cfg.vocab) * cfg.hidden, tied=tied)


def embedding(rank: Rank) -> Block:
    """Returns the word embedding."""
    return Block(
        name="embedding",
        weights=(vocab_weight(rank, EMBEDDING),),
        saved=(("token ids", ids(rank)),),
        messages=embedding_messages(rank),
    )


def ids(rank: Rank) -> int:
    """Returns the bytes that the embedding keeps: token ids, and with tensor parallel ranks which are their own."""
    return rank.tokens * (INDEX + (rank.layout.tp > 1))


def embedding_messages(rank: Rank) -> tuple[Message, ...]:
    """Returns what the embedding sends."""
    if rank.layout.sp:
        return (collective("reduce_scatter", "tp", rank.whole), collective("all_gather", "tp", rank.whole))
    return (collective("all_reduce", "tp", rank.whole),) if rank.layout.tp > 1 else ()


def table(rank: Rank) -> Block:
    """Returns the rotary table: cosine and sine of every position, kept once for all layers of a chunk."""
    rotated = rotated_dims(rank.cfg.rope, rope_width(rank.cfg.attention))
    return Block(name="rotary table", saved=(("cosine and sine", 2 * rank.tokens * rotated * rank.load.itemsize),))


def layer_blocks(rank: Rank, layers: Iterable[int], prefix: str = "") -> list[Block]:
    """Returns the attention and the feed-forward part of some layers, alike layers together."""
    windowed: dict[bool, list[int]] = {}
    sparse: dict[bool, list[int]] = {}
    windows = frozenset(getattr(rank.cfg.attention, "window_layers", ()))
    for layer in layers:
        windowed.setdefault(layer in windows, []).append(layer)
        sparse.setdefault(is_sparse(rank.cfg, layer), []).append(layer)
    found = [attention(rank, tuple(alike), windowed=key, prefix=prefix) for key, alike in windowed.items()]
    return [*found, *(feed_forward(rank, tuple(alike), sparse=key, prefix=prefix) for key, alike in sparse.items())]


def output(rank: Rank) -> Block:
    """Returns the last norm, the output layer and the loss."""
    cfg, layout = rank.cfg, rank.layout
    weights = [norm(rank, "decoder.final_layernorm.weight")]
    if not cfg.tied or layout.pp > 1:
        weights.append(vocab_weight(rank, OUTPUT))
    if mtp_depth(cfg) and layout.pp > 1 and not cfg.tied:
        weights.append(vocab_weight(rank, EMBEDDING))
    block = Block(
        name="output layer and loss",
        weights=tuple(weights),
        saved=norm_saved(rank, "last norm", again=False),
    )
    return with_loss(rank, block)


def with_loss(rank: Rank, block: Block) -> Block:
    """Returns a block with what the output layer and the loss after it keep, compute and send."""
    cfg, layout, size = rank.cfg, rank.layout, rank.load.itemsize
    columns = min(cfg.vocab, padded_vocab(cfg, layout.tp) // layout.tp)
    logits = rank.tokens * columns
    messages: tuple[Message, ...] = ()
    if layout.tp > 1:
        messages = (collective("all_reduce", "tp", rank.tokens * STATISTIC, 3),)
    if layout.sp:
        messages += (collective("all_gather", "tp", rank.whole, 2), collective("reduce_scatter", "tp", rank.whole))
    elif layout.tp > 1:
        messages += (collective("all_reduce", "tp", rank.whole),)
    return attrs.evolve(
        block,
        saved=(*block.saved, ("log-probabilities", logits * WIDE), ("labels", rank.tokens * (INDEX + 2))),
        working=max(block.working, logits * (size + (WIDE if size < WIDE or layout.tp > 1 else 0))),
        forward=block.forward + 2.0 * logits * cfg.hidden,
        messages=(*block.messages, *messages),
    )


def further_heads(rank: Rank) -> list[Block]:
    """Returns the heads that predict further tokens: each joins, runs a layer, and has a loss through the output layer.

    With full recompute a head keeps the embedding that it joins and its output.
    """
    cfg, again = rank.cfg, rank.again()
    found: list[Block] = []
    for head in range(mtp_depth(cfg)):
        place = f"mtp.layers.{head}."
        # In full precision the first head's norm keeps the very states that the output layer keeps.
        norms = cfg.hidden * rank.wide * (2 if head or rank.wide != rank.load.itemsize else 1) + 2 * STATISTIC
        joined = (("embedding and states", rank.shared * norms), ("joined states", 2 * rank.hidden))
        last = norm_saved(rank, "head norm", again=False)
        linear = 2.0 * rank.shared * 2 * cfg.hidden * cfg.hidden
        start = Block(
            name=f"further head {head + 1}",
            weights=(
                *(norm(rank, f"{place}{name}.weight") for name in ("enorm", "hnorm", "final_layernorm")),
                Weight(name=f"{place}eh_proj.weight", size=2 * cfg.hidden * cfg.hidden, summed=rank.layout.sp),
            ),
            saved=(
                ("token ids", ids(rank)),
                *((("joined embedding", rank.hidden), last[1]) if again else (*joined, *last)),
            ),
            forward=linear,
            again=linear if again else 0.0,
            messages=embedding_messages(rank),
        )
        layers = layer_blocks(rank, (cfg.layers + head,), prefix=f"{place}transformer_layer.")
        found.append(with_loss(rank, joined_blocks(start, layers, saved=not again)))
    return found


def joined_blocks(start: Block, others: Sequence[Block], *, saved: bool) -> Block:
    """Returns one block that is all of some; what the others keep counts where `saved` says so."""
    kept = tuple((f"{block.name}: {name}", size) for block in others for name, size in block.saved)
    return attrs.evolve(
        start,
        weights=(*start.weights, *(weight for block in others for weight in block.weights)),
        saved=(*start.saved, *(kept if saved else ())),
        working=max(block.working for block in (start, *others)),
        forward=sum(block.forward for block in (start, *others)),
        again=sum(block.again for block in (start, *others)),
        messages=(*start.messages, *(message for block in others for message in block.messages)),
    )


def hand_over(rank: Rank, first: bool, last: bool) -> tuple[Block, ...]:
    """Returns what a chunk sends to the chunk after it, and of gradients to the one before."""
    calls = (not first) + (not last)
    return (Block(name="hand-over", messages=(collective("send", "pp", rank.hidden, calls),)),) if calls else ()
