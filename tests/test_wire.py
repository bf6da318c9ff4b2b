"""Messages are those of openpi's client, byte for byte, and nothing else is read."""

from typing import Any

import msgpack
import numpy as np
import pytest

from lf.acting.names import Names, camera_keys, read_request
from lf.acting.policy import Policy
from lf.acting.wire import pack, unpack

# Written by `openpi_client.msgpack_numpy.packb` of openpi-client 0.1.2 (numpy 1.26.4, msgpack 1.2.4).
OBSERVATION = bytes.fromhex(
    "83b16f62736572766174696f6e2f696d61676584c40b5f5f6e6461727261795f5fc3c40464617461c40c000102030405060708090a0b"
    "c4056474797065a37c7531c405736861706593020203b16f62736572766174696f6e2f737461746584c40b5f5f6e6461727261795f5f"
    "c3c40464617461c4080000003f000080bfc4056474797065a33c6634c40573686170659102a670726f6d7074a470757368"
)
VALUES = bytes.fromhex(
    "8aa16183c40d5f5f6e7067656e657269635f5fc3c40464617461cb3ff8000000000000c4056474797065a33c6634a16283c40d5f5f6e"
    "7067656e657269635f5fc3c40464617461fdc4056474797065a33c6938a163c3a1649301cb4004000000000000c0a16584c40b5f5f6e"
    "6461727261795f5fc3c40464617461c4020100c4056474797065a37c6231c4057368617065920201a16684c40b5f5f6e646172726179"
    "5f5fc3c40464617461c4086800000069000000c4056474797065a33c5532c405736861706590a16783c40d5f5f6e7067656e65726963"
    "5f5fc3c40464617461c3c4056474797065a37c6231a16881a16984c40b5f5f6e6461727261795f5fc3c40464617461c400c405647479"
    "7065a33c6638c4057368617065920003a16aa178a16b84c40b5f5f6e6461727261795f5fc3c40464617461c420000000000000000000"
    "0000000000f03f00000000000000400000000000000840c4056474797065a33c6638c4057368617065920202"
)


def observation() -> dict[str, Any]:
    return {
        "observation/image": np.arange(12, dtype=np.uint8).reshape(2, 2, 3),
        "observation/state": np.array([0.5, -1.0], np.float32),
        "prompt": "push",
    }


def values() -> dict[str, Any]:
    return {
        "a": np.float32(1.5),
        "b": np.int64(-3),
        "c": True,
        "d": [1, 2.5, None],
        "e": np.array([[True], [False]]),
        "f": np.array("hi"),
        "g": np.bool_(True),
        "h": {"i": np.zeros((0, 3))},
        "j": "x",
        "k": np.asfortranarray(np.arange(4.0).reshape(2, 2)),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (np.ndarray, np.generic)):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(("value", "data"), [(observation(), OBSERVATION), (values(), VALUES)])
def test_bytes_are_those_of_openpi_s_client(value: Any, data: bytes) -> None:
    assert pack(value) == data
    assert same(unpack(data), value)


@pytest.mark.parametrize(
    "value",
    [np.array([object()]), np.array([1j]), np.zeros(1, [("x", "f4")]), object(), {1, 2}, 2**70, np.datetime64("2020")],
)
def test_what_has_no_form_on_the_wire_is_not_packed(value: Any) -> None:
    with pytest.raises(ValueError, match=r"no form on the wire|cannot be packed"):
        pack({"x": value})


def array(**changes: Any) -> bytes:
    good = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    return bytes(msgpack.packb({**good, **{key.encode(): value for key, value in changes.items()}}))


BROKEN = {
    "empty": b"",
    "text": b"hello",
    "cut": OBSERVATION[:-3],
    "longer": OBSERVATION + b"\0",
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05hello\x94.",
    "a long array": b"\xdd\xff\xff\xff\xff",
    "deep": b"\x91" * 5000,
    "a list as a key": b"\x81\x91\x01\x01",
    "objects": array(dtype="|O", data=b"\0" * 8, shape=[1]),
    "records": array(dtype="<f4,<f4", shape=[1]),
    "void": array(dtype="|V8", shape=[1]),
    "complex": array(dtype="<c8", shape=[1]),
    "times": array(dtype="<M8[s]", shape=[1]),
    "empty text": array(dtype="<U0", data=b"", shape=[2**30]),
    "no character": array(dtype="<U1", data=b"\xff" * 4, shape=[]),
    "no character, other bytes first": array(dtype=">U1", data=b"\x7f\0\0\0", shape=[]),
    "no dtype": array(dtype=None),
    "other bytes": array(shape=[3]),
    "a negative size": array(shape=[-2]),
    "a huge size": array(shape=[2**62, 0], data=b""),
    "text as data": array(data="x" * 8),
    "a size of text": array(shape="2"),
    "many dims": array(shape=[1] * 33, data=b"\0" * 4),
    "a scalar of objects": bytes(msgpack.packb({b"__npgeneric__": True, b"data": 1, b"dtype": "|O"})),
    "a scalar of a list": bytes(msgpack.packb({b"__npgeneric__": True, b"data": [1], b"dtype": "<f4"})),
    "a large scalar": bytes(msgpack.packb({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"})),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_message_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a message is no msgpack with numpy arrays"):
        unpack(BROKEN[name])


POLICY = Policy(cameras=("base", "wrist"), state_dims=2, action_dims=1, horizon=1, fps=1.0, act=lambda seen, seeds: [])
PICTURE = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
NAMES = Names(cameras=("observation/image=base", "observation/wrist_image=wrist"))


def read(message: Any, names: Names = NAMES) -> Any:
    return read_request(names, camera_keys(names, POLICY), 2, message)


@pytest.mark.parametrize(
    "message",
    [
        {"observation/image": PICTURE, "observation/state": np.array([1, 2]), "prompt": "go"},
        {"observation": {"image": PICTURE, "state": [1.0, 2.0]}, "prompt": np.array("go")},
        {"base": PICTURE, "state": np.array([1.0, 2.0]), "task": "go"},
        {"images": {"base": np.moveaxis(PICTURE, -1, 0)}, "state": np.array([1.0, 2.0]), "task": np.str_("go")},
    ],
)
def test_names_of_openpi_and_of_the_policy_are_read(message: Any) -> None:
    ask = read(message)
    assert ask.seen.images.keys() == {"base"}
    assert np.array_equal(ask.seen.images["base"], PICTURE)
    assert ask.seen.state.dtype == np.float32
    assert (ask.seen.state.tolist(), ask.seen.task, ask.seed, ask.reset) == ([1.0, 2.0], "go", None, False)


def test_a_state_of_several_keys_and_a_prompt_of_the_server() -> None:
    names = Names(
        cameras=("observation/exterior_image_1_left=base",),
        state=("observation/joint_position", "observation/gripper_position"),
        ignore=("extra",),
        prompt="tidy up",
    )
    message = {
        "observation/exterior_image_1_left": PICTURE,
        "observation/joint_position": np.array([3.0]),
        "observation/gripper_position": np.float32(4),
        "extra": 1,
        "seed": 5,
        "reset": True,
    }
    ask = read(message, names)
    assert (ask.seen.state.tolist(), ask.seen.task, ask.seed, ask.reset) == ([3.0, 4.0], "tidy up", 5, True)


def test_one_camera_is_openpi_s_image() -> None:
    one = Policy(cameras=("top",), state_dims=0, action_dims=1, horizon=1, fps=1.0, act=POLICY.act)
    ask = read_request(Names(), camera_keys(Names(), one), 0, {"observation/image": PICTURE, "prompt": "go"})
    assert ask.seen.images.keys() == {"top"}
    assert ask.seen.state.shape == (0,)


GOOD = {"observation/image": PICTURE, "observation/state": np.array([1.0, 2.0]), "prompt": "go"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": None}, "prompt is NoneType; send text"),
        ({"prompt": "go \ud800"}, "prompt is no text .*send Unicode without surrogates"),
        ({"prompt": ...}, r"the message has no prompt; send the instruction there, or start with --names\.prompt"),
        ({"task": "go"}, "has prompt and task; send the instruction once"),
        ({"observation/state": ...}, "the message has no observation/state"),
        ({"state": np.zeros(2)}, "has observation/state and state; send the state once"),
        ({"observation/state": "left"}, "observation/state is str; send a vector of numbers"),
        ({"observation/state": np.zeros((1, 2))}, r"observation/state is float64 \[1, 2\]; send a vector"),
        ({"observation/state": np.zeros(3)}, r"has 3 dims \(observation/state of 3\), and the policy takes 2"),
        ({"observation/state": np.array([0, np.nan])}, r"observation/state is not all finite \(nan at 1\)"),
        ({"observation/state": np.array([0, 1e300])}, r"observation/state is not all finite \(inf at 1\)"),
        ({"observation/state": [[1], [1, 2]]}, "observation/state is list; send a vector of numbers"),
        ({"observation/image": np.zeros((2, 2, 3))}, r"observation/image is float64 \[2, 2, 3\]; send a picture"),
        ({"observation/image": np.zeros((2, 2, 4), np.uint8)}, r"observation/image is uint8 \[2, 2, 4\]"),
        ({"observation/image": b"png"}, "observation/image is bytes; send a picture"),
        ({"base": PICTURE}, "base is a second picture of the camera base"),
        ({"observation/front": PICTURE}, r"'observation/front' is no key .* pictures are observation/image, obs"),
        ({"seed": -1}, "seed is -1, and must be a whole number from 0"),
        ({"reset": 1}, "reset is 1, and must be true or false"),
        ({"observation": {"state": [1, 2]}}, "has 'observation/state' twice"),
        ({1: 2}, "has the key 1; keys must be text"),
    ],
)
def test_a_message_that_is_no_observation_is_refused(changes: dict[Any, Any], words: str) -> None:
    message = {key: value for key, value in {**GOOD, **changes}.items() if value is not ...}
    with pytest.raises(ValueError, match=words):
        read(message)


@pytest.mark.parametrize("message", [None, [], 3, "x"])
def test_a_message_that_is_no_map_is_refused(message: Any) -> None:
    with pytest.raises(ValueError, match="send a map with pictures, state and prompt"):
        read(message)


def test_names_that_do_not_fit_are_refused_before_the_server_starts() -> None:
    with pytest.raises(ValueError, match="observation/image=front, and the cameras of the policy are base, wrist"):
        camera_keys(Names(cameras=("observation/image=front",)), POLICY)
    with pytest.raises(ValueError, match="cameras has 'front'; give KEY=CAMERA"):
        Names(cameras=("front",))
    with pytest.raises(ValueError, match="maps a key twice"):
        Names(cameras=("a=base", "a=wrist"))
