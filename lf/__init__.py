"""Trains language models and robot policies: frozen configs, composed in Python.

The names that configs are composed of are loaded on use, so `import lf` costs nothing and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lf.data.config import AnyresPictures as AnyresPictures
    from lf.data.config import Augment as Augment
    from lf.data.config import Camera as Camera
    from lf.data.config import ChatData as ChatData
    from lf.data.config import DataConfig as DataConfig
    from lf.data.config import Encoding as Encoding
    from lf.data.config import HfTokenizer as HfTokenizer
    from lf.data.config import KimiPictures as KimiPictures
    from lf.data.config import LatentData as LatentData
    from lf.data.config import LeRobotData as LeRobotData
    from lf.data.config import MediaData as MediaData
    from lf.data.config import Mixture as Mixture
    from lf.data.config import Normalise as Normalise
    from lf.data.config import Qwen3Pictures as Qwen3Pictures
    from lf.data.config import Qwen25Pictures as Qwen25Pictures
    from lf.data.config import Signal as Signal
    from lf.data.config import TextData as TextData
    from lf.data.config import TilePictures as TilePictures
    from lf.data.config import TokenizerConfig as TokenizerConfig
    from lf.data.config import TrainedBpe as TrainedBpe
    from lf.data.config import Weighted as Weighted
    from lf.models.lora import Lora as Lora
    from lf.parallel.config import Hetero as Hetero
    from lf.parallel.config import MegatronParallel as MegatronParallel
    from lf.parallel.config import TorchParallel as TorchParallel
    from lf.plan.work import Rates as Rates
    from lf.train.config import AdamW as AdamW
    from lf.train.config import Balance as Balance
    from lf.train.config import Constant as Constant
    from lf.train.config import Cosine as Cosine
    from lf.train.config import Eval as Eval
    from lf.train.config import Linear as Linear
    from lf.train.config import Log as Log
    from lf.train.config import OptimConfig as OptimConfig
    from lf.train.config import Precision as Precision
    from lf.train.config import Profile as Profile
    from lf.train.config import Rate as Rate
    from lf.train.config import Run as Run
    from lf.train.config import Save as Save
    from lf.train.config import ScheduleConfig as ScheduleConfig
    from lf.train.config import Sgd as Sgd
    from lf.train.config import Wsd as Wsd

__version__ = "0.1.0"

_MODULES = {
    "lf.data.config": (
        *("AnyresPictures", "Augment", "Camera", "ChatData", "DataConfig", "Encoding", "HfTokenizer", "KimiPictures"),
        *("LatentData", "LeRobotData", "MediaData", "Mixture", "Normalise", "Qwen25Pictures", "Qwen3Pictures"),
        *("Signal", "TextData", "TilePictures", "TokenizerConfig", "TrainedBpe", "Weighted"),
    ),
    "lf.models.lora": ("Lora",),
    "lf.parallel.config": ("Hetero", "MegatronParallel", "TorchParallel"),
    "lf.plan.work": ("Rates",),
    "lf.train.config": (
        *("AdamW", "Balance", "Constant", "Cosine", "Eval", "Linear", "Log", "OptimConfig", "Precision", "Profile"),
        *("Rate", "Run", "Save", "ScheduleConfig", "Sgd", "Wsd"),
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lf' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
