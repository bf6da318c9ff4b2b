"""Records what the whole processors of transformers make of an image and a video: it needs torchvision.

Run as `python -m tests.golden.record_processors`; `processors.npz` is the result. Every seventh number of a patch is
kept.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from lf.data.config import Pictures
from lf.data.media import Count, Shape, fit, patches_of
from lf.models import hf
from lf.models.media import media_tokens

FILE = Path(__file__).parent / "processors.npz"
SIZE, FRAMES, FPS = (37, 50), 16, 3.0
PROMPT = "What?"
NAMES = ("ids", "image", "frames", "video")


def smooth(height: int, width: int, seed: int) -> np.ndarray:
    """A picture without sharp edges, whose resizing leaves little to taste."""
    rough = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return np.asarray(Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC))


def clip() -> np.ndarray:
    return np.stack([smooth(34, 45, seed) for seed in range(FRAMES)])


def kept(patches: np.ndarray, pictures: Pictures, tiles: bool) -> np.ndarray:
    """Every seventh number of patches, or of tiles [P, 3, H, W] cut into them."""
    if tiles:
        side = patches.shape[-1] // pictures.patch
        size = side * pictures.patch
        cut = patches.reshape(-1, *patches.shape[-3:])[:, :, :size, :size]
        cut = cut.reshape(-1, 3, side, pictures.patch, side, pictures.patch)
        patches = cut.transpose(0, 2, 4, 1, 3, 5).reshape(-1, 3 * pictures.patch**2)
    return patches.reshape(len(patches), -1)[:, ::7].astype(np.float32)


def of_lf(pictures: Pictures, folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns what lf makes: patches of the image, frames and patches of the video."""
    count: Count = functools.partial(media_tokens, hf.read_config(folder))
    still = fit(pictures, Shape(height=SIZE[0], width=SIZE[1]), count)
    video = fit(pictures, Shape(height=34, width=45, kind="video", frames=FRAMES, fps=FPS), count)
    image = kept(patches_of(pictures, still, smooth(*SIZE, 99)[None]), pictures, False)
    return image, np.array(video.frames), kept(patches_of(pictures, video, clip()[list(video.frames)]), pictures, False)


def of_transformers(
    pictures: Pictures, folder: Path, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the ids of a question about the image, its patches, the frames of the video, and patches of `indices`."""
    import torch
    from transformers import AutoProcessor
    from transformers.video_utils import VideoMetadata

    processor = AutoProcessor.from_pretrained(folder)
    said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}]
    text = processor.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    image = processor(text=[text], images=[Image.fromarray(smooth(*SIZE, 99))], return_tensors="pt")
    meta = VideoMetadata(total_num_frames=FRAMES, fps=FPS, duration=FRAMES / FPS, height=34, width=45)
    frames = torch.from_numpy(clip()).permute(0, 3, 1, 2)
    how = {"return_tensors": "pt", "return_metadata": True}
    sampled = processor.video_processor(videos=[frames], video_metadata=[meta], **how)
    chosen = np.array([int(i) for i in sampled["video_metadata"][0].frames_indices])
    video = processor.video_processor(videos=[frames[indices]], do_sample_frames=False, return_tensors="pt")
    tiles = image["pixel_values"].shape[-1] != pictures.patch and "image_grid_thw" not in image
    return (
        torch.as_tensor(image["input_ids"][0]).numpy(),
        kept(image["pixel_values"].float().numpy(), pictures, tiles),
        chosen,
        kept(video["pixel_values_videos"].float().numpy(), pictures, tiles),
    )


if __name__ == "__main__":
    from tests.test_answers import CASES, folder_of

    made = {}
    for family, (pictures, _, _) in CASES.items():
        folder = folder_of(family, Path(tempfile.mkdtemp()))
        found = of_transformers(pictures, folder, of_lf(pictures, folder)[1])
        made |= {f"{family}.{name}": value for name, value in zip(NAMES, found, strict=True)}
    np.savez_compressed(FILE, **made)
