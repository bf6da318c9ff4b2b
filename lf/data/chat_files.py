"""Reads conversations, and where their images and videos lie, out of jsonl, parquet and WebDataset tar files.

Every fault is a ValueError that names the file and the line, the record or the member.
"""

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from lf.data.chat_text import Item, Message
from lf.data.files import TextFile, checked_text, json_object, path_fault
from lf.data.media_files import Ref

_ROLES = {"human": "user", "gpt": "assistant"}
_KNOWN = ("system", "user", "assistant", "tool")
_MARKS: tuple[tuple[Literal["image", "video"], str], ...] = (("image", "<image>"), ("video", "<video>"))
_UNREAD = ("tools", "functions", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
_OF_MESSAGE = ("name", "tool_call_id")
_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp")
_VIDEOS = ("mp4", "avi", "mkv", "mov", "webm")

Resolve = Callable[[str, Any, int], Ref]
"""Makes a reference of the kind, of what the sample says, and of its place in the sample's list (-1 in a message)."""


@attrs.frozen(kw_only=True)
class Sample:
    """A conversation."""

    file: int
    """Index of its file."""
    line: int
    """Its line, record or first member, counted from 1."""
    where: str
    """File and line, as errors name it."""
    messages: tuple[Message, ...]
    """What is said."""
    media: tuple[Ref, ...]
    """Its images and videos, in the order of the messages."""
    hash: int
    """64-bit hash of its messages."""


def read_samples(files: Sequence[TextFile], media_root: str) -> Iterator[Sample]:
    """Yields the samples of `files` in order."""
    if fault := path_fault(media_root):
        raise ValueError(f"media_root = {media_root!r:.120} {fault}")
    root = Path(media_root).expanduser() if media_root else None
    for at, file in enumerate(files):
        name = file.path.name.lower()
        kind = next((kind for kind in _READERS if name.endswith(kind)), "")
        if not kind:
            raise ValueError(f"{file.path}: chats are read from {', '.join(_READERS)}; convert it, or leave it out")
        number = 0
        for number, where, record, resolve in _READERS[kind](file.path, root or file.path.parent):
            yield _sample(at, number, where, record, resolve)
        if not number:
            raise ValueError(f"{file.path}: the file holds no sample; fill it or leave it out")


_Records = Iterator[tuple[int, str, Mapping[str, Any], Resolve]]


def _of_path(root: Path, where: str) -> Resolve:
    def resolve(kind: str, value: Any, at: int) -> Ref:
        value = value.get("path") if isinstance(value, dict) else value
        if not isinstance(value, str) or not value:
            raise ValueError(f"{where}: an entry of {kind}s is {value!r:.60}; it must be the path of a file")
        if "://" in value and not value.startswith("file://"):
            raise ValueError(f"{where}: {value!r:.120} is no file; fetch it first, and give its path")
        if fault := path_fault(value.removeprefix("file://")):
            raise ValueError(f"{where}: {value!r:.120} {fault}")
        path = (root / Path(value.removeprefix("file://")).expanduser()).absolute()
        return Ref(kind=kind, path=str(path), where=where, key=value)

    return resolve


def _jsonl(path: Path, root: Path) -> _Records:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield number, where, json_object(line, where), _of_path(root, where)


def _parquet(path: Path, root: Path) -> _Records:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f'{path}: reading parquet needs pyarrow; pip install "lf[data]"') from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                for row, record in enumerate(file.read_row_group(group).to_pylist()):
                    number += 1
                    where = f"{path}: record {number}"
                    yield number, where, record, _of_parquet(path, root, where, (group, row), record)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a text after record {number} is not UTF-8 ({error}); mend it") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as parquet: {error}; fetch or write it again") from error


def _of_parquet(path: Path, root: Path, where: str, place: tuple[int, int], record: Mapping[str, Any]) -> Resolve:
    def resolve(kind: str, value: Any, at: int) -> Ref:
        data = value.get("bytes") if isinstance(value, dict) else value
        if at < 0 or not isinstance(data, bytes):
            return _of_path(root, where)(kind, value, at)
        column = f"{kind}s" if record.get(f"{kind}s") is not None else kind
        key = hashlib.blake2b(data, digest_size=8).hexdigest()
        return Ref(kind=kind, path=str(path.absolute()), column=column, place=(*place, at), where=where, key=key)

    return resolve


def _tar(path: Path, root: Path) -> _Records:
    try:
        with tarfile.open(path, "r:") as file:
            samples: dict[str, dict[str, tarfile.TarInfo]] = {}
            for member in file:
                if member.isfile():
                    folder, _, name = member.name.rpartition("/")
                    key, _, kind = name.partition(".")
                    samples.setdefault(f"{folder}/{key}", {})[kind.lower()] = member
            for number, (key, members) in enumerate(samples.items(), 1):
                where = f"{path}: sample {key.removeprefix('/')!r}"
                if "json" not in members:
                    raise ValueError(f"{where} has {sorted(members)} and no json with its messages; add it")
                stream = file.extractfile(members["json"])
                assert stream is not None
                record = json_object(stream.read(), where)
                yield number, where, _with_members(record, members, where), _of_tar(path, where, members)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read as an uncompressed tar ({error}); fetch or write it again") from error


def _with_members(record: Mapping[str, Any], members: Mapping[str, tarfile.TarInfo], where: str) -> Mapping[str, Any]:
    """Returns the record with the sample's media members as its lists, where it names none itself."""
    found = {
        name: sorted(kind for kind in members if kind.rpartition(".")[2] in kinds)
        for name, kinds in (("images", _IMAGES), ("videos", _VIDEOS))
    }
    named = {name for name in found for key in (name, name[:-1]) if record.get(key) is not None}
    placed = set(_placed(record, where))
    unnamed = {
        name: kinds
        for name, kinds in found.items()
        if name not in named and not any(kind in placed or members[kind].name in placed for kind in kinds)
    }
    return {**record, **unnamed}


def _placed(record: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields what the parts of the messages name as their image or video, as written and in small letters."""
    for turn in _turns(record, where):
        content = _content(turn) if isinstance(turn, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in ("image", "video"):
                told = str(_told(part, part["type"]))
                yield told
                yield told.lower()


def _of_tar(path: Path, where: str, members: Mapping[str, tarfile.TarInfo]) -> Resolve:
    def resolve(kind: str, value: Any, at: int) -> Ref:
        name = str(value).lower()
        member = members.get(name) or next((one for one in members.values() if one.name == value), None)
        if member is None:
            raise ValueError(f"{where}: {kind} {value!r:.80} is no member of the sample; it has {sorted(members)}")
        place = (member.offset_data, member.size)
        full = f"{path}: {member.name}"
        return Ref(kind=kind, path=str(path.absolute()), place=place, where=full, key=member.name)

    return resolve


_READERS: dict[str, Callable[[Path, Path], _Records]] = {".jsonl": _jsonl, ".parquet": _parquet, ".tar": _tar}


def question_sample(prompt: str, images: Sequence[str], videos: Sequence[str]) -> Sample:
    """Returns a sample in which a user asks something about files, given as paths.

    `<image>` and `<video>` in the prompt are their places, in order; those of a kind that it does not place come first.
    """
    places = [(mark * len(files), mark) for (_, mark), files in zip(_MARKS, (images, videos), strict=True)]
    first = "".join(marks for marks, mark in places if mark not in prompt)
    turn = {"role": "user", "content": first + prompt}
    record = {"messages": [turn], "images": list(images), "videos": list(videos)}
    where = "the prompt"
    messages, media = _said(record, where, _of_path(Path(), where))
    return Sample(file=0, line=0, where=where, messages=messages, media=media, hash=0)


def _sample(file: int, line: int, where: str, record: Mapping[str, Any], resolve: Resolve) -> Sample:
    messages, media = _said(record, where, resolve)
    if not any(message.role == "assistant" and any(item.text for item in message.items) for message in messages):
        raise ValueError(f"{where}: the assistant says nothing, so there is nothing to learn; leave the sample out")
    said = [[message.role, [[item.kind, item.text] for item in message.items]] for message in messages]
    digest = hashlib.blake2b(json.dumps([said, [ref.key for ref in media]]).encode(), digest_size=8).digest()
    return Sample(file=file, line=line, where=where, messages=messages, media=media, hash=int.from_bytes(digest))


def _said(record: Mapping[str, Any], where: str, resolve: Resolve) -> tuple[tuple[Message, ...], tuple[Ref, ...]]:
    """Returns the messages of a record, and its images and videos in their order."""
    listed: dict[str, list[Ref]] = {}
    for kind, _ in _MARKS:
        value = record.get(f"{kind}s") if record.get(f"{kind}s") is not None else record.get(kind)
        values = value if isinstance(value, list) else [] if value is None else [value]
        listed[kind] = [resolve(kind, one, at) for at, one in enumerate(values)]
    waiting = {kind: iter(refs) for kind, refs in listed.items()}
    media: list[Ref] = []

    def take(kind: str, value: Any) -> None:
        found = next(waiting[kind], None) if value is None else resolve(kind, value, -1)
        if found is None:
            raise ValueError(f"{where}: more {kind}s are placed in the messages than the {len(listed[kind])} listed")
        media.append(found)

    _refuse_unread(record, "the sample", where)
    messages = tuple(_message(one, where, listed, take) for one in _turns(record, where))
    for name, rest in waiting.items():
        if count := sum(1 for _ in rest):
            raise ValueError(
                f"{where}: {count} of {len(listed[name])} {name}s listed have no place in the "
                f"messages; write <{name}> once for each"
            )
    return messages, tuple(media)


def _turns(record: Mapping[str, Any], where: str) -> Sequence[Any]:
    found = next((record[key] for key in ("messages", "conversations") if record.get(key) is not None), None)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise ValueError(f"{where}: its messages are a text that is not JSON ({error}); correct it") from error
    if not isinstance(found, list) or not found:
        raise ValueError(f"{where}: no list of messages; a sample has it as `messages`, it has {sorted(record)}")
    return found


def _refuse_unread(value: Mapping[str, Any], what: str, where: str, keys: Sequence[str] = _UNREAD) -> None:
    for key in keys:
        if value.get(key) not in (None, "", [], {}, "[]", "{}"):
            raise ValueError(
                f"{where}: {what} has {key!r}, which no chat template of lf is shown; write it into the content of a "
                "message as the model is to read it, or take it out"
            )


def _message(value: Any, where: str, listed: Mapping[str, Sequence[Ref]], take: Callable[[str, Any], None]) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a message is a {type(value).__name__}; it must have a role and a content")
    role = value.get("role") if value.get("role") is not None else value.get("from")
    role = _ROLES.get(str(role), str(role))
    if role not in _KNOWN:
        raise ValueError(f"{where}: a message has the role {role!r:.40}; it must be one of {', '.join(_KNOWN)}")
    _refuse_unread(value, f"a message of {role}", where, (*_UNREAD, *_OF_MESSAGE))
    content = _content(value)
    if content is None:
        raise ValueError(f"{where}: a message of {role} has no content, or null; give it a text, which may be empty")
    if isinstance(content, str):
        checked_text(content, where, "content")
        items = tuple(_split(content, [(kind, mark) for kind, mark in _MARKS if listed[kind]]))
    elif isinstance(content, list):
        items = tuple(_item(one, where) for one in content)
    else:
        raise ValueError(f"{where}: a content is a {type(content).__name__}; it must be a text or a list of parts")
    for at, item in enumerate(items):
        if item.kind != "text":
            part = content[at] if isinstance(content, list) else {}
            take(item.kind, _told(part, item.kind))
    return Message(role=role, items=items, plain=isinstance(content, str))


def _content(turn: Mapping[str, Any]) -> Any:
    return turn.get("content") if turn.get("content") is not None else turn.get("value")


def _told(part: Mapping[str, Any], kind: str) -> Any:
    return part.get(kind) if part.get(kind) is not None else part.get("path")


def _split(text: str, marks: Sequence[tuple[Literal["image", "video"], str]]) -> Iterator[Item]:
    while text:
        places = [(text.find(mark), kind, mark) for kind, mark in marks if mark in text]
        if not places:
            break
        at, found, mark = min(places)
        if at:
            yield Item(kind="text", text=text[:at])
        yield Item(kind=found)
        text = text[at + len(mark) :]
    if text:
        yield Item(kind="text", text=text)


def _item(value: Any, where: str) -> Item:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text" and isinstance(value.get("text"), str):
        return Item(kind="text", text=checked_text(value["text"], where, "text"))
    if kind in ("image", "video"):
        return Item(kind=kind)
    raise ValueError(f"{where}: a part of a content is {value!r:.80}; its type must be text, image or video")
