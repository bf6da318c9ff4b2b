"""Where samples come from, as data; `open_data` in `data/source.py` opens them."""

import itertools
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
class Pictures:
    """How images and videos become patches; the type says of which family. `data/media.py` has the rules."""

    patch: int = attrs.field(default=16, validator=ge(1))
    """Pixels of a side of a patch."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Subtracted from red, green and blue, of values from 0 to 1."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """What they are divided by after that."""
    video: str = ""
    """Token by which the chat template announces a video; empty is the model's own (`video_token`)."""


@attrs.frozen(kw_only=True)
class Qwen3Pictures(Pictures):
    """Qwen3-VL's: near its own size, in whole blocks of patches. The defaults are those of the published models."""

    merge: int = attrs.field(default=2, validator=ge(1))
    """Rows and columns of patches that make a token."""
    frames: int = attrs.field(default=2, validator=ge(1))
    """Frames of a patch; an image counts as that many alike."""
    min_pixels: int = attrs.field(default=65536, validator=ge(1))
    """Smaller images are enlarged to about so many pixels."""
    max_pixels: int = attrs.field(default=16777216, validator=ge(1))
    """Larger images are reduced to about so many pixels."""
    video_min_pixels: int = attrs.field(default=4096, validator=ge(1))
    """The same of a video, of all its frames together."""
    video_max_pixels: int = attrs.field(default=25165824, validator=ge(1))
    """The same of a video, of all its frames together."""
    fps: float = attrs.field(default=2.0, validator=gt(0.0))
    """Frames of a second of a video that are taken."""
    min_frames: int = attrs.field(default=4, validator=ge(1))
    """Fewest frames of a video that are taken, where it has them."""
    max_frames: int = attrs.field(default=768, validator=ge(1))
    """Most frames of a video that are taken."""

    def __attrs_post_init__(self) -> None:
        for low, high in (("min_pixels", "max_pixels"), ("video_min_pixels", "video_max_pixels")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"pictures.{low} = {getattr(self, low)} is above pictures.{high} = {getattr(self, high)}; lower it"
                )


@attrs.frozen(kw_only=True)
class Qwen25Pictures(Qwen3Pictures):
    """Qwen2.5-VL's: as Qwen3-VL's, but that pixels of a video are counted in one frame, and its tokens are one run."""

    patch: int = attrs.field(default=14, validator=ge(1))
    """Pixels of a side of a patch."""
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    """Subtracted from red, green and blue, of values from 0 to 1."""
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    """What they are divided by after that."""
    min_pixels: int = attrs.field(default=3136, validator=ge(1))
    """Smaller images are enlarged to about so many pixels."""
    max_pixels: int = attrs.field(default=12845056, validator=ge(1))
    """Larger images are reduced to about so many pixels."""
    video_min_pixels: int = attrs.field(default=100352, validator=ge(1))
    """The same of one frame of a video."""
    video_max_pixels: int = attrs.field(default=602112, validator=ge(1))
    """The same of one frame of a video."""


@attrs.frozen(kw_only=True)
class TilePictures(Pictures):
    """InternVL's: the tiles of an image resized to the nearest of their layouts, then the whole as one more tile."""

    patch: int = attrs.field(default=14, validator=ge(1))
    """Pixels of a side of a patch."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Subtracted from red, green and blue, of values from 0 to 1."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """What they are divided by after that."""
    tile: int = attrs.field(default=448, validator=ge(1))
    """Pixels of a side of a tile."""
    min_tiles: int = attrs.field(default=1, validator=ge(1))
    """Fewest tiles of an image."""
    max_tiles: int = attrs.field(default=12, validator=ge(1))
    """Most tiles of an image, the whole not counted."""
    frames: int = attrs.field(default=8, validator=ge(1))
    """Frames of a video, a tile each."""
    start: str = "<img>"
    """Special token before an image."""
    end: str = "</img>"
    """Special token after an image."""
    video: str = "<video>"
    """Special token by which the chat template announces a video."""


@attrs.frozen(kw_only=True)
class AnyresPictures(Pictures):
    """LLaVA-OneVision's: an only image of a sample is its whole and its tiles, one of several a padded square."""

    patch: int = attrs.field(default=14, validator=ge(1))
    """Pixels of a side of a patch."""
    tile: int = attrs.field(default=384, validator=ge(1))
    """Pixels of a side of a tile."""
    pinpoints: tuple[tuple[int, int], ...] = tuple(itertools.product(range(384, 2305, 384), range(384, 2305, 384)))
    """Heights and widths in pixels that an image may be resized to before it is cut into tiles."""
    max_pixels: int = attrs.field(default=0, validator=ge(0))
    """Larger images are reduced to so many pixels first, and so to fewer tiles; 0 reduces none, as published."""
    frames: int = attrs.field(default=32, validator=ge(1))
    """Frames of a video."""


@attrs.frozen(kw_only=True)
class KimiPictures(Pictures):
    """Kimi-K2.5's: reduced to limits of patches, never enlarged, and filled up with black to whole blocks.

    A video is pieces of a few frames, each behind the time of its first one.
    """

    patch: int = attrs.field(default=14, validator=ge(1))
    """Pixels of a side of a patch."""
    merge: int = attrs.field(default=2, validator=ge(1))
    """Rows and columns of patches that make a token."""
    max_patches: int = attrs.field(default=16384, validator=ge(1))
    """Larger images are reduced to about so many patches."""
    side: int = attrs.field(default=512, validator=ge(1))
    """Most patches of a side."""
    frames: int = attrs.field(default=4, validator=ge(1))
    """Frames of a piece of a video, whose features become one picture's."""
    video_max_patches: int = attrs.field(default=4096, validator=ge(1))
    """Larger frames of a video are reduced to about so many patches."""
    fps: float = attrs.field(default=2.0, validator=gt(0.0))
    """Frames of a second of a video that are taken."""
    video: str = "<|kimi_k25_video_placeholder|>"
    """Text by which the chat template announces a video; no token needs to be called so."""


@attrs.frozen(kw_only=True)
class ChatData(DataConfig):
    """Conversations with images and videos, packed whole into rows of one length; what assistants say is learnt.

    `docs/multimodal_data.md` has the layouts of the files.
    """

    paths: tuple[str, ...] = attrs.field(validator=min_len(1))
    """Files or folders; folders are searched for the suffixes below, in sorted order. No file may be there twice."""
    suffixes: tuple[str, ...] = (".jsonl", ".parquet", ".tar")
    """Suffixes of the files that a folder is searched for."""
    exclude: tuple[str, ...] = ()
    """Glob patterns, over the path below the folder, of files to leave out; `*` matches slashes too."""
    pictures: Pictures = Qwen3Pictures()
    """How images and videos become patches."""
    template: str = ""
    """Chat template: a Jinja file, or `chatml`, lf's own; empty takes the tokenizer's."""
    media_root: str = ""
    """Folder of the relative paths of images and videos; empty takes that of the file that names them."""
    seq_len: int = attrs.field(default=4096, validator=ge(2))
    """Tokens of a row."""
    too_long: Literal["fail", "drop", "shrink", "cut"] = "fail"
    """What becomes of a sample of more tokens than a row: an error; left out; its images made smaller until it fits,
    or left out where none can be; or its end cut off, never inside an image."""
    max_pixels: int = attrs.field(default=80_000_000, validator=ge(1))
    """Pixels of an image or of a frame above which it is an error: such a file takes the memory of a machine."""
    part: Literal["all", "train", "held_out"] = "all"
    """Which samples: all of them, or one side of the split by the hash of their messages."""
    held_out: float = attrs.field(default=0.02, validator=and_(ge(0.0), le(1.0)))
    """Share of the samples on the `held_out` side of the split."""


@attrs.frozen(kw_only=True)
class Encoding:
    """How videos and pictures become latents, and captions embeddings."""

    pipeline: str = attrs.field(validator=min_len(1))
    """Folder of a diffusers pipeline, whose `vae`, `text_encoder`, `tokenizer` and, where it has some, `image_encoder`
    and processors encode."""
    sizes: tuple[str, ...] = attrs.field(default=("480x832", "832x480", "640x640"), validator=min_len(1))
    """HEIGHTxWIDTH of the buckets. A medium goes to the one of the nearest shape, and is cut in the middle."""
    frames: tuple[int, ...] = attrs.field(default=(81,), validator=min_len(1))
    """Frames of the buckets of videos, each 4k + 1. A video goes to the most that it has, from its start."""
    fps: float = attrs.field(default=0.0, validator=ge(0.0))
    """Frames a second that are taken of a video; 0 takes every frame."""
    text: int = attrs.field(default=0, validator=ge(0))
    """Most embeddings of a caption: the model's `text`; 0 takes that of the encoder's family."""
    condition: bool = False
    """Whether rows get what Wan I2V reads beside the latents: which frames are given, the first frame's latent and,
    where the pipeline has an `image_encoder` (Wan2.1), that frame's embeddings."""
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
    """Folder of media with a .txt beside each, or a .jsonl of `media`, `caption` and perhaps `references`."""
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
    special: tuple[str, ...] = ()
    """More special tokens, such as those of a chat template; their ids are 1, 2 and so on. That of the end is 0."""
    sample_bytes: int = attrs.field(default=8_000_000, validator=ge(1))
    """Bytes of text that the merges are learnt from, spread evenly over the documents."""
