"""What the layers of a decoder hold, keep, compute and send on one rank, from the config alone.

The rules follow what megatron-core's layers and lf's own save for the backward and call; the tests count both on real
models. Linear operations and the memory of activations are those of "Reducing Activation Recomputation in Large
Transformer Models" (arXiv:2205.05198), with the parts that lf's kernels save.
"""

from typing import Any

import attrs

from lf.models.decoder_facts import (
    attention_flops,
    attention_weights,
    kv_heads,
    mlp_weights,
    query_key_width,
)
from lf.models.parts import Attention, Mla
from lf.models.spec import Block, Layout, Load, Message, Weight

STATISTIC = 4
"""Bytes of what a norm or a softmax keeps of a row: one float32 number."""
WIDE = 4
"""Bytes of a float32 number."""
INDEX = 8
"""Bytes of a token id."""

Saved = tuple[tuple[str, int], ...]
"""Bytes that the forward keeps, by name."""


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


def attention(rank: Rank, layers: tuple[int, ...], *, windowed: bool, prefix: str = "") -> Block:
    """Returns the attention of some layers, its norm included; `prefix` goes before the names of its parameters."""
    cfg, a, tp = rank.cfg, rank.cfg.attention, rank.layout.tp
    linear = 2.0 * rank.tokens * attention_weights(a, cfg.hidden) / tp
    scores = 2.0 * rank.tokens * attention_flops(a, rank.load.length) / tp
    whole, core = rank.again(), rank.again("core_attn")
    up = rank.again("mla_up_proj") and isinstance(a, Mla)
    messages = between_matrices(rank, again=whole)
    if isinstance(a, Mla):
        messages = latent_messages(rank, again=up)
    weights = latent_weights(rank) if isinstance(a, Mla) else head_weights(rank)
    return Block(
        name="attention",
        layers=layers,
        weights=tuple(
            attrs.evolve(weight, name=prefix + weight.name)
            for weight in (norm(rank, "input_layernorm.weight"), *weights)
        ),
        saved=attention_saved(rank, windowed=windowed),
        working=layer_working(rank, sparse=False),
        forward=linear + scores,
        again=linear + scores if whole else scores * core,
        messages=(*messages, *norm_messages(rank), *context_messages(rank, again=core)),
    )


def head_weights(rank: Rank) -> tuple[Weight, ...]:
    """Returns the parameters of attention with grouped heads."""
    cfg, a, tp = rank.cfg, rank.cfg.attention, rank.layout.tp
    queries, keys = a.heads * a.head_dim // tp, a.kv_heads * a.head_dim // tp
    weights = [
        Weight(name="self_attention.linear_proj.weight", size=cfg.hidden * queries),
        Weight(name="self_attention.linear_qkv.weight", size=cfg.hidden * (queries + 2 * keys)),
    ]
    if a.qkv_bias:
        weights.append(Weight(name="self_attention.linear_qkv.bias", size=queries + 2 * keys))
    if a.qk_norm:
        each = a.qk_norm_over == "head"
        for name, size in (("q", queries), ("k", keys)):
            name = f"self_attention.{name}_layernorm.weight"
            weights.append(Weight(name=name, size=a.head_dim if each else size, summed=each and tp > 1))
    return tuple(weights)


def latent_weights(rank: Rank) -> tuple[Weight, ...]:
    """Returns the parameters of latent attention: tensor parallel ranks have what is narrow whole."""
    cfg, a, tp, summed = rank.cfg, rank.cfg.attention, rank.layout.tp, rank.layout.sp
    wide = a.heads * query_key_width(a) // tp
    sizes = [
        ("linear_q_down_proj", cfg.hidden * a.q_rank, summed),
        ("q_layernorm", a.q_rank, summed),
        ("linear_q_up_proj", wide * (a.q_rank or cfg.hidden), False),
        ("linear_kv_down_proj", cfg.hidden * (a.kv_rank + a.rope_dim), summed),
        ("kv_layernorm", a.kv_rank, summed),
        ("linear_kv_up_proj", a.heads * (a.nope_dim + a.v_dim) // tp * a.kv_rank, False),
        ("linear_proj", cfg.hidden * a.heads * a.v_dim // tp, False),
    ]
    return tuple(Weight(name=f"self_attention.{n}.weight", size=size, summed=s) for n, size, s in sizes if size)


def latent_messages(rank: Rank, *, again: bool) -> tuple[Message, ...]:
    """Returns what latent attention sends: the narrow vectors are gathered, and the output is scattered."""
    cfg, a, layout = rank.cfg, rank.cfg.attention, rank.layout
    if layout.tp == 1:
        return ()
    whole, forward = rank.again(), 2 if again or rank.again() else 1
    made = [
        collective("reduce_scatter", "tp", rank.whole, 2 if whole else 1),
        collective("all_gather", "tp", rank.whole),
    ]
    for width in (a.q_rank or cfg.hidden, a.kv_rank):
        size = rank.tokens * width * rank.load.itemsize
        made += [collective("all_gather", "tp", size, forward + 1), collective("reduce_scatter", "tp", size)]
    rotated = rank.tokens * a.rope_dim * rank.load.itemsize
    return (*made, collective("all_gather", "tp", rotated, forward), collective("reduce_scatter", "tp", rotated))


def norm_messages(rank: Rank) -> tuple[Message, ...]:
    """Returns what norms over all heads together send: the sum of squares of each token."""
    a = rank.cfg.attention
    if rank.layout.tp == 1 or not (isinstance(a, Attention) and a.qk_norm and a.qk_norm_over == "all"):
        return ()
    return (collective("all_reduce", "tp", rank.tokens * STATISTIC, 2 * (3 if rank.again() else 2)),)


def attention_saved(rank: Rank, *, windowed: bool) -> Saved:
    """Returns what attention and its norm keep; with full recompute, the input of the layer."""
    if rank.again():
        return (("layer input", rank.hidden),)
    kept = norm_saved(rank, "attention norm", again=rank.again("layernorm"))
    latent = isinstance(rank.cfg.attention, Mla)
    before = narrow_saved(rank) if latent else heads_saved(rank)
    return (*kept, *before, *core_saved(rank, windowed=windowed))


def heads_saved(rank: Rank) -> Saved:
    """Returns what is kept of the norms of queries and keys, and of the projection that they are views of."""
    a, tp, size = rank.cfg.attention, rank.layout.tp, rank.load.itemsize
    heads, groups = a.heads // tp, a.kv_heads // tp
    queries, keys = rank.tokens * heads * a.head_dim, rank.tokens * groups * a.head_dim
    saved, copied, viewed = [], rank.wide != size, False
    if a.qk_norm and a.qk_norm_over == "all":
        # The input and the normalised value in float32, before the weight, and two numbers a token.
        saved.append(("query and key norm", 2 * (queries + keys) * WIDE + 4 * rank.tokens * STATISTIC))
    elif a.qk_norm:
        # Where a rank has one group, its queries lie side by side and need no copy.
        inputs = (queries if copied or groups > 1 else 0) + (keys if copied else 0)
        viewed = not copied
        saved.append(("inputs of query and key norm", inputs * rank.wide + rank.tokens * (heads + groups) * STATISTIC))
    if rank.layout.cp == 1 or rank.again("core_attn") or viewed:
        saved.append(("query, key and value", (queries + 2 * keys) * size))
    return tuple(saved)


def narrow_saved(rank: Rank) -> Saved:
    """Returns what latent attention keeps of its narrow vectors: inputs and outputs of their norms."""
    a, size = rank.cfg.attention, rank.load.itemsize
    copied = rank.wide != size
    inputs = rank.shared * (a.q_rank + a.kv_rank + (0 if copied else a.rope_dim)) * rank.wide
    return (("narrow vectors", inputs + rank.shared * ((a.q_rank + a.kv_rank) * size + 2 * STATISTIC)),)


def core_saved(rank: Rank, *, windowed: bool) -> Saved:
    """Returns what is kept from the queries, keys and values to the input of the last projection."""
    a, layout, load = rank.cfg.attention, rank.layout, rank.load
    again, size, cp, latent = rank.again("core_attn"), load.itemsize, layout.cp, isinstance(a, Mla)
    heads, groups = a.heads // layout.tp, kv_heads(a) // layout.tp
    wide = query_key_width(a)
    # torch's fused attention takes one width only.
    values = a.v_dim if latent else wide
    padded = wide if latent and load.cpu and not again else values
    per_head = rank.tokens * size
    queries, keys, output = heads * wide * per_head, groups * wide * per_head, heads * values * per_head
    gathered = cp > 1 and layout.cp_kind == "gather" and not again
    if gathered:
        held = groups * padded * load.rows * load.length * size
        if latent and load.cpu:
            held = groups * padded * keys_seen(rank, masked=False, windowed=False) * size
        saved = [("query, gathered key and value", queries + cp * keys + held)]
    elif latent or (cp > 1 and not again):
        saved = [("query, key and value of all heads", queries + keys + groups * padded * per_head)]
    else:
        saved = [("rotated query and key", queries + keys)]
    if not again:
        saved.append(("softmax statistics", rank.tokens * heads * STATISTIC))
        if load.cpu and (masks := keys_seen(rank, masked=True, windowed=windowed)):
            saved.append(("attention masks", masks * size))
        if (load.cpu and (load.packed or latent)) or cp > 1:
            saved.append(("attention by documents", heads * padded * per_head))
    return (*saved, ("attention output", output))


def keys_seen(rank: Rank, *, masked: bool, windowed: bool) -> int:
    """Returns the keys that torch's attention is given, summed over its calls, or the elements of the masks it keeps.

    There is a call for each document of each piece of a sequence that the rank has. A window needs a mask, and so do
    the queries of a piece with keys before it. The answer is that of the rank with most.
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
                if start < stop and not masked:
                    found += stop - begin
                elif start < stop and (windowed or 1 < stop - start < stop - begin):
                    found += (stop - start) * (stop - begin)
        most = max(most, found)
    return most


def context_messages(rank: Rank, *, again: bool) -> tuple[Message, ...]:
    """Returns what context parallel attention sends: gathered keys and values, or heads exchanged for sequence."""
    a, layout = rank.cfg.attention, rank.layout
    if layout.cp == 1:
        return ()
    forward = 2 if again else 1
    wide = query_key_width(a)
    values = a.v_dim if isinstance(a, Mla) else wide
    each = rank.tokens * rank.load.itemsize // layout.tp
    groups = kv_heads(a)
    if layout.cp_kind == "gather":
        sizes = [each * groups * width * layout.cp for width in (wide, values)]
        return tuple(
            message
            for size in sizes
            for message in (collective("all_gather", "cp", size, forward), collective("all_reduce", "cp", size))
        )
    sizes = [each * n for n in (a.heads * wide, groups * wide, groups * values, a.heads * values)]
    return tuple(collective("all_to_all", "cp", size, forward + 1) for size in sizes)


def feed_forward(rank: Rank, layers: tuple[int, ...], *, sparse: bool, prefix: str = "") -> Block:
    """Returns the feed-forward part of some layers, its norm included: one gated layer, or experts."""
    whole = rank.again()
    repeated = rank.again("moe" if sparse else "mlp")
    linear = 2.0 * rank.tokens / rank.layout.tp * mlp_weights(rank.cfg, layers[0], active=True)
    weights = expert_weights(rank) if sparse else dense_weights(rank)
    messages = expert_messages(rank) if sparse else between_matrices(rank, again=repeated)
    return Block(
        name="experts" if sparse else "feed-forward",
        layers=layers,
        weights=tuple(
            attrs.evolve(weight, name=prefix + weight.name)
            for weight in (norm(rank, "pre_mlp_layernorm.weight"), *weights)
        ),
        saved=() if whole else feed_forward_saved(rank, sparse=sparse),
        working=layer_working(rank, sparse=sparse),
        forward=linear,
        again=linear if repeated else 0.0,
        messages=messages,
    )


def dense_weights(rank: Rank) -> tuple[Weight, ...]:
    """Returns the parameters of a gated feed-forward layer."""
    size = rank.cfg.mlp.width // rank.layout.tp * rank.cfg.hidden
    return (Weight(name="mlp.linear_fc1.weight", size=2 * size), Weight(name="mlp.linear_fc2.weight", size=size))


def expert_weights(rank: Rank) -> tuple[Weight, ...]:
    """Returns the parameters of a router, its experts and the shared expert."""
    e, layout, hidden = rank.cfg.experts, rank.layout, rank.cfg.hidden
    size = e.count // layout.ep * (e.width // layout.etp) * hidden
    weights = [Weight(name="mlp.router.weight", size=e.count * hidden, summed=layout.sp)]
    if e.bias:
        weights.append(Weight(name="mlp.router.expert_bias", size=e.count, itemsize=WIDE, frozen=True))
    weights += [
        Weight(name="mlp.experts.gate_up", size=2 * size, expert=True),
        Weight(name="mlp.experts.down", size=size, expert=True),
    ]
    if e.shared:
        part = e.shared // layout.tp * hidden
        weights += [Weight(name=f"mlp.shared_experts.linear_fc{i}.weight", size=n * part) for i, n in ((1, 2), (2, 1))]
    if e.shared_gate:
        weights.append(Weight(name="mlp.shared_experts.gate_weight", size=hidden, summed=layout.sp))
    return tuple(weights)


def feed_forward_saved(rank: Rank, *, sparse: bool) -> Saved:
    """Returns what the feed-forward part of a layer and its norm keep."""
    again = rank.again("layernorm")
    kept = norm_saved(rank, "feed-forward norm", again=again)
    if sparse:
        kept = kept[:1]
        shared = bool(rank.cfg.experts.shared)
        if not again and (shared or rank.load.itemsize == WIDE or rank.again("moe")):
            kept = (*kept, ("output of feed-forward norm", rank.hidden))
        return kept if rank.again("moe") else (*kept, *routed_saved(rank))
    if rank.again("mlp"):
        return kept
    return (*kept, *gated_saved(rank.tokens, rank.cfg.mlp.width // rank.layout.tp, rank.load.itemsize))


def routed_tokens(rank: Rank) -> int:
    """Returns the tokens that a rank's experts get, with even loads; expert tensor parallel ranks have each others'."""
    return rank.shared * int(rank.cfg.experts.top_k) * rank.layout.etp


def routed_saved(rank: Rank) -> Saved:
    """Returns what router, experts and shared expert keep, with even loads."""
    cfg, e, size = rank.cfg, rank.cfg.experts, rank.load.itemsize
    tokens, width = routed_tokens(rank), e.width // rank.layout.etp
    # Scores and weights of all experts in float32, who was chosen, and where each choice goes.
    router = rank.shared * (14 * e.count + 16 * e.top_k + STATISTIC)
    if size < WIDE:
        router += (rank.shared + e.count) * cfg.hidden * WIDE
    if e.balance != "none":
        router += rank.shared * e.count * WIDE * (2 if e.score == "sigmoid" else 1)
    if e.z_coef:
        router += rank.shared * e.count * WIDE
    inner: Saved = gated_saved(tokens, width, size)
    # Between activation and product stands the weight of the choice.
    weighted: Saved = (("activation before its weight", tokens * (width * size + STATISTIC)),)
    if rank.again("moe_act"):
        inner, weighted = (inner[0], inner[2]), ()
    saved = [("router", router), ("tokens of the experts", tokens * cfg.hidden * size)]
    saved += [(f"experts' {name}", n) for name, n in (*inner, *weighted)]
    if e.shared and not rank.again("shared_experts"):
        shared = gated_saved(rank.tokens, e.shared // rank.layout.tp, size)
        saved += [(f"shared expert's {name}", n) for name, n in shared]
        saved += [("shared expert's output", rank.hidden)] if e.shared_gate else []
    return tuple(saved)


def expert_messages(rank: Rank) -> tuple[Message, ...]:
    """Returns what experts send, with even loads: tokens and their weights to the experts, and outputs back."""
    e, layout = rank.cfg.experts, rank.layout
    forward = 2 if rank.again("moe") else 1
    messages: list[Message] = []
    tokens = routed_tokens(rank)
    if e.dispatch == "allgather":
        group = layout.ep * layout.etp
        if group > 1:
            whole, scores = rank.hidden * group, rank.shared * group * e.count * WIDE
            messages += [
                collective("all_gather", "etp*ep", whole, forward + 1),
                collective("reduce_scatter", "etp*ep", whole, forward + 1),
                collective("all_gather", "etp*ep", scores, forward),
                collective("reduce_scatter", "etp*ep", scores),
                collective("all_gather", "etp*ep", scores // WIDE, forward),
            ]
    else:
        sent, group = tokens // layout.etp, layout.ep * layout.etp
        if group > 1:
            # How many tokens each rank has for each expert.
            messages.append(collective("all_gather", "etp*ep", group * e.count * INDEX, forward))
        if layout.ep > 1:
            messages.append(collective("all_to_all", "ep", sent * rank.width, 2 * (forward + 1)))
            messages.append(collective("all_to_all", "ep", sent * STATISTIC, forward + 1))
        if layout.etp > 1:
            for size, back in ((tokens * rank.width, True), (tokens * STATISTIC, False)):
                gathers, scatters = (forward + 1, forward + 1) if back else (forward, 1)
                messages.append(collective("all_gather", "etp", size, gathers))
                messages.append(collective("reduce_scatter", "etp", size, scatters))
    if e.shared:
        messages += between_matrices(rank, again=rank.again("moe", "shared_experts"))
    return tuple(messages)


def gated_saved(tokens: int, width: int, size: int) -> tuple[tuple[str, int], ...]:
    """Returns what a gated feed-forward layer keeps between its matrices."""
    return (
        ("gate and up projection", 2 * tokens * width * size),
        ("activated gate", tokens * width * size),
        ("input of down projection", tokens * width * size),
    )


def layer_working(rank: Rank, *, sparse: bool) -> int:
    """Returns the bytes that a layer holds while it runs backward, besides what the forward has kept.

    The gradients inside the feed-forward part, less the input of the down projection, which is done by then, and those
    of its input and output; and what is made again, one layer at a time.
    """
    cfg, layout, size = rank.cfg, rank.layout, rank.load.itemsize
    wide = gated_saved(rank.tokens, cfg.mlp.width // layout.tp, size)
    if sparse:
        wide = gated_saved(routed_tokens(rank), cfg.experts.width // layout.etp, size)
    again = kept_of_layer(rank, (), sparse=sparse) - kept_of_layer(rank, rank.load.recompute, sparse=sparse)
    return sum(n for _, n in wide[:2]) + 2 * rank.whole + max(0, again)


def kept_of_layer(rank: Rank, recompute: tuple[str, ...], *, sparse: bool) -> int:
    """Returns the bytes that the forward of one layer keeps with a choice of recompute."""
    rank = attrs.evolve(rank, load=attrs.evolve(rank.load, recompute=recompute))
    rest = () if rank.again() else feed_forward_saved(rank, sparse=sparse)
    return sum(size for _, size in (*attention_saved(rank, windowed=False), *rest))
