"""Where samples come from, as data; `open_data` in `data/source.py` opens them."""

from typing import Literal

import attrs
from attrs.validators import and_, ge, gt, le, min_len


@attrs.frozen(kw_only=True)
class DataConfig:
    """A data source: the type says which kind. A class of your own needs one rule, `@open_data.register`."""


@attrs.frozen(kw_only=True)
class TextData(DataConfig):
    """Documents of text, packed into rows of one length. The end-of-text token follows each; none stands before it."""

    paths: tuple[str, ...] = attrs.field(validator=min_len(1))
    """Files or folders; folders are searched for the suffixes below, in sorted order. No file may be there twice."""
    suffixes: tuple[str, ...] = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
    """Suffixes of the files that a folder is searched for; anything but jsonl and parquet is one document a file."""
    exclude: tuple[str, ...] = ()
    """Glob patterns, over the path below the folder, of files to leave out; `*` matches slashes too."""
    field: str = "text"
    """Key of the text in a `.jsonl` line, or column of a `.parquet` file."""
    seq_len: int = attrs.field(default=1024, validator=ge(2))
    """Tokens of a row."""
    cross_documents: bool = False
    """Whether a token may attend to earlier documents of its row."""
    part: Literal["all", "train", "held_out"] = "all"
    """Which documents: all of them, or one side of the split by the hash of their bytes."""
    held_out: float = attrs.field(default=0.02, validator=and_(ge(0.0), le(1.0)))
    """Share of the documents on the `held_out` side of the split."""


@attrs.frozen(kw_only=True)
class Camera:
    """A camera of a row, and the feature of the dataset that fills it."""

    name: str = attrs.field(validator=min_len(1))
    """What rows call it; datasets that are mixed share these names."""
    key: str = ""
    """Feature of the dataset, of kind video or image; empty for a camera that the dataset lacks: it is masked."""
    seconds: tuple[float, ...] = ()
    """Times of a window, relative to the row's frame; empty gives that one frame, without an axis of time."""


@attrs.frozen(kw_only=True)
class Signal:
    """One more field of a row, as the dataset has it."""

    name: str = attrs.field(validator=min_len(1))
    """What rows call it; the mask of its window is `<name>_is_pad`."""
    key: str = attrs.field(validator=min_len(1))
    """Feature of the dataset, of numbers."""
    seconds: tuple[float, ...] = ()
    """Times of a window, relative to the row's frame; empty gives that one frame, without an axis of time."""


@attrs.frozen(kw_only=True)
class Normalise:
    """How states and actions are scaled before a model sees them (`data/normalise.py` has the formulas)."""

    state: Literal["none", "mean_std", "min_max", "quantile"] = "quantile"
    """Scaling of the state."""
    actions: Literal["none", "mean_std", "min_max", "quantile"] = "quantile"
    """Scaling of the actions."""
    delta: tuple[bool, ...] = ()
    """Which dims of the actions become differences to the state of the row's frame; empty for none."""
    file: str = ""
    """JSON file of normalisers (a checkpoint's, say) that are used as they are, whatever the fields above say of kinds;
    empty computes them from the data."""


@attrs.frozen(kw_only=True)
class Augment:
    """How pictures are changed at random while a policy trains (`data/augment.py`); the defaults change nothing.

    `lf.data.augment.openpi` is what openpi trains Pi0.5 with.
    """

    size: int = attrs.field(default=0, validator=ge(0))
    """Pixels of a side of the square that pictures are fitted to beforehand, as they are, on black: the model's own
    size. 0 takes them as they come."""
    crop: float = attrs.field(default=1.0, validator=and_(gt(0.0), le(1.0)))
    """Share of each side that a window has, which stands anywhere and is resized to the whole."""
    rotate: float = attrs.field(default=0.0, validator=and_(ge(0.0), le(180.0)))
    """Largest angle of a rotation, in degrees, either way."""
    brightness: float = attrs.field(default=0.0, validator=and_(ge(0.0), le(1.0)))
    """How far the factor on all values may be from 1."""
    contrast: float = attrs.field(default=0.0, validator=and_(ge(0.0), le(1.0)))
    """How far the factor on the distance from the picture's mean may be from 1."""
    saturation: float = attrs.field(default=0.0, validator=and_(ge(0.0), le(1.0)))
    """How far the factor on the distance from grey may be from 1."""
    steady: tuple[str, ...] = ()
    """Glob patterns of cameras whose pictures are neither cropped nor rotated: those that move with a hand."""


@attrs.frozen(kw_only=True)
class LeRobotData(DataConfig):
    """A LeRobot dataset (v2.1 or v3.0): one row for each frame, with the chunk of actions that follows it."""

    path: str
    """Folder of the dataset, which has `meta/info.json`."""
    episodes: tuple[int, ...] | None = None
    """Episodes to take, by episode_index; None takes all. Their order does not matter."""
    cameras: tuple[Camera, ...] | None = None
    """The cameras of a row; None takes every camera of the dataset under its own key."""
    state: tuple[str, ...] = ("observation.state",)
    """Features whose dims, one after the other, are the state; empty for rows without one."""
    state_seconds: tuple[float, ...] = ()
    """Times of the window of the state, relative to the row's frame; empty gives one state, without an axis of time."""
    actions: tuple[str, ...] = ("action",)
    """Features whose dims, one after the other, are the actions; empty for rows without them."""
    chunk: int = attrs.field(default=16, validator=ge(1))
    """Actions of a row: those of its own frame and of the next ones."""
    extra: tuple[Signal, ...] = ()
    """More fields of a row."""
    normalise: Normalise = Normalise()
    """How states and actions are scaled."""
    tolerance: float = attrs.field(default=1e-4, validator=gt(0.0))
    """Seconds by which a timestamp may miss its frame, and a time of a window the frame that it means."""
    augment: Augment | None = None
    """How the pictures of training rows are changed at random. Those of held-out data never are, nor what a policy sees
    when it acts."""
    max_prompt: int = attrs.field(default=0, validator=ge(0))
    """Most tokens of a prompt (of what the policy reads of a task) that are allowed; 0 sets no limit."""


@attrs.frozen(kw_only=True)
class Encoding:
    """How videos and pictures become latents, and captions embeddings."""

    pipeline: str = attrs.field(validator=min_len(1))
    """Folder of a diffusers pipeline, whose `vae`, `text_encoder` and `tokenizer` encode."""
    sizes: tuple[str, ...] = attrs.field(default=("480x832", "832x480", "640x640"), validator=min_len(1))
    """HEIGHTxWIDTH of the buckets. A medium goes to the one of the nearest shape, and is cut in the middle."""
    frames: tuple[int, ...] = attrs.field(default=(81,), validator=min_len(1))
    """Frames of the buckets of videos, each 4k + 1. A video goes to the most that it has, from its start."""
    fps: float = attrs.field(default=0.0, validator=ge(0.0))
    """Frames a second that are taken of a video; 0 takes every frame."""
    text: int = attrs.field(default=0, validator=ge(0))
    """Most embeddings of a caption: the model's `text`; 0 takes that of the encoder's family."""
    condition: bool = False
    """Whether rows get what Wan I2V reads beside the latents: which frames are given, and the first frame's latent."""
    enlarge: bool = False
    """Whether media smaller than their bucket are made larger."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What latents and embeddings are kept in."""
    text_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the text encoder computes in; the VAE computes in float32."""
    device: str = "cpu"
    """Torch device that encodes."""


@attrs.frozen(kw_only=True)
class LatentData(DataConfig):
    """Latents of videos and pictures and embeddings of their captions, cached by `prepare.py latents`."""

    path: str = attrs.field(validator=min_len(1))
    """Folder of the cache."""
    pipeline: str = ""
    """Pipeline that must have made the cache, by the hash of its VAE and text encoder; empty takes any."""
    given: int = attrs.field(default=0, validator=ge(0))
    """Frames of the latents of a video that are given, clean and not trained (Wan2.2 TI2V: 1 for I2V)."""
    part: Literal["all", "train", "held_out"] = "all"
    """Which samples: all of them, or one side of the split by the hash of their names."""
    held_out: float = attrs.field(default=0.02, validator=and_(ge(0.0), le(1.0)))
    """Share of the samples on the `held_out` side of the split."""


@attrs.frozen(kw_only=True)
class MediaData(DataConfig):
    """Videos and pictures that are encoded when a row is read: for data that is seen once, or on a device to spare."""

    path: str = attrs.field(validator=min_len(1))
    """Folder of media with a .txt beside each, or a .jsonl of `media` and `caption`."""
    encoding: Encoding
    """How they are encoded."""
    given: int = attrs.field(default=0, validator=ge(0))
    """As in `LatentData`."""


@attrs.frozen(kw_only=True)
class Weighted:
    """One part of a mixture."""

    data: DataConfig
    """The source."""
    weight: float = attrs.field(default=1.0, validator=gt(0.0))
    """Its share of the rows, relative to the other parts."""


@attrs.frozen(kw_only=True)
class Mixture(DataConfig):
    """Rows of several sources, interleaved in fixed proportions."""

    parts: tuple[Weighted, ...] = attrs.field(validator=min_len(1))
    """The sources and their weights."""


@attrs.frozen(kw_only=True)
class TokenizerConfig:
    """A tokenizer: the type says where it comes from."""


@attrs.frozen(kw_only=True)
class HfTokenizer(TokenizerConfig):
    """A Hugging Face tokenizer folder, or a `tokenizer.json`.

    What its own template adds to a text is left out: packed documents, and the prompts of `generate.py`, have no
    begin-of-text token in front (Llama's `<|begin_of_text|>`); the end-of-text token alone parts them. The prompts of
    robot policies do have it, as openpi's and LeRobot's have PaliGemma's.
    """

    path: str
    """The folder or file."""


@attrs.frozen(kw_only=True)
class TrainedBpe(TokenizerConfig):
    """A byte-level BPE tokenizer trained on the run's own text, once, and cached."""

    vocab: int = attrs.field(default=4096, validator=ge(257))
    """Entries of the vocabulary, the end-of-text token included."""
    sample_bytes: int = attrs.field(default=8_000_000, validator=ge(1))
    """Bytes of text that the merges are learnt from, spread evenly over the documents."""
