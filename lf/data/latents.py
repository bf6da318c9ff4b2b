"""Rows of latents: what encodes media, the rows of a cache, and of media that are encoded when they are read."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from lf.data.cache import key_of
from lf.data.clips import (
    Buckets,
    Planned,
    check_buckets,
    find_media,
    parse_sizes,
    plan_media,
    read_frames,
    read_picture,
)
from lf.data.config import Encoding, LatentData, MediaData
from lf.data.encode import (
    Vae,
    digest_of,
    encode_pixels,
    first_frame_condition,
    open_vae,
    scaling,
    stated,
    strides,
)
from lf.data.encode_image import Images, images_digest, open_images
from lf.data.encode_text import (
    Pixels,
    Texts,
    check_caption,
    encode_caption,
    open_texts,
    resize_picture,
    resized_to,
    texts_digest,
)
from lf.data.latent_files import INDEX, PLAN, check_files, open_shard, read_index
from lf.data.outline import outline
from lf.plan.order import permutation

REFERENCE_AREA = 1024 * 1024
"""Pixels, about, of a reference before it becomes a latent, as in diffusers' pipelines."""

_SIZES = ("channels", "condition_channels", "text_dim", "image_dim")
"""Facts that a model must agree with."""
_MAKERS = ("vae", "text_encoder", "image_encoder")
"""Facts that say what made a cache."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@attrs.frozen(kw_only=True, eq=False)
class Encoder:
    """What encodes media."""

    vae: Vae
    """Of latents."""
    texts: Texts
    """Of captions."""
    images: Images | None
    """Of first frames, where they are asked for and the pipeline has one."""
    cfg: Encoding
    """How."""

    @property
    def most(self) -> int:
        """Most embeddings of a caption."""
        return self.cfg.text or self.texts.most

    @property
    def facts(self) -> dict[str, Any]:
        """What latents and embeddings depend on, besides the media."""
        return {
            "vae": self.vae.digest,
            "text_encoder": self.texts.digest,
            "image_encoder": self.images.digest if self.images else "",
            "mean": self.vae.mean.flatten().tolist(),
            "std": self.vae.std.flatten().tolist(),
            "channels": self.vae.channels,
            "condition_channels": self.vae.temporal + self.vae.channels if self.cfg.condition else 0,
            "text_dim": self.texts.width,
            "image_dim": self.images.width if self.images else 0,
            "text": self.most,
            "dtype": self.cfg.dtype,
        }

    def row(self, planned: Planned) -> dict[str, Tensor]:
        """Returns the tensors of a medium, as a cache has them."""
        media, pixels = planned.media, read_frames(planned)
        pictures = [read_picture(path) for path in media.references]
        made = {
            "latents": encode_pixels(self.vae, pixels),
            "text": encode_caption(self.texts, media.name, media.caption, self.most, pictures),
        }
        if self.cfg.condition:
            made["condition"] = first_frame_condition(self.vae, pixels)
        if self.images:
            made["image"] = self.images.run(pixels[0])
        if pictures:
            made["empty"] = encode_caption(self.texts, media.name, self.texts.empty, self.most, pictures)
        for number, picture in enumerate(pictures):
            made[f"references.{number}"] = encode_reference(self.vae, picture)
        for name, tensor in made.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{planned.media.path}: its {name} are not finite; leave it out")
        return {name: tensor.to(_DTYPES[self.cfg.dtype]).contiguous() for name, tensor in made.items()}

    def empty(self) -> Tensor:
        """Returns the embeddings [E, D] of the empty caption; none where those of a row hold its pictures."""
        if self.texts.edit:
            return torch.zeros(0, self.texts.width, dtype=_DTYPES[self.cfg.dtype])
        made = encode_caption(self.texts, "the empty caption", self.texts.empty, self.most)
        return made.to(_DTYPES[self.cfg.dtype]).contiguous()


def encode_reference(vae: Vae, picture_HW3: Pixels) -> Tensor:
    """Returns the latent [C, 1, Y, X] of a picture that an edit starts from."""
    size = resized_to(REFERENCE_AREA, picture_HW3.shape[:2])
    return encode_pixels(vae, resize_picture(picture_HW3, size)[None])


def open_encoder(cfg: Encoding) -> Encoder:
    """Returns what encodes; raises ValueError for what it cannot open, and for buckets that the VAE cannot take."""
    folder = Path(cfg.pipeline).expanduser()
    config = stated(folder / "vae")
    try:
        torch.empty(0, device=cfg.device)
    except (RuntimeError, AssertionError) as error:
        told = str(error).partition("\n")[0]
        raise ValueError(f"device = {cfg.device!r} cannot be used ({told}); give cpu, or one that is here") from error
    check_buckets(_buckets(cfg), *strides(config))
    scaling(config, folder / "vae" / "config.json")
    vae = open_vae(folder / "vae", cfg.device)
    images = open_images(folder, cfg.device) if cfg.condition else None
    return Encoder(vae=vae, texts=open_texts(folder, cfg.device, _DTYPES[cfg.text_dtype]), images=images, cfg=cfg)


def _buckets(cfg: Encoding) -> Buckets:
    return Buckets(sizes=parse_sizes(cfg.sizes), frames=cfg.frames, fps=cfg.fps, enlarge=cfg.enlarge)


def plan(source: Path, encoder: Encoder) -> tuple[Planned, ...]:
    """Returns what is to be encoded, checked before anything is: every medium, its bucket, and its caption's length."""
    planned = plan_media(find_media(source), _buckets(encoder.cfg))
    for one in planned:
        check_planned(encoder.texts, one, encoder.most)
    return planned


def check_planned(texts: Texts, one: Planned, most: int) -> list[int]:
    """Returns the tokens of a medium's caption and references; raises ValueError as `check_caption`."""
    return check_caption(texts, one.media.name, one.media.caption, most, one.references)


@attrs.frozen(kw_only=True, eq=False)
class LatentRows:
    """The rows of a cache, or of a side of its split."""

    rows: tuple[tuple[int, Mapping[str, Any]], ...]
    """Number in the cache, and record, of each row."""
    shards: tuple[Any, ...]
    """The open files."""
    place: tuple[int, ...]
    """File of each row of the whole cache."""
    empty: Tensor
    """[E, D] the empty caption of rows that have none of their own."""
    facts: Mapping[str, Any]
    """What made the cache."""
    given: int
    """Frames that are given."""
    seed: int
    """Of the order."""
    digest: int
    """Hash of the index."""

    def __len__(self) -> int:
        """Returns the rows of one epoch."""
        return len(self.rows)

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        """Returns a row as `lf/models/diffusion/latent.py` describes it; its id is the name of the medium."""
        return self.at(_order(len(self), self.seed, epoch)[index])

    def at(self, index: int) -> dict[str, Any]:
        """Returns a row by its place in the cache, or in its side of the split."""
        number, record = self.rows[index]
        shard = self.shards[self.place[number]]
        tensors = {name: shard.get_tensor(f"{number}.{name}") for name in record["shapes"]}
        return _row(tensors, record["id"], record["caption"], self.empty, self.given)

    def describe(self) -> dict[str, int]:
        """Returns `rows`, `text_length`, `given`, `references`, `encoder`, `content` and the sizes of `_SIZES`."""
        longest = max((record["shapes"]["text"][0] for _, record in self.rows), default=0)
        return {
            "rows": len(self),
            **{name: self.facts[name] for name in _SIZES},
            "text_length": max(longest, len(self.empty)),
            "given": self.given,
            "references": max((len(record["references"]) for _, record in self.rows), default=0),
            "encoder": _number(*(self.facts[name] for name in _MAKERS)),
            "content": self.digest,
        }


@outline.register
def _(rows: LatentRows, epoch: int, index: int) -> dict[str, Any]:
    _, record = rows.rows[_order(len(rows), rows.seed, epoch)[index]]
    sizes = {name: torch.empty(shape, device="meta") for name, shape in record["shapes"].items()}
    return {**_nested(sizes), "id": record["id"]}


def _row(tensors: Mapping[str, Tensor], name: str, caption: str, empty: Tensor, given: int) -> dict[str, Any]:
    given = given if tensors["latents"].shape[1] > 1 else 0
    return {"empty": empty, **_nested(tensors), "given": given, "caption": caption, "id": name}


def _nested(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the tensors of a row with its references in a list."""
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith("references.")}
    return {**kept, "references": [tensors[f"references.{number}"] for number in range(len(tensors) - len(kept))]}


def _number(*values: str) -> int:
    return int(key_of(*values)[:12], 16)


@functools.lru_cache(maxsize=4)
def _order(rows: int, seed: int, epoch: int) -> Any:
    return permutation(rows, seed, epoch)


def open_latents(cfg: LatentData, *, seed: int, cache_dir: Path, where: str = "data") -> LatentRows:
    """Returns the rows of a cache, audited: it is ended and whole, of the encoder that is asked, and has captions.

    The hashes of its files are compared with the index; `cache_dir` keeps them, as `file_digests` says. Raises
    ValueError with the folder, what is wrong and the cure.
    """
    folder = Path(cfg.path).expanduser()
    if not (folder / INDEX).is_file():
        begun = "begun and not ended: run prepare.py latents again, which goes on" if (folder / PLAN).is_file() else ""
        raise ValueError(f"{where}.path: {folder} is {begun or 'no cache of latents: make one by prepare.py latents'}")
    index = read_index(folder)
    facts, records = index["facts"], index["rows"]
    _check_maker(cfg, facts, where)
    check_files(folder, index, cache_dir)
    shards = [open_shard(folder / one["file"]) for one in index["files"]]
    place = [number for number, one in enumerate(index["files"]) for _ in range(one["rows"])]
    _check_records(folder, records, facts, shards, place)
    kept = tuple((n, record) for n, record in enumerate(records) if _on_side(cfg, record["id"]))
    return LatentRows(
        rows=kept,
        shards=tuple(shards),
        place=tuple(place),
        empty=shards[0].get_tensor("empty"),
        facts=facts,
        given=cfg.given,
        seed=seed,
        digest=_number(index["sha256"], cfg.part, str(cfg.held_out)),
    )


def _check_maker(cfg: LatentData, facts: Mapping[str, Any], where: str) -> None:
    if not cfg.pipeline:
        return
    pipeline = Path(cfg.pipeline).expanduser()
    try:
        own = {"vae": digest_of(pipeline / "vae"), "text_encoder": texts_digest(pipeline)}
        if facts["image_encoder"]:
            own["image_encoder"] = images_digest(pipeline)
    except OSError as error:
        raise ValueError(
            f"{where}.pipeline = {cfg.pipeline!r}: {error.filename} cannot be read ({error.strerror}); give the "
            "diffusers pipeline that made the cache, or leave it empty"
        ) from error
    for name, value in own.items():
        if facts[name] != value:
            raise ValueError(
                f"{where}.path: {cfg.path} was made by another {name} than {pipeline / name}; make the cache again "
                f"with this pipeline, or give {where}.pipeline the one that made it"
            )


def _check_records(
    folder: Path,
    records: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    shards: Sequence[Any],
    place: Sequence[int],
) -> None:
    if len(records) != len(place):
        raise ValueError(f"{folder / INDEX} lists {len(records)} rows, and its shards have {len(place)}; make it again")
    names = [frozenset(shard.keys()) for shard in shards]
    for number, record in enumerate(records):
        shapes = record["shapes"]
        if not str(record["caption"]).strip():
            raise ValueError(f"{folder}: {record['id']} has no caption; write one, and make the cache again")
        missing = [name for name in shapes if f"{number}.{name}" not in names[place[number]]]
        if missing or shapes["latents"][0] != facts["channels"] or shapes["text"][1] != facts["text_dim"]:
            raise ValueError(
                f"{folder}: {record['id']} is not as {INDEX} says ({missing or shapes}); make the cache again"
            )


def _on_side(cfg: LatentData, name: str) -> bool:
    if cfg.part == "all":
        return True
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    return (share < cfg.held_out) == (cfg.part == "held_out")


def check_encoders(facts: Sequence[Mapping[str, int]], where: str) -> None:
    """Raises ValueError where parts of a mixture have latents or embeddings of different encoders."""
    found = {fact["encoder"] for fact in facts if "encoder" in fact}
    if len(found) > 1:
        raise ValueError(
            f"{where}.parts were encoded by {len(found)} different VAEs or text encoders, and a model reads those of "
            "one; make the caches with one pipeline"
        )


@attrs.frozen(kw_only=True, eq=False)
class MediaRows:
    """The rows of media that are encoded when they are read."""

    planned: tuple[Planned, ...]
    """What there is."""
    encoder: Encoder
    """What encodes it."""
    empty: Tensor
    """[E, D] the empty caption of rows that have none of their own."""
    given: int
    """Frames that are given."""
    seed: int
    """Of the order."""

    def __len__(self) -> int:
        """Returns the rows of one epoch."""
        return len(self.planned)

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        """Returns a row, equal to that of a cache with the same encoding."""
        one = self.planned[_order(len(self), self.seed, epoch)[index]]
        return _row(self.encoder.row(one), one.media.name, one.media.caption, self.empty, self.given)

    def describe(self) -> dict[str, int]:
        """Returns facts as `LatentRows` does; `content` is of names, captions, buckets and bytes."""
        facts, texts = self.encoder.facts, self.encoder.texts
        rows = [[*one.media.told, *attrs.astuple(one.bucket), one.digest] for one in self.planned]
        tokens = (check_planned(texts, one, self.encoder.most) for one in self.planned)
        return {
            "rows": len(self),
            **{name: facts[name] for name in _SIZES},
            "text_length": max(map(len, tokens)) - texts.dropped,
            "given": self.given,
            "references": max(len(one.references) for one in self.planned),
            "encoder": _number(*(facts[name] for name in _MAKERS)),
            "content": _number(key_of(rows), facts["dtype"]),
        }


def open_media(cfg: MediaData, *, seed: int, where: str = "data") -> MediaRows:
    """Returns rows that are encoded when they are read; every medium and caption is looked at first."""
    try:
        encoder = open_encoder(cfg.encoding)
        planned = plan(Path(cfg.path), encoder)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return MediaRows(planned=planned, encoder=encoder, empty=encoder.empty(), given=cfg.given, seed=seed)
