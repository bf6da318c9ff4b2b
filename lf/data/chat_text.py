"""Conversations to tokens by a chat template, with the spans that are learnt known from the rendering itself.

A template never sees what people wrote: each text goes in as a mark, so what stands between the marks afterwards is the
template's own. Only there are special tokens read, so no text can forge one, and what the assistant said is a mark too.
"""

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from lf.data.hf_tokenizer import Tokenizer
from lf.data.media import Fitted

CHATML = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% for item in ([{'type': 'text', 'text': message.content}] if message.content is string else message.content) -%}
{%- if item.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif item.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ item.text }}{%- endif -%}
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
"""A template for tokenizers that have none; the blocks are those of the public ChatML."""

_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")

# Texts are marks while a template runs, so what it makes is short whatever the conversation says.
_MOST_TEXT = 10_000_000
_MOST_TURNS = 1_000_000
# No template can write a name with spaces.
_LEFT, _COUNTED, _JOINED, _MADE = "lf turns left", "lf counted", "lf joined", "lf made"


@attrs.frozen(kw_only=True)
class Item:
    """A part of a message: a text, or an image or a video by its place among the sample's."""

    kind: Literal["text", "image", "video"]
    """What it is."""
    text: str = ""
    """The text."""


@attrs.frozen(kw_only=True)
class Message:
    """What one side says."""

    role: str
    """Who says it; what `assistant` says is learnt."""
    items: tuple[Item, ...]
    """Its parts."""
    plain: bool = True
    """Whether it was written as one string, which some templates treat in another way."""


@attrs.frozen(kw_only=True)
class Piece:
    """A part of a rendered conversation."""

    text: str
    """A text, or the name of a special token."""
    special: bool = False
    """Whether it is a special token."""
    learnt: bool = False
    """Whether the assistant says it."""


@attrs.frozen(kw_only=True, eq=False)
class Encoded:
    """A conversation as tokens."""

    tokens: list[int]
    """Ids."""
    learnt: list[bool]
    """Which of them the assistant says."""
    spans: list[tuple[int, int]]
    """Where each image or video begins and ends, its own special tokens included."""


Template = Callable[[Sequence[Message], bool], str]
"""Renders messages and, where the flag says so, the beginning of what the assistant says next."""


def open_template(path: str, tokenizer: Tokenizer, where: str) -> tuple[Template, str]:
    """Returns the template of a Jinja file, of lf (`chatml`), or of a tokenizer where `path` is empty; and its source.

    It is run in Jinja's sandbox, and may make 10 million characters in a million turns of its loops and calls of its
    macros. Raises ValueError where there is none, or it is no template.
    """
    if path == "chatml":
        source = CHATML
    elif path:
        file = Path(path).expanduser()
        if not file.is_file():
            raise ValueError(f"{where}.template = {path!r} is no file; give a Jinja file, or 'chatml'")
        try:
            source = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}.template = {path!r} is not UTF-8 ({error}); save it so") from error
    else:
        source = own_template(tokenizer.files)
        if not source:
            raise ValueError(
                f"{where}.template is empty and the tokenizer has no chat template; set it to a Jinja file or 'chatml'"
            )
    name = repr(path) if path else "of the tokenizer"
    return functools.partial(_render, _compile(source, name, where), name), source


def own_template(files: Mapping[str, bytes]) -> str:
    """Returns the chat template that a tokenizer has among its files, empty for none."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = json.loads(files[name]).get("chat_template") if name in files else None
        if isinstance(found, list):
            found = next((each["template"] for each in found if each.get("name") == "default"), None)
        if found:
            return str(found)
    return ""


def _compile(source: str, name: str, where: str) -> Any:
    from jinja2 import TemplateError, nodes, pass_context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def fail(text: str) -> str:
        raise TemplateError(text)

    @pass_context
    def counted(context: Any, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            if next(context[_LEFT], None) is None:
                raise TemplateError(f"its loops turn more than {_MOST_TURNS} times")
            yield value

    if _OPEN in source or _CLOSE in source:
        raise ValueError(
            f"{where}.template: the template {name} has the character U+E000 or U+E001, by which lf marks texts; "
            "take it out"
        )

    class Counting(ImmutableSandboxedEnvironment):
        """Counts calls as turns of loops, and what they make together as text of the template."""

        def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
            if next(context[_LEFT], None) is None:
                raise TemplateError(f"its macros and functions are called more than {_MOST_TURNS} times")
            made = super().call(context, called, *args, **kwargs)
            if isinstance(made, str):
                context[_MADE][0] += len(made)
                if context[_MADE][0] > _MOST_TEXT:
                    raise MemoryError(f"its macros and functions make more than {_MOST_TEXT} characters")
            return made

    env = Counting(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    env.filters |= {_COUNTED: counted, _JOINED: _joined}
    env.globals["raise_exception"] = fail
    env.intercepted_binops = frozenset({"+", "*", "**"})
    env.binop_table |= {"+": _plus, "*": _times, "**": _power}
    # The tag marks what the assistant says where transformers renders; here the marks do.
    source = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", source)
    source = re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", source)
    try:
        tree = env.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        for concat in tree.find_all(nodes.Concat):
            parts = nodes.List(concat.nodes, lineno=concat.lineno)
            concat.nodes = [nodes.Filter(parts, _JOINED, [], [], None, None, lineno=concat.lineno)]
        tree.set_environment(env)
        return env.from_string(tree)
    except Exception as error:
        raise ValueError(
            f"{where}.template: {name} cannot be read as a Jinja template ({_told(error)}); correct it"
        ) from error


def _joined(values: Sequence[Any]) -> str:
    texts = [str(value) for value in values]
    if sum(map(len, texts)) > _MOST_TEXT:
        raise MemoryError(f"a text of more than {_MOST_TEXT} characters")
    return "".join(texts)


def _plus(left: Any, right: Any) -> Any:
    if hasattr(left, "__len__") and hasattr(right, "__len__") and len(left) + len(right) > _MOST_TEXT:
        raise MemoryError(f"{len(left)} and {len(right)} parts")
    return left + right


def _times(left: Any, right: Any) -> Any:
    for many, few in ((left, right), (right, left)):
        if isinstance(few, int) and hasattr(many, "__len__") and len(many) * few > _MOST_TEXT:
            raise MemoryError(f"{len(many)} parts, {few} times")
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MOST_TEXT:
        raise MemoryError("a power of too many digits")
    return left**right


def _told(error: Exception) -> str:
    from jinja2 import TemplateError

    return str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"


def _render(template: Any, name: str, messages: Sequence[Message], begin: bool) -> str:
    number = iter(range(sum(len(message.items) for message in messages)))
    shown = []
    for message in messages:
        parts: list[dict[str, str]] = []
        for item in message.items:
            at = next(number)
            mark = f"{_OPEN}{at}{_CLOSE}"
            parts.append({"type": item.kind, **({"text": mark} if item.kind == "text" else {item.kind: "here"})})
        content: Any = parts[0]["text"] if message.plain and len(parts) == 1 and "text" in parts[0] else parts or ""
        shown.append({"role": message.role, "content": content})
    made: list[str] = []
    length = 0
    try:
        left = iter(range(_MOST_TURNS))
        for part in template.generate(messages=shown, add_generation_prompt=begin, **{_LEFT: left, _MADE: [0]}):
            length += len(part)
            if length > _MOST_TEXT:
                raise MemoryError(f"it makes more than {_MOST_TEXT} characters")
            made.append(part)
    except Exception as error:  # A template is a program, so it may raise anything.
        raise ValueError(
            f"the chat template {name} refuses the conversation ({_told(error)}); correct one of the two"
        ) from error
    return "".join(made)


def rendered(
    template: Template, special: Collection[str], messages: Sequence[Message], begin: bool = False
) -> list[Piece]:
    """Returns a conversation as pieces, with `begin` up to where the assistant's next text begins.

    `special` are the texts that are tokens of their own where the template writes them.
    The special token that ends what an assistant says is learnt too. Raises ValueError where the template left a text
    out, gave one twice, or ends an assistant's message without one.
    """
    items = [(message, at, item) for message in messages for at, item in enumerate(message.items)]
    tokens = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
    pieces: list[Piece] = []
    seen: list[int] = []
    ends = False  # Whether an assistant's message waits for the token that ends it.
    for at, part in enumerate(_MARK.split(template(messages, begin))):
        if at % 2:
            if len(part) > 9 or int(part) >= len(items):
                raise ValueError("the chat template writes the character U+E000, by which lf marks texts; take it out")
            message, place, item = items[int(part)]
            if ends and message.role != "assistant":
                raise ValueError("the chat template ends an assistant's message without a special token; add one")
            learnt = message.role == "assistant"
            pieces.append(Piece(text=item.text, learnt=learnt))
            seen.append(int(part))
            ends = learnt and not any(later.kind == "text" for later in message.items[place + 1 :])
            continue
        own = _template_pieces(part, tokens)
        last = next((place for place, piece in enumerate(own) if piece.special), None)
        if ends and last is not None:
            own = [attrs.evolve(piece, learnt=place <= last) for place, piece in enumerate(own)]
            ends = False
        pieces += own
    if ends:
        raise ValueError("the chat template ends an assistant's message without a special token; add one")
    wanted = [at for at, (_, _, item) in enumerate(items) if item.kind == "text"]
    if seen != wanted:
        raise ValueError(
            f"the chat template shows texts {seen} of the {len(wanted)} of the conversation; it must show each once"
        )
    return pieces


def question_pieces(
    template: Template, special: Collection[str], messages: Sequence[Message]
) -> tuple[list[Piece], str]:
    """Returns messages up to where the answer begins, and the special token that ends one. Raises as `rendered` does.

    Raises ValueError too where the template begins no answer.
    """
    asked = rendered(template, special, messages, begin=True)
    if asked == rendered(template, special, messages):
        raise ValueError(
            "the chat template begins no answer: it must write what stands before the assistant's text where "
            "add_generation_prompt is true; add that to it"
        )
    answer = Message(role="assistant", items=(Item(kind="text", text="."),))
    told = rendered(template, special, [*messages, answer])
    return asked, next(piece.text for piece in told if piece.special and piece.learnt)


def _template_pieces(text: str, tokens: re.Pattern[str]) -> list[Piece]:
    made, at = [], 0
    for found in tokens.finditer(text):
        made += [Piece(text=text[at : found.start()])] if found.start() > at else []
        made.append(Piece(text=found[0], special=True))
        at = found.end()
    return made + ([Piece(text=text[at:])] if at < len(text) else [])


@attrs.frozen(kw_only=True)
class Tokens:
    """The special tokens of images and videos, by name."""

    image: str
    """Stands where an image's features go; announces an image in a template."""
    video: str
    """Stands where a video's features go."""
    announce: str
    """Announces a video in a template."""


def media_names(ids: tuple[int, int], announce: str, tokenizer: Tokenizer, where: str) -> Tokens:
    """Returns the names of the model's tokens `ids`; raises ValueError where the tokenizer has no such special ones."""
    names = {at: name for name, at in tokenizer.special.items()}
    for kind, at in zip(("image", "video"), ids, strict=True):
        if at not in names:
            shown = dict(sorted(tokenizer.special.items(), key=lambda pair: pair[1])[:12])
            raise ValueError(
                f"{where}: model.{kind}_token = {at} is no special token of the tokenizer, which has {shown}; "
                "set it to the id of one, or take the model's own tokenizer"
            )
    return Tokens(image=names[ids[0]], video=names[ids[1]], announce=announce or names[ids[1]])


def encode(pieces: Sequence[Piece], fitted: Sequence[Fitted], tokenizer: Tokenizer, names: Tokens) -> Encoded:
    """Returns a rendered conversation as tokens, each image and video in place of the token that announces it.

    Text is tokenised in runs that end at special tokens and where the
    learnt parts begin and end, as generation meets it. Raises ValueError where images and announcements differ.
    """
    opened: list[tuple[Piece, int]] = []  # Pieces, and the item they are of, or -1.
    left = list(range(len(fitted)))
    at = 0
    while at < len(pieces):
        piece = pieces[at]
        at += 1
        kinds = [kind for kind, name in (("image", names.image), ("video", names.announce)) if piece.text == name]
        if not piece.special or not kinds:
            opened.append((piece, -1))
            continue
        place = next((i for i in left if fitted[i].media.kind in kinds), None)
        if place is None:
            raise ValueError(f"the chat template announces more {piece.text} than the sample has")
        left.remove(place)
        item = fitted[place]
        before, after = item.around
        if before and opened and opened[-1][0].text == before and at < len(pieces) and pieces[at].text == after:
            opened.pop()
            at += 1
        for kind, what in item.pieces:
            name = (names.image if item.media.kind == "image" else names.video) if kind == "media" else str(what)
            opened += [(Piece(text=name, special=kind != "text"), place)] * (int(what) if kind == "media" else 1)
    if left:
        raise ValueError(f"{len(left)} images or videos of the sample are not announced by the chat template; it must")
    return _tokens(opened, len(fitted), tokenizer)


def _tokens(opened: Sequence[tuple[Piece, int]], items: int, tokenizer: Tokenizer) -> Encoded:
    runs: list[tuple[Piece, int]] = []
    for piece, item in opened:
        if runs and not piece.special and not runs[-1][0].special and runs[-1][0].learnt == piece.learnt:
            before = runs.pop()
            runs.append((attrs.evolve(piece, text=before[0].text + piece.text), max(before[1], item)))
        elif piece.text:
            runs.append((piece, item))
    plain = [piece.text for piece, _ in runs if not piece.special]
    texts = iter(tokenizer.encode_batch(plain) if plain else [])
    tokens: list[int] = []
    learnt: list[bool] = []
    spans: dict[int, tuple[int, int]] = {}
    for piece, item in runs:
        if piece.special and piece.text not in tokenizer.special:
            raise ValueError(f"{piece.text!r} is no special token of the tokenizer; it must be for these pictures")
        made = [tokenizer.special[piece.text]] if piece.special else next(texts)
        if item >= 0:
            spans[item] = (min(spans.get(item, (len(tokens), 0))[0], len(tokens)), len(tokens) + len(made))
        tokens += made
        learnt += [piece.learnt] * len(made)
    return Encoded(tokens=tokens, learnt=learnt, spans=[spans[item] for item in range(items)])
