"""How a run, or a folder from elsewhere, reads chats: what a question is asked by, and what an export says of it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lf.config import from_json
from lf.data.chat_text import media_names, open_template, own_template
from lf.data.config import ChatData, DataConfig, Mixture
from lf.data.hf_tokenizer import Tokenizer
from lf.data.processor_files import FILES, processor_files, read_pictures
from lf.data.question import Question, open_question
from lf.models import hf
from lf.models.hf_folder import parse_config
from lf.models.hf_save import Source
from lf.models.media import media_rules
from lf.models.spec import ModelConfig, type_name
from lf.train.config import Run
from lf.train.reader import Reader
from lf.train.start import Start, newest


def parts(data: DataConfig) -> Iterator[DataConfig]:
    """Yields the sources of data, those of a mixture one by one."""
    if isinstance(data, Mixture):
        for part in data.parts:
            yield from parts(part.data)
    else:
        yield data


def chats_of(data: DataConfig) -> ChatData | None:
    """Returns the chats of data, the first of a mixture; None where there are none."""
    return next((part for part in parts(data) if isinstance(part, ChatData)), None)


def _asked_by(folder: Path, start: Start, tokenizer: Tokenizer) -> ChatData:
    """Returns how questions are put to a model: as its run read chats, or as the files of a folder from elsewhere say.

    Raises ValueError where nothing says it.
    """
    if (folder / "checkpoints").is_dir():
        data = saved_data(newest(folder)[0])
        found = None if data is None else chats_of(data)
        if found is not None:
            return found
    if start.source is None:
        raise ValueError(
            f"{folder} was trained on no chats, so nothing says how it reads images; train it on lf.ChatData"
        )
    pictures = read_pictures({**dict(start.source.files), "config.json": start.source.config}, str(folder))
    if not own_template(tokenizer.files):
        raise ValueError(f"{folder} has no chat template; put the model's there, as chat_template.jinja")
    return ChatData(paths=(str(folder),), pictures=pictures)


def saved_data(reader: Reader) -> DataConfig | None:
    """Returns the data of the run that made a checkpoint; None where an import did."""
    if "run" not in reader.meta:
        return None
    run: Run = from_json(reader.fact("run", str), source=str(reader.path), kind=Run)
    return run.data


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


def chat_files(
    model: ModelConfig, source: Source | None, data: DataConfig, tokenizer: Tokenizer | None
) -> Mapping[str, bytes]:
    """Returns what an export of a model that was trained on chats has besides weights and tokenizer, by name.

    The chat template that the run names, and how images become patches, where the folder that the model came from does
    not say it. Nothing for other models.
    """
    chats, rules = chats_of(data), media_rules(model)
    if chats is None or rules is None or tokenizer is None:
        return {}
    _, template = open_template(chats.template, tokenizer, "data")
    shown = {"chat_template.jinja": template.encode()}
    if source is not None and any(name in FILES for name, _ in source.files):
        return shown if chats.template else {}
    config = parse_config(Path("config.json"), (source.config if source else b"") or hf.config_bytes(model))
    names = media_names(rules.ids, chats.pictures.video, tokenizer, "data")
    # transformers looks for the template of a whole processor in this file alone.
    return {**shown, **processor_files(chats.pictures, config, rules, names, tokenizer)}
