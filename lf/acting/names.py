"""What robots call things in their messages, and the observation that a message is.

openpi's clients send `observation/image`, `observation/wrist_image`, `observation/state` and `prompt` (LIBERO), or
other names (DROID, ALOHA); maps in a message count as names with slashes. What a camera is called is told by `Names`;
the policy's own names are always taken, alone or after `observation/`, `images/` or `observation/images/`.

Shapes: h, w pixels of a picture, d dims of the state.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.acting.policy import Observation, Policy

STATE = ("observation/state", "state")
"""Names of the state, unless told otherwise."""
TASK = ("prompt", "task")
"""Names of the instruction."""
CONTROL = ("seed", "reset")
"""What else a message may hold: a seed of the noise, and whether an episode begins."""
_BEFORE = ("", "observation/", "images/", "observation/images/")
_DEEPEST = 8


def _pairs(_: object, attribute: "attrs.Attribute[tuple[str, ...]]", value: tuple[str, ...]) -> None:
    for pair in value:
        key, _sign, camera = pair.rpartition("=")
        if not key or not camera:
            raise ValueError(f"{attribute.name} has {pair!r}; give KEY=CAMERA, as observation/image=base_0_rgb")
    keys = [pair.rpartition("=")[0] for pair in value]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{attribute.name} = {value} maps a key twice; map each to one camera")


@attrs.frozen(kw_only=True)
class Names:
    """What the keys of messages mean."""

    cameras: tuple[str, ...] = attrs.field(default=(), validator=_pairs)
    """KEY=CAMERA of each picture whose key is not the policy's own name of that camera."""
    state: tuple[str, ...] = ()
    """Keys whose values, one after the other, are the state; empty takes `observation/state` or `state`."""
    ignore: tuple[str, ...] = ()
    """Keys that may come and mean nothing."""
    prompt: str = ""
    """Instruction of messages that have none; empty refuses them."""


@attrs.frozen(kw_only=True)
class Request:
    """What a message asks for."""

    seen: Observation
    """What the robot sees."""
    seed: int | None
    """Seed of the noise; None leaves it to the server."""
    reset: bool
    """Whether an episode begins."""


def camera_keys(names: Names, policy: Policy) -> dict[str, str]:
    """Returns the policy's camera of each key; raises ValueError where `names` has a camera that the policy lacks."""
    mapped = {pair.rpartition("=")[0]: pair.rpartition("=")[2] for pair in names.cameras}
    for key, camera in mapped.items():
        if camera not in policy.cameras:
            have = ", ".join(policy.cameras) or "none"
            raise ValueError(f"names.cameras: {key}={camera}, and the cameras of the policy are {have}; map to these")
    plain = {f"{before}{camera}": camera for camera in policy.cameras for before in _BEFORE}
    if len(policy.cameras) == 1:
        plain["observation/image"] = policy.cameras[0]
    return {**mapped, **{key: camera for key, camera in plain.items() if key not in mapped}}


def read_request(names: Names, keys: Mapping[str, str], dims: int, message: Any) -> Request:
    """Returns what an unpacked message asks for; `keys` is what `camera_keys` returned, `dims` those of the state.

    Raises ValueError, naming the key and the cure, for what is missing, unknown, or of another type than it must be.
    """
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is a {type(message).__name__}; send a map with pictures, state and prompt")
    given = _flat(message)
    images: dict[str, NDArray[np.uint8]] = {}
    for key in [key for key in given if key in keys]:
        if keys[key] in images:
            raise ValueError(f"{key} is a second picture of the camera {keys[key]}; send one")
        images[keys[key]] = _picture(key, given.pop(key))
    state = _state(names, given, dims)
    task = _task(names, given)
    seed, reset = given.pop("seed", None), given.pop("reset", False)
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        raise ValueError(f"seed is {seed!r:.40}, and must be a whole number from 0")
    if type(reset) is not bool:
        raise ValueError(f"reset is {reset!r:.40}, and must be true or false")
    unknown = [key for key in given if key not in names.ignore]
    if unknown:
        raise ValueError(
            f"{unknown[0]!r:.80} is no key that this server knows; pictures are {', '.join(_short(keys))}; map it "
            f"(--names.cameras {unknown[0]:.40}=CAMERA), or let it mean nothing (--names.ignore)"
        )
    return Request(seen=Observation(images=images, state=state, task=task), seed=seed, reset=reset)


def _short(keys: Mapping[str, str]) -> list[str]:
    """Returns the first key of each camera."""
    first: dict[str, str] = {}
    for key, camera in keys.items():
        first.setdefault(camera, key)
    return list(first.values()) or ["none"]


def _flat(message: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in _leaves(message, "", _DEEPEST):
        if key in found:
            raise ValueError(f"the message has {key!r:.80} twice; send it once")
        found[key] = value
    return found


def _leaves(message: Mapping[Any, Any], before: str, deeper: int) -> Iterator[tuple[str, Any]]:
    for key, value in message.items():
        if not isinstance(key, str):
            raise ValueError(f"the message has the key {key!r:.80}; keys must be text")
        if isinstance(value, Mapping) and deeper:
            yield from _leaves(value, f"{before}{key}/", deeper - 1)
        else:
            yield f"{before}{key}", value


def _picture(key: str, value: Any) -> NDArray[np.uint8]:
    """Returns a picture [h, w, 3]; channels may stand first."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 3 or not value.size:
        raise ValueError(f"{key} is {_told(value)}; send a picture, uint8 [height, width, 3]")
    if value.shape[2] != 3 and value.shape[0] == 3:
        value = np.moveaxis(value, 0, -1)
    if value.shape[2] != 3:
        raise ValueError(f"{key} is {_told(value)}; send a picture, uint8 [height, width, 3]")
    return np.ascontiguousarray(value)


def _state(names: Names, given: dict[str, Any], dims: int) -> NDArray[np.float32]:
    wanted = names.state or tuple(key for key in STATE if key in given)
    if not wanted and not dims:
        return np.zeros(0, np.float32)
    missing = [key for key in wanted if key not in given]
    if not wanted or missing:
        raise ValueError(f"the message has no {missing[0] if missing else STATE[0]}; send the state of the robot there")
    if not names.state and len(wanted) > 1:
        raise ValueError(f"the message has {' and '.join(wanted)}; send the state once")
    parts = [_numbers(key, given.pop(key)) for key in wanted]
    state = np.concatenate(parts)
    if state.shape != (dims,):
        told = " and ".join(f"{key} of {len(part)}" for key, part in zip(wanted, parts, strict=True))
        raise ValueError(
            f"the state has {len(state)} dims ({told}), and the policy takes {dims}; send those of the data"
        )
    return state


def _numbers(key: str, value: Any) -> NDArray[np.float32]:
    """Returns numbers as a vector; a list of them, or a single one, is taken too."""
    try:
        found = value if isinstance(value, np.ndarray) else np.asarray(value)
        if found.dtype.kind not in "fiu" or found.ndim > 1:
            raise ValueError
    except ValueError as error:
        raise ValueError(f"{key} is {_told(value)}; send a vector of numbers") from error
    with np.errstate(over="ignore"):
        out = found.astype(np.float32).reshape(-1)
    if not np.isfinite(out).all():
        raise ValueError(
            f"{key} is not all finite ({out[~np.isfinite(out)][0]} at {np.flatnonzero(~np.isfinite(out))[0]})"
        )
    return out


def _task(names: Names, given: dict[str, Any]) -> str:
    found = [key for key in TASK if key in given]
    if len(found) > 1:
        raise ValueError(f"the message has {' and '.join(found)}; send the instruction once")
    if not found:
        if not names.prompt:
            raise ValueError(f"the message has no {TASK[0]}; send the instruction there, or start with --names.prompt")
        return names.prompt
    value = given.pop(found[0])
    if isinstance(value, np.ndarray) and value.dtype.kind == "U" and value.ndim == 0:
        value = value.item()
    if not isinstance(value, str):
        raise ValueError(f"{found[0]} is {_told(value)}; send text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{found[0]} is no text ({error}); send Unicode without surrogates") from error
    return str(value)


def _told(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else f"{type(value).__name__}"
