"""How a run, or a folder from elsewhere, reads chats: what a question is asked by, and what an export says of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from lf.config import from_json
from lf.data.chat_text import media_names, open_template, own_template
from lf.data.config import ChatData, DataConfig, Mixture, Pictures
from lf.data.hf_tokenizer import Tokenizer
from lf.data.processor_files import FILES, fields_of, processor_files, read_pictures
from lf.data.question import Question, open_question
from lf.models import hf
from lf.models.hf_folder import parse_config
from lf.models.hf_save import Source
from lf.models.media import media_rules
from lf.models.spec import ModelConfig, has_rule, type_name
from lf.train.config import Run
from lf.train.start import Start, newest


def _chats_of(data: DataConfig) -> ChatData | None:
    """Returns the chats of data, the first of a mixture; None where there are none."""
    if isinstance(data, Mixture):
        return next((found for part in data.parts if (found := _chats_of(part.data)) is not None), None)
    return data if isinstance(data, ChatData) else None


def _asked_by(folder: Path, start: Start, tokenizer: Tokenizer) -> ChatData:
    """Returns how questions are put to a model: as its run read chats, or as the files of a folder from elsewhere say.

    Raises ValueError where nothing says it.
    """
    if (folder / "checkpoints").is_dir():
        reader, _ = newest(folder)
        run = from_json(reader.fact("run", str), source=str(reader.path), kind=Run) if "run" in reader.meta else None
        found = None if run is None else _chats_of(run.data)
        if found is not None:
            # A run folder keeps the template that it was trained by, wherever its own file may be now.
            return attrs.evolve(found, template="") if own_template(tokenizer.files) else found
    if start.source is None:
        raise ValueError(
            f"{folder} was trained on no chats, so nothing says how it reads images; train it on lf.ChatData"
        )
    pictures = read_pictures({**dict(start.source.files), "config.json": start.source.config}, str(folder))
    if not own_template(tokenizer.files):
        raise ValueError(f"{folder} has no chat template; put the model's there, as chat_template.jinja")
    return ChatData(paths=(str(folder),), pictures=pictures)


def ask(
    folder: Path, start: Start, tokenizer: Tokenizer, prompt: str, images: Sequence[Path], videos: Sequence[Path]
) -> Question:
    """Returns a question about files to the model of a folder.

    Raises ValueError, with the file, where one cannot be read, and where the model takes none.
    """
    rules = media_rules(start.model)
    if rules is None:
        raise ValueError(
            f"{folder} holds {type_name(start.model)}, which takes no images or videos; ask it about text alone, or "
            "take a vision-language model"
        )
    cfg = _asked_by(folder, start, tokenizer)
    return open_question(
        cfg,
        tokenizer,
        rules,
        prompt=prompt,
        images=[str(path) for path in images],
        videos=[str(path) for path in videos],
        where=str(folder),
    )


def files_beside(
    model: ModelConfig, source: Source | None, data: DataConfig, tokenizer: Tokenizer
) -> Mapping[str, bytes]:
    """Returns what stands beside the tokenizer of a model that is trained on chats, by name.

    The chat template that the run names, and how images become patches, where the folder that the model came from does
    not say the same. Nothing for other models.
    """
    chats, rules = _chats_of(data), media_rules(model)
    if chats is None or rules is None:
        return {}
    _, template = open_template(chats.template, tokenizer, "data")
    shown = {"chat_template.jinja": template.encode()}
    if _says(source, chats.pictures) or not has_rule(fields_of, chats.pictures):
        return shown if chats.template else {}
    config = parse_config(Path("config.json"), (source.config if source else b"") or hf.config_bytes(model))
    names = media_names(rules.ids, chats.pictures.video, tokenizer, "data")
    # transformers looks for the template of a whole processor in this file alone.
    return {**shown, **processor_files(chats.pictures, config, rules, names, tokenizer)}


def _says(source: Source | None, pictures: Pictures) -> bool:
    """Returns whether the folder that a model came from says that images become patches in this way."""
    if source is None or not any(name in FILES for name, _ in source.files):
        return False
    try:
        found = read_pictures({**dict(source.files), "config.json": source.config}, "the source")
    except ValueError:
        return False  # It says something that lf does not do, and so not what this run does.
    return attrs.evolve(found, video=pictures.video) == pictures
