"""`prepare.py latents`: videos and pictures to a cache of latents."""

import sys
from typing import Annotated

import attrs
import tyro

from lf.data.config import Encoding
from lf.data.latent_files import write_cache
from lf.data.latents import open_encoder, plan
from lf.data.lerobot_commands import Place, Report, run


@attrs.frozen(kw_only=True)
class Latents(Encoding):
    """Encodes videos and pictures with captions into a cache of latents; a killed run goes on where it was."""

    src: Annotated[Place, tyro.conf.arg(metavar="SRC")]
    """Folder of media with a .txt beside each, or a .jsonl of `media`, `caption` and perhaps `references`."""
    dst: Annotated[Place, tyro.conf.arg(metavar="DST")]
    """Folder to write, new, empty or begun."""
    shard_mb: float = attrs.field(default=500.0, validator=attrs.validators.gt(0.0))
    """Megabytes at which a file is closed."""
    json: bool = False
    """Print one JSON object."""


def _progress(rows: int, of: int) -> None:
    sys.stderr.write(f"{rows} of {of} encoded\n")


@run.register
def _(command: Latents) -> Report:
    encoder = open_encoder(command)
    planned = plan(command.src, encoder)
    before = write_cache(
        command.dst,
        planned,
        encoder.facts,
        encoder.empty,
        encoder.row,
        shard_mb=command.shard_mb,
        say=lambda rows: None if command.json else _progress(rows, len(planned)),
    )
    sizes: dict[str, int] = {}
    for one in planned:
        name = "x".join(map(str, attrs.astuple(one.bucket)))
        sizes[name] = sizes.get(name, 0) + 1
    buckets = ", ".join(f"{name} {count}" for name, count in sorted(sizes.items()))
    return Report(
        ok=True,
        text=f"{command.dst} has {len(planned)} rows, {before} of them from before; frames x height x width: {buckets}",
        facts={"ok": True, "cache": str(command.dst), "rows": len(planned), "before": before, "buckets": sizes},
    )
