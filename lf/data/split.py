"""Whether what a run is evaluated on is really held out of what it is trained on."""

from collections.abc import Iterator

from lf.data.config import DataConfig, Mixture, TextData
from lf.data.files import find_files


def check_split(data: DataConfig, held_out: DataConfig | None) -> None:
    """Raises ValueError where text that `held_out` (`eval.data`) holds out of its files may be trained on by `data`.

    Two sources with a file in common split it alike only with the same `held_out`, and hold out nothing where the
    training side takes all of it. Text that is evaluated with `part` "all" or "train" is known to be trained on.
    """
    held = [part for part in _parts(held_out, "eval.data") if part[1].part == "held_out"]
    trained = list(_parts(data, "data")) if held else []
    for there, evaluated in held:
        scored = {file.path.resolve() for file in find_files(evaluated, there)}
        for here, cfg in trained:
            if cfg.part == "train" and cfg.held_out == evaluated.held_out:
                continue
            for file in find_files(cfg, here):
                if file.path.resolve() in scored:
                    raise ValueError(
                        f"{here} has part = {cfg.part!r} and held_out = {cfg.held_out}, and {there} has part = "
                        f"'held_out' and held_out = {evaluated.held_out}, and both read {file.path}: what is held out "
                        f"would be trained on. Set {here}.part to 'train' and give both the same held_out"
                    )


def _parts(cfg: DataConfig | None, path: str) -> Iterator[tuple[str, TextData]]:
    if isinstance(cfg, TextData):
        yield path, cfg
    elif isinstance(cfg, Mixture):
        for at, part in enumerate(cfg.parts):
            yield from _parts(part.data, f"{path}.parts[{at}].data")
