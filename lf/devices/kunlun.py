"""Kunlun P800: torch reaches the chip through the vendor's runtime, which answers to the name `cuda`.

The runtime is the package `torch_xmlir` (the vendor's installer is called XPyTorch): device strings stay `cuda`,
`CUDA_VISIBLE_DEVICES` chooses the cards, and the backend named `nccl` is served by BKCL. It reads its environment when
it loads, in some of the vendor's images together with torch; so `apply_env` comes before the first import of torch.
No chip was at hand when this was written: the facts are those of the vendor's public training guides.
"""

import importlib
import importlib.util

from lf.devices.cuda import cuda_memory, cuda_set_local_rank, cuda_synchronize
from lf.devices.device import Device, EnvVar

VENDOR_PACKAGE = "torch_xmlir"
"""The package by which a Kunlun machine is known; operator packages such as `kunlun_ops` come on top of it."""


def kunlun_found() -> bool:
    """Returns whether the vendor's runtime is installed; imports nothing."""
    return importlib.util.find_spec(VENDOR_PACKAGE) is not None


def _set_local_rank(rank: int) -> None:
    # The runtime puts itself under torch.cuda when it loads; where the image has done so already this is a no-op.
    importlib.import_module(VENDOR_PACKAGE)
    cuda_set_local_rank(rank)


# Left to the user, because they depend on the machine: BKCL_RDMA_NICS and BKCL_SOCKET_IFNAME (network cards).
# Left out: XDNN_FC_GEMM_DTYPE, which changes the arithmetic of matrix products, and what no public page explains.
_ENV = (
    EnvVar(name="CUDA_DEVICE_MAX_CONNECTIONS", value="1", why="starts kernels in the order of their calls"),
    EnvVar(name="XMLIR_ENABLE_FAST_FC", value="true", why="takes the fast bf16 path of linear layers"),
    EnvVar(name="XMLIR_ENABLE_FAST_FC_FWD_OUT", value="true", why="the same for their forward"),
    EnvVar(name="XMLIR_ENABLE_FAST_FC_BWD_DW", value="true", why="the same for the gradient of their weight"),
    EnvVar(name="XMLIR_ENABLE_FAST_FC_BWD_DX", value="true", why="the same for the gradient of their input"),
    EnvVar(name="XMLIR_CUDNN_ENABLED", value="1", why="has the convolutions that video patches need (conv3d)"),
    EnvVar(name="XMLIR_PARALLEL_SAVE_MEMORY", value="false", why="spends memory on speed"),
    EnvVar(
        name="XMLIR_BATCH_PARALLEL",
        value="false",
        why="keeps the fused bf16 casts, which true turns off",
    ),
    EnvVar(name="XMLIR_DIST_ASYNC_ISEND_IRECV", value="true", why="sends between pipeline stages without waiting"),
    EnvVar(name="BKCL_FORCE_L3_RDMA", value="0", why="leaves on-chip memory alone, which may run out"),
    EnvVar(name="BKCL_ALL_TO_ALL_OPT", value="1", why="takes the all-to-all made for several machines"),
    EnvVar(name="BKCL_RING_HOSTID_USE_RANK", value="1", why="tells the hosts of a ring apart by rank"),
)

# The public guides train in bf16. No public figure of the peak was found.
kunlun = Device(
    name="kunlun",
    torch_type="cuda",
    backend="nccl",
    capabilities=frozenset({"bf16"}),
    env=_ENV,
    memory=cuda_memory,
    synchronize=cuda_synchronize,
    set_local_rank=_set_local_rank,
)
"""Kunlun P800: torch layers in bf16, no TransformerEngine."""
