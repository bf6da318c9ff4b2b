"""Fixtures that every test file may use."""

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Gives the session's group of worker processes."""
    group = Workers()
    yield group
    group.close()


@pytest.fixture(scope="session")
def one_process() -> Iterator[None]:
    """Brings torch.distributed up in this process alone."""
    import torch
    import torch.distributed as dist

    from tests.gloo import share_device

    torch.set_num_threads(1)
    share_device()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
