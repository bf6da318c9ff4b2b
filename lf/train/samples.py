"""What `prepare.py` does to the data of a config with chats: `index` states its lengths, `view-samples` draws it."""

import base64
import html
import io
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
import numpy as np
import tyro

from lf.data.hf_tokenizer import Tokenizer
from lf.data.lerobot_commands import Report
from lf.data.media import Fitted, Pixels, pictures_of
from lf.data.media_files import pixels_of
from lf.data.multimodal import ChatRows
from lf.data.source import MixedRows, Rows
from lf.train.config import Run
from lf.train.run import open_reading
from lf.train.start import open_start

_SHOWN = 8
_STYLE = """body{font:15px/1.5 sans-serif;max-width:1200px;margin:2em auto;color:#222}
section{display:flex;gap:1.5em;border-top:1px solid #bbb;padding:1em 0}
pre{flex:2;white-space:pre-wrap;margin:0;color:#777}pre b{background:#cdebc8;color:#114411;font-weight:normal}
pre i{background:#dde4f7;color:#224;font-style:normal}figure{margin:0 0 1em}figure img{max-width:100%;
image-rendering:pixelated;min-width:6em}div{flex:1}figcaption,h2{font-size:13px;color:#555}"""


Place = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CFG")]


@attrs.frozen(kw_only=True)
class Index:
    """Indexes the chats of a config, and states lengths and grids; flags of the config come as for train.py."""

    cfg: Place
    """The config: FILE.py, FILE.py:NAME, or the config.json of a run."""
    json: bool = False
    """Print one JSON object."""


@attrs.frozen(kw_only=True)
class ViewSamples:
    """Writes samples of the chats of a config as an HTML page; flags of the config come as for train.py."""

    cfg: Place
    """The config: FILE.py, FILE.py:NAME, or the config.json of a run."""
    out: Path = Path("samples.html")
    """The page to write."""
    samples: tuple[int, ...] = ()
    """Samples to show, counted from 0 in the order of the files, of each part of a mixture; the first eight by default.
    """
    json: bool = False
    """Print one JSON object."""


def report(command: Index | ViewSamples, run: Run) -> Report:
    """Does what a command says to the data of a run; raises ValueError or OSError where it cannot be done."""
    parts, tokenizer = open_chats(run)
    if isinstance(command, Index):
        found = {where: index_facts(rows) for where, rows in parts.items()}
        if list(found) == [""]:
            return Report(ok=True, text=index_text(found[""]), facts=found[""])
        text = "\n".join(f"{where}: {index_text(facts)}" for where, facts in found.items())
        return Report(ok=True, text=text, facts={"ok": True, "parts": found})
    command.out.write_text(samples_page(parts, tokenizer, command.samples), encoding="utf-8")
    return Report(ok=True, text=str(command.out), facts={"ok": True, "file": str(command.out)})


def open_chats(run: Run) -> tuple[dict[str, ChatRows], Tokenizer]:
    """Returns the rows of a run's chats by their place in a mixture, empty for none, and its tokenizer.

    They are indexed first. Raises ValueError where the run has none.
    """
    model = open_start(run.init, run.model).model
    rows, tokenizer = open_reading(run, model)
    parts = {where: part for where, part in _parts(rows, "") if isinstance(part, ChatRows)}
    if not parts or tokenizer is None:
        raise ValueError(f"data is {type(run.data).__name__} without chats; give a config whose data has ChatData")
    return parts, tokenizer


def _parts(rows: Rows, where: str) -> Iterator[tuple[str, Rows]]:
    if not isinstance(rows, MixedRows):
        yield where, rows
        return
    for at, part in enumerate(rows.parts):
        yield from _parts(part, f"{where}.parts[{at}]" if where else f"parts[{at}]")


def index_facts(rows: ChatRows) -> dict[str, Any]:
    """Returns what an index says: facts of the source, lengths, and the grids of images and videos."""
    entries = [entry for sample in range(len(rows.lengths)) for entry in rows.entries(sample)]
    grids = Counter(grid for entry in entries for grid in rows.fitted(entry).media.grids)
    kinds = Counter(entry.shape.kind for entry in entries)
    quantiles = np.quantile(rows.lengths, [0, 0.5, 0.9, 0.99, 1], method="nearest").tolist()
    facts = rows.describe()
    return {
        "ok": True,
        **facts,
        "images": kinds["image"],
        "videos": kinds["video"],
        "media_tokens": sum(entry.tokens for entry in entries),
        "learnt_tokens": _learnt(rows),
        "lengths": dict(zip(("least", "median", "90%", "99%", "most"), map(int, quantiles), strict=True)),
        "fill": facts["tokens"] / (facts["rows"] * facts["length"]),
        "grids": [{"grid": list(grid), "count": count} for grid, count in grids.most_common()],
    }


def index_text(facts: dict[str, Any], shown: int = 10) -> str:
    """Returns the same for a reader."""
    lengths = ", ".join(f"{name} {value:,}" for name, value in facts["lengths"].items())
    grids = [f"  {' x '.join(map(str, each['grid']))} patches: {each['count']:,}" for each in facts["grids"][:shown]]
    more = len(facts["grids"]) - shown
    return "\n".join(
        [
            f"samples {facts['samples']:,}: dropped {facts['dropped']:,}, shrunk {facts['shrunk']:,}, "
            f"cut {facts['cut']:,}; {facts['documents']:,} on this side of the split",
            f"tokens {facts['tokens']:,}: {facts['media_tokens']:,} of {facts['images']:,} images and "
            f"{facts['videos']:,} videos, {facts['learnt_tokens']:,} learnt",
            f"tokens of a sample: {lengths}",
            f"rows {facts['rows']:,} of {facts['length']:,} tokens, {facts['fill']:.1%} full",
            f"grids (frames x rows x columns), {len(facts['grids']):,} of them",
            *grids,
            *([f"  and {more:,} more; --json has all"] if more > 0 else []),
        ]
    )


def _learnt(rows: ChatRows) -> int:
    ends = zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True)
    # The first token of a sample is nobody's label.
    return sum(int(np.count_nonzero(rows.learnt[first + 1 : first + count])) for first, count in ends)


def samples_page(parts: Mapping[str, ChatRows], tokenizer: Tokenizer, samples: Sequence[int]) -> str:
    """Returns an HTML page of samples of each part: what is learnt is green, tokens of images are folded.

    Pictures stand beside, as the tower gets them. Raises ValueError for a sample that no part has.
    """
    most = max(len(rows.lengths) for rows in parts.values())
    wrong = [sample for sample in samples if not 0 <= sample < most]
    if wrong:
        raise ValueError(f"--samples has {wrong[0]}, and those there are go from 0 to {most - 1}")
    shown = [
        _section(rows, where, tokenizer, sample)
        for where, rows in parts.items()
        for sample in samples or range(_SHOWN)
        if sample < len(rows.lengths)
    ]
    return f"<!doctype html><meta charset=utf-8><title>samples</title><style>{_STYLE}</style>{''.join(shown)}\n"


def _section(rows: ChatRows, where: str, tokenizer: Tokenizer, sample: int) -> str:
    first, count = int(rows.starts[sample]), int(rows.lengths[sample])
    ids = rows.tokens[first : first + count].tolist()
    marks = [
        _mark(token, bool(on), tokenizer) for token, on in zip(ids, rows.learnt[first : first + count], strict=True)
    ]
    text = []
    for (tag, name), group in itertools.groupby(zip(marks, ids, strict=True), key=lambda pair: pair[0]):
        run = [token for _, token in group]
        shown = html.escape(tokenizer.decode(run) if not name or len(run) == 1 else f"{name} × {len(run)}")
        text.append(f"<{tag}>{shown}</{tag}>" if tag else shown)
    title = html.escape(f"{where} {sample}: {rows.origin(sample)}, {count} tokens".strip())
    return f"<h2>{title}</h2><section><pre>{''.join(text)}</pre><div>{''.join(_figures(rows, sample))}</div></section>"


def _mark(token: int, learnt: bool, tokenizer: Tokenizer) -> tuple[str, str]:
    """Returns the tag of a token, and its name where a run of it is folded."""
    name = tokenizer.decode([token]) if token in tokenizer.special.values() else ""
    return ("b" if learnt else "i" if name else "", name)


def _figures(rows: ChatRows, sample: int) -> Iterator[str]:
    for entry in rows.entries(sample):
        fitted = rows.fitted(entry)
        pixels = pixels_of(entry.ref, entry.shape, fitted.frames, rows.decoders)
        pictures = pictures_of(rows.cfg.pictures, fitted, pixels)
        told = f"{Path(entry.ref.path).name}: {entry.shape.height} x {entry.shape.width}, {_grids(fitted)}"
        # An image, and a video's last frame, may be repeated to fill a patch.
        shown = list(dict.fromkeys(_png(picture) for picture in pictures))
        images = "".join(f'<img src="data:image/png;base64,{data}">' for data in shown)
        yield f"<figure>{images}<figcaption>{html.escape(told)}, {entry.tokens} tokens</figcaption></figure>"


def _grids(fitted: Fitted) -> str:
    counted = Counter(fitted.media.grids)
    return ", ".join(f"{count} of {' x '.join(map(str, grid))} patches" for grid, count in counted.items())


def _png(picture_HWC: Pixels) -> str:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(picture_HWC).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()
