"""What is told when another rank is gone."""

import pytest

from lf.train.comm import lost

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "


@pytest.mark.parametrize(
    ("text", "brief"),
    [
        (
            f"{GLOO}Read error [127.0.0.1]:9414: Connection reset by peer. This is typically caused by a remote worker",
            "pair.cc:537: Read error [127.0.0.1]:9414: Connection reset by peer",
        ),
        (f"{GLOO}Connection closed by peer [127.0.0.1]:46", "pair.cc:537: Connection closed by peer [127.0.0.1]:46"),
        (f"{GLOO}Write error [::1]:3: Broken pipe", "pair.cc:537: Write error [::1]:3: Broken pipe"),
        ("NCCL error: remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError", None),
    ],
)
def test_a_lost_connection_is_told_as_a_rank_that_is_gone(text: str, brief: str | None) -> None:
    told = lost(RuntimeError(text))
    assert told.startswith("another rank is gone, and the ranks cannot go on without it (")
    assert "\n" not in told
    assert brief is None or f"({brief})" in told


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError(f"{GLOO}op.preamble.length <= op.nbytes. 4 vs 2"),
        RuntimeError("NCCL error: invalid usage"),
        KeyError("Connection reset by peer"),
    ],
)
def test_other_errors_keep_their_traceback(error: Exception) -> None:
    assert lost(error) == ""
