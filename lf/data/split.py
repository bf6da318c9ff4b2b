"""Whether what a run is evaluated on is really held out of what it is trained on."""

from collections.abc import Iterator
from pathlib import Path

from lf.data.config import ChatData, DataConfig, LatentData, LeRobotData, Mixture, TextData
from lf.data.files import find_files

_SHOWN = 5


def check_split(data: DataConfig, held_out: DataConfig | None) -> None:
    """Raises ValueError where text that `held_out` (`eval.data`) holds out of its files may be trained on by `data`.

    Two sources with a file in common split it alike only with the same `held_out`, and hold out nothing where the
    training side takes all of it. Text that is evaluated with `part` "all" or "train" is known to be trained on. Chats
    are as text.

    So it is with episodes of robot data that `held_out` names while `data` takes some of them, but not just the same
    ones. A whole dataset that is evaluated (`episodes` None) is known to be trained on.
    """
    _check_episodes(data, held_out)
    _check_latents(data, held_out)
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


def _check_episodes(data: DataConfig, held_out: DataConfig | None) -> None:
    for there, evaluated in _robots(held_out, "eval.data"):
        for here, cfg in _robots(data, "data"):
            if evaluated.episodes is None or _folder(cfg) != _folder(evaluated):
                continue
            named = set(evaluated.episodes)
            both = sorted(named if cfg.episodes is None else named & set(cfg.episodes))
            if both and (cfg.episodes is None or named != set(cfg.episodes)):
                taken = "None, all of them" if cfg.episodes is None else f"some of them, {both[:_SHOWN]}, too"
                raise ValueError(
                    f"{there}.episodes names {len(named)} of {evaluated.path}, and {here}.episodes is {taken}: what is "
                    f"held out would be trained on. Leave {both[:_SHOWN]} out of {here}.episodes, or evaluate others"
                )


def _check_latents(data: DataConfig, held_out: DataConfig | None) -> None:
    """The same of cached latents."""
    for there, evaluated in _caches(held_out, "eval.data"):
        for here, cfg in _caches(data, "data"):
            same = _folder(cfg) == _folder(evaluated) and evaluated.part == "held_out"
            if same and (cfg.part != "train" or cfg.held_out != evaluated.held_out):
                raise ValueError(
                    f"{there} holds out {evaluated.held_out} of {evaluated.path}, and {here} has part = {cfg.part!r} "
                    f"and held_out = {cfg.held_out}: what is held out would be trained on. Set {here}.part to 'train' "
                    "and give both the same held_out"
                )


def _caches(cfg: DataConfig | None, path: str) -> Iterator[tuple[str, LatentData]]:
    if isinstance(cfg, LatentData):
        yield path, cfg
    elif isinstance(cfg, Mixture):
        for at, part in enumerate(cfg.parts):
            yield from _caches(part.data, f"{path}.parts[{at}].data")


def _folder(cfg: LeRobotData | LatentData) -> Path:
    return Path(cfg.path).expanduser().resolve()


def _robots(cfg: DataConfig | None, path: str) -> Iterator[tuple[str, LeRobotData]]:
    if isinstance(cfg, LeRobotData):
        yield path, cfg
    elif isinstance(cfg, Mixture):
        for at, part in enumerate(cfg.parts):
            yield from _robots(part.data, f"{path}.parts[{at}].data")


def _parts(cfg: DataConfig | None, path: str) -> Iterator[tuple[str, TextData | ChatData]]:
    if isinstance(cfg, TextData | ChatData):
        yield path, cfg
    elif isinstance(cfg, Mixture):
        for at, part in enumerate(cfg.parts):
            yield from _parts(part.data, f"{path}.parts[{at}].data")
