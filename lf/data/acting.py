"""What acting needs to know of the data that a policy was trained on; checkpoints and exports hold it as JSON."""

from collections.abc import Sequence

import attrs
from attrs.validators import ge, gt

from lf.data.lerobot import LeRobotRows
from lf.data.normalise import Normalisers


@attrs.frozen(kw_only=True)
class ActingFacts:
    """The robot that a policy was trained on."""

    normalisers: Normalisers
    """How states and actions are scaled."""
    cameras: tuple[str, ...]
    """Names of the cameras that the data filled, in its order."""
    fps: float = attrs.field(validator=gt(0.0))
    """Actions a second."""
    chunk: int = attrs.field(validator=ge(1))
    """Actions of a row."""
    beyond: tuple[str, ...] = ()
    """Fields of the data's config that one moment cannot give: windows, and fields of the user's own."""


def acting_facts(parts: Sequence[LeRobotRows]) -> ActingFacts:
    """Returns the facts of datasets that are trained on together; they are alike in all but which cameras they fill."""
    first = parts[0]
    filled = {camera.name for part in parts for camera in part.cameras if camera.key}
    windows = [field for field, steps in first.steps.items() if steps and field != "actions"]
    extra = [f"extra[{at}]" for at in range(len(first.cfg.extra))]
    return ActingFacts(
        normalisers=first.normalisers,
        cameras=tuple(camera.name for camera in first.cameras if camera.name in filled),
        fps=first.fps,
        chunk=first.cfg.chunk,
        beyond=tuple(dict.fromkeys((*windows, *extra))),
    )
