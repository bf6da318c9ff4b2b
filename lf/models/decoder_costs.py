"""What each part of a decoder holds, keeps, computes and sends on one rank, from its config alone.

The rules follow what megatron-core's layers and lf's own save for the backward and call; the tests count both on real
models. Linear operations and the memory of activations are those of "Reducing Activation Recomputation in Large
Transformer Models" (arXiv:2205.05198), with the parts that lf's kernels save.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from lf.models.layers.rope import rotated_dims
from lf.models.spec import Block, Layout, Load, Message, Weight

if TYPE_CHECKING:
    from lf.models.decoder import DecoderConfig

STATISTIC = 4
"""Bytes of what a norm or a softmax keeps of a row: one float32 number."""
INDEX = 8
"""Bytes of a token id."""


@attrs.frozen(kw_only=True)
class Rank:
    """A rank's part of a micro-batch, and what all parts of the model ask about it."""

    cfg: Any
    """The decoder's config."""
    layout: Layout
    """The degrees of parallelism."""
    load: Load
    """What the rank computes at a time."""

    @property
    def tokens(self) -> int:
        """Tokens between tensor parallel matrices."""
        return self.load.rows * self.load.length // self.layout.cp

    @property
    def shared(self) -> int:
        """Tokens between the layers, where sequence parallel ranks have a part each."""
        return self.tokens // self.layout.tp if self.layout.sp else self.tokens

    @property
    def hidden(self) -> int:
        """Bytes of the residual stream between the layers."""
        return self.shared * self.width

    @property
    def whole(self) -> int:
        """Bytes of the residual stream of all tensor parallel ranks."""
        return self.tokens * self.width

    @property
    def width(self) -> int:
        """Bytes of a token's residual stream."""
        return int(self.cfg.hidden) * self.load.itemsize

    @property
    def wide(self) -> int:
        """Bytes of an element that a norm keeps."""
        return 4 if self.load.cpu else self.load.itemsize

    def again(self, *modules: str) -> bool:
        """Returns whether the backward makes again what belongs to one of some modules."""
        return bool({"full", *modules} & set(self.load.recompute))


def decoder_blocks(cfg: "DecoderConfig", layout: Layout, load: Load) -> tuple[Block, ...]:
    """Returns the blocks of the pipeline stage `layout.pp_rank`; see `lf.models.spec.blocks`."""
    rank = Rank(cfg=cfg, layout=layout, load=load)
    found = []
    for chunk, layers in enumerate(stage_layers(cfg, layout)):
        place = chunk * layout.pp + layout.pp_rank
        first, last = place == 0, place == layout.pp * layout.vpp - 1
        parts = [*([embedding(rank)] if first else []), table(rank), *layer_blocks(rank, layers)]
        parts += [output(rank)] if last else []
        found += [attrs.evolve(block, chunk=chunk) for block in (*parts, *hand_over(rank, first, last))]
    return tuple(found)


def stage_layers(cfg: "DecoderConfig", layout: Layout) -> tuple[range, ...]:
    """Returns the layers of each model chunk of the pipeline stage `layout.pp_rank`."""
    chunks = layout.pp * layout.vpp
    counts = layout.stages or tuple(cfg.layers // chunks + (i < cfg.layers % chunks) for i in range(chunks))
    return tuple(range(sum(counts[:at]), sum(counts[: at + 1])) for at in range(layout.pp_rank, chunks, layout.pp))


def padded_vocab(cfg: "DecoderConfig", tp: int) -> int:
    """Returns the rows of the embedding over all tensor parallel ranks."""
    multiple = math.lcm(cfg.vocab_multiple, tp)
    return -(-cfg.vocab // multiple) * multiple


def vocab_weight(rank: Rank, name: str, *, tied: bool) -> Weight:
    """Returns the embedding or the output layer, with its share of the padded rows."""
    cfg, tp = rank.cfg, rank.layout.tp
    rows = padded_vocab(cfg, tp) // tp
    # Where only some ranks have padding, this one has none.
    return Weight(name=name, size=rows * cfg.hidden, padding=max(0, rows - cfg.vocab) * cfg.hidden, tied=tied)


def embedding(rank: Rank) -> Block:
    """Returns the word embedding."""
    layout, tied = rank.layout, rank.cfg.tied and rank.layout.pp > 1
    messages: tuple[Message, ...] = ()
    if layout.sp:
        messages = (collective("reduce_scatter", "tp", rank.whole), collective("all_gather", "tp", rank.whole))
    elif layout.tp > 1:
        messages = (collective("all_reduce", "tp", rank.whole),)
    ids = rank.tokens * (INDEX + (layout.tp > 1))
    return Block(
        name="embedding",
        weights=(vocab_weight(rank, "embedding.word_embeddings.weight", tied=tied),),
        saved=(("token ids", ids),),
        messages=messages,
    )


def table(rank: Rank) -> Block:
    """Returns the rotary table: cosine and sine of every position, kept once for all layers of a chunk."""
    rotated = rotated_dims(rank.cfg.rope, rank.cfg.attention.head_dim)
    return Block(name="rotary table", saved=(("cosine and sine", 2 * rank.tokens * rotated * rank.load.itemsize),))


def layer_blocks(rank: Rank, layers: Iterable[int]) -> list[Block]:
    """Returns the attention and the feed-forward part of some layers, alike layers together."""
    windowed: dict[bool, tuple[int, ...]] = {}
    for layer in layers:
        key = layer in rank.cfg.attention.window_layers
        windowed[key] = (*windowed.get(key, ()), layer)
    found = [attention(rank, alike, windowed=key) for key, alike in windowed.items()]
    return [*found, mlp(rank, tuple(layers))]


def norm(rank: Rank, name: str) -> Weight:
    """Returns the weight of a norm on the residual stream."""
    return Weight(name=name, size=rank.cfg.hidden, summed=rank.layout.sp)


def norm_saved(rank: Rank, name: str, *, again: bool) -> tuple[tuple[str, int], ...]:
    """Returns what a norm on the residual stream keeps, and the matrix after it of the norm's output."""
    if again:
        return ((f"input of {name}", rank.hidden),)
    kept = rank.shared * (rank.cfg.hidden * rank.wide + STATISTIC)
    return ((f"input of {name}", kept), (f"output of {name}", rank.hidden))


def collective(op: Any, axis: str, size: int, calls: int = 1) -> Message:
    """Returns a message."""
    return Message(op=op, axis=axis, size=size, calls=calls)


def between_matrices(rank: Rank, *, again: bool) -> tuple[Message, ...]:
    """Returns what a column parallel matrix and the row parallel one after it send.

    With sequence parallelism the column parallel one gathers its input, once more in the backward, where it scatters
    the gradient; the row parallel one scatters its output and gathers its gradient. Without it each sums once.
    """
    if rank.layout.tp == 1:
        return ()
    forward = 2 if again else 1
    if not rank.layout.sp:
        return (collective("all_reduce", "tp", rank.whole, forward + 1),)
    return (
        collective("all_gather", "tp", rank.whole, forward + 2),
        collective("reduce_scatter", "tp", rank.whole, forward + 1),
    )


def attention(rank: Rank, layers: tuple[int, ...], *, windowed: bool) -> Block:
    """Returns attention with grouped heads, its norm included."""
    cfg, a, layout = rank.cfg, rank.cfg.attention, rank.layout
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    qkv = (queries + 2 * keys) // layout.tp
    weights = [
        norm(rank, "input_layernorm.weight"),
        Weight(name="self_attention.linear_proj.weight", size=cfg.hidden * queries // layout.tp),
        Weight(name="self_attention.linear_qkv.weight", size=cfg.hidden * qkv),
    ]
    if a.qkv_bias:
        weights.append(Weight(name="self_attention.linear_qkv.bias", size=qkv))
    if a.qk_norm:
        summed = layout.tp > 1
        weights += [Weight(name=f"self_attention.{x}_layernorm.weight", size=a.head_dim, summed=summed) for x in "qk"]
    linear = rank.tokens * cfg.hidden * (qkv + queries // layout.tp)
    scores = rank.tokens * queries // layout.tp * (rank.load.length + 1)
    whole = rank.again()
    return Block(
        name="attention",
        layers=layers,
        weights=tuple(weights),
        saved=attention_saved(rank, windowed=windowed),
        working=layer_working(rank),
        forward=2.0 * (linear + scores),
        again=2.0 * (linear + scores) if whole else 2.0 * scores * rank.again("core_attn"),
        messages=(*between_matrices(rank, again=whole), *context_messages(rank, again=rank.again("core_attn"))),
    )


def attention_saved(rank: Rank, *, windowed: bool) -> tuple[tuple[str, int], ...]:
    """Returns what attention and its norm keep; with full recompute, the input of the layer."""
    if rank.again():
        return (("layer input", rank.hidden),)
    kept = norm_saved(rank, "attention norm", again=rank.again("layernorm"))
    return (*kept, *core_saved(rank, windowed=windowed))


def core_saved(rank: Rank, *, windowed: bool) -> tuple[tuple[str, int], ...]:
    """Returns what is kept from the output of the first projection to the input of the last."""
    a, layout, load = rank.cfg.attention, rank.layout, rank.load
    again, size, cp = rank.again("core_attn"), load.itemsize, layout.cp
    heads, groups = a.heads // layout.tp, a.kv_heads // layout.tp
    queries, keys = rank.tokens * heads * a.head_dim, rank.tokens * groups * a.head_dim
    saved = []
    copied = rank.wide != size
    if a.qk_norm:
        statistics = rank.tokens * (heads + groups) * STATISTIC
        # Where a rank has one group, its queries lie side by side and need no copy.
        inputs = (queries if copied or groups > 1 else 0) + (keys if copied else 0)
        saved.append(("inputs of query and key norm", inputs * rank.wide + statistics))
    if cp == 1 or again or (a.qk_norm and not copied):
        saved.append(("query, key and value", (queries + 2 * keys) * size))
    if cp == 1 or again:
        saved.append(("rotated query and key", (queries + keys) * size))
    elif layout.cp_kind == "gather":
        saved.append(("query, gathered key and value", (queries + 2 * cp * keys) * size))
    else:
        saved.append(("exchanged query, key and value", (queries + 2 * keys) * size))
    if not again:
        saved.append(("softmax statistics", rank.tokens * heads * STATISTIC))
        if load.cpu and (masks := mask_elements(rank, windowed=windowed)):
            saved.append(("attention masks", masks * size))
        if (load.packed and load.cpu) or cp > 1:
            saved.append(("attention by documents", queries * size))
    return (*saved, ("attention output", queries * size))


def mask_elements(rank: Rank, *, windowed: bool) -> int:
    """Returns the elements of the masks that torch's attention keeps on the rank with most of them.

    A window needs a mask, and so do the queries of a piece of a sequence with keys before it.
    """
    layout, load = rank.layout, rank.load
    total = load.rows * load.length
    gathered = layout.cp > 1 and layout.cp_kind == "gather"
    piece = total // (2 * layout.cp)
    most = 0
    for place in range(layout.cp if gathered else 1):
        spans = [(0, total)]
        if gathered:
            spans = [(at * piece, (at + 1) * piece) for at in (place, 2 * layout.cp - 1 - place)]
        found = 0
        for begin in range(0, total, load.length):
            for first, last in spans:
                start, stop = max(first, begin), min(last, begin + load.length)
                if start < stop and (windowed or 1 < stop - start < stop - begin):
                    found += (stop - start) * (stop - begin)
        most = max(most, found)
    return most


def context_messages(rank: Rank, *, again: bool) -> tuple[Message, ...]:
    """Returns what context parallel attention sends: gathered keys and values, or heads exchanged for sequence."""
    a, layout, load = rank.cfg.attention, rank.layout, rank.load
    if layout.cp == 1:
        return ()
    forward = 2 if again else 1
    queries = rank.tokens * a.heads // layout.tp * a.head_dim * load.itemsize
    keys = rank.tokens * a.kv_heads // layout.tp * a.head_dim * load.itemsize
    if layout.cp_kind == "gather":
        whole = keys * layout.cp
        return (collective("all_gather", "cp", whole, 2 * forward), collective("all_reduce", "cp", whole, 2))
    return tuple(collective("all_to_all", "cp", size, 2 * (forward + 1)) for size in (queries, keys))


def mlp(rank: Rank, layers: tuple[int, ...]) -> Block:
    """Returns the gated feed-forward part of a layer, its norm included."""
    cfg, again = rank.cfg, rank.again("mlp")
    width = cfg.mlp.width // rank.layout.tp
    linear = 2.0 * rank.tokens * cfg.hidden * 3 * width
    return Block(
        name="feed-forward",
        layers=layers,
        weights=(
            norm(rank, "pre_mlp_layernorm.weight"),
            Weight(name="mlp.linear_fc1.weight", size=2 * width * cfg.hidden),
            Weight(name="mlp.linear_fc2.weight", size=cfg.hidden * width),
        ),
        saved=mlp_saved(rank),
        working=layer_working(rank),
        forward=linear,
        again=linear if again else 0.0,
        messages=between_matrices(rank, again=again),
    )


def mlp_saved(rank: Rank) -> tuple[tuple[str, int], ...]:
    """Returns what the feed-forward part of a layer and its norm keep."""
    if rank.again():
        return ()
    kept = norm_saved(rank, "feed-forward norm", again=rank.again("layernorm"))
    if rank.again("mlp"):
        return kept
    return (*kept, *gated_saved(rank.tokens, rank.cfg.mlp.width // rank.layout.tp, rank.load.itemsize))


def gated_saved(tokens: int, width: int, size: int) -> tuple[tuple[str, int], ...]:
    """Returns what a gated feed-forward layer keeps between its matrices."""
    return (
        ("gate and up projection", 2 * tokens * width * size),
        ("activated gate", tokens * width * size),
        ("input of down projection", tokens * width * size),
    )


def layer_working(rank: Rank) -> int:
    """Returns the bytes that a layer holds while it runs backward, besides what the forward has kept.

    The gradients inside the feed-forward part and the gathered input; and what is made again, one layer at a time.
    """
    wide = gated_saved(rank.tokens, rank.cfg.mlp.width // rank.layout.tp, rank.load.itemsize)
    return sum(size for _, size in wide) + 2 * rank.whole + max(0, kept_of_layer(rank, ()) - kept_of_layer(rank))


def kept_of_layer(rank: Rank, recompute: tuple[str, ...] | None = None) -> int:
    """Returns the bytes that the forward of one layer keeps, by this or another choice of recompute."""
    if recompute is not None:
        rank = attrs.evolve(rank, load=attrs.evolve(rank.load, recompute=recompute))
    saved = (*attention_saved(rank, windowed=False), *mlp_saved(rank))
    return sum(size for _, size in saved)


def output(rank: Rank) -> Block:
    """Returns the last norm, the output layer and the loss."""
    cfg, layout, size = rank.cfg, rank.layout, rank.load.itemsize
    weights = [norm(rank, "decoder.final_layernorm.weight")]
    if not cfg.tied or layout.pp > 1:
        weights.append(vocab_weight(rank, "output_layer.weight", tied=cfg.tied))
    columns = min(cfg.vocab, padded_vocab(cfg, layout.tp) // layout.tp)
    messages: tuple[Message, ...] = ()
    if layout.tp > 1:
        messages = (collective("all_reduce", "tp", rank.tokens * STATISTIC, 3),)
    if layout.sp:
        messages += (
            collective("all_gather", "tp", rank.whole, 2),
            collective("reduce_scatter", "tp", rank.whole),
        )
    elif layout.tp > 1:
        messages += (collective("all_reduce", "tp", rank.whole),)
    logits = rank.tokens * columns
    return Block(
        name="output layer and loss",
        weights=tuple(weights),
        saved=(
            *norm_saved(rank, "last norm", again=False),
            ("log-probabilities", logits * 4),
            ("labels", rank.tokens * (INDEX + 2)),
        ),
        working=logits * (size + (4 if size < 4 or layout.tp > 1 else 0)),
        forward=2.0 * logits * cfg.hidden,
        messages=messages,
    )


def hand_over(rank: Rank, first: bool, last: bool) -> tuple[Block, ...]:
    """Returns what a chunk sends to the chunk after it, and of gradients to the one before."""
    calls = (not first) + (not last)
    return (Block(name="hand-over", messages=(collective("send", "pp", rank.hidden, calls),)),) if calls else ()
