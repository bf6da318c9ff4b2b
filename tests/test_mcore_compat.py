"""The changes to megatron-core: which apply where, that each holds, and that the rest of torch is untouched."""

import contextlib
import importlib
import importlib.metadata
import json
import logging
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lf.devices.cpu import cpu
from lf.devices.device import Device
from lf.devices.kunlun import kunlun
from lf.models.layers.rope import Rope, rope_table
from lf.parallel import mcore_compat
from lf.parallel.mcore_compat import TABLE, VERSION, Row, cuda_type_names, prepare_megatron, rows_for
from tests.workers import Workers

ROOT = Path(__file__).parents[1]
CUDA = attrs.evolve(kunlun, name="cuda", capabilities=frozenset({"bf16", "fused_kernels"}))
WITH_TE = attrs.evolve(CUDA, capabilities=CUDA.capabilities | {"transformer_engine"})


@pytest.fixture(autouse=True)
def _prepared() -> None:
    prepare_megatron(cpu)


def core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


FRESH = """
import importlib, json, sys, types
import attrs, torch
from lf.devices.cpu import cpu
from lf.parallel import mcore_compat
from lf.parallel.mcore_compat import MODULES, TABLE, prepare_megatron, rows_for

def held(row):
    holder, name = mcore_compat._resolve(row.target)
    return getattr(holder, name, "missing")

def is_compiled(value):
    return isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable")

def compiled():
    spaces = [vars(m) for n, m in list(sys.modules.items()) if n.startswith("megatron.core")]
    spaces += [vars(v) for s in list(spaces) for v in s.values() if isinstance(v, type) and "megatron" in v.__module__]
    return sum(is_compiled(value) for space in spaces for value in space.values())

for name in MODULES:
    importlib.import_module(f"megatron.core.{name}")
imported = all(
    row.target.startswith("torch:") or "megatron.core." + row.target.split(":")[0] in sys.modules for row in TABLE
)
said = {"imported": imported, "compiled": compiled()}
before = {row.target: held(row) for row in TABLE}
torch_before = {name: id(value) for name, value in vars(torch).items()}
cuda_before = {name: id(value) for name, value in vars(torch.cuda).items()}
prepare_megatron(cpu)
after = {row.target: held(row) for row in TABLE}
said["same"] = [target for target, value in before.items() if value is not None and value is after[target]]
prepare_megatron(attrs.evolve(cpu, name="another"))
said["changed_again"] = [row.target for row in TABLE if held(row) is not after[row.target]]
said["compiled_after"] = compiled()
said["touched"] = [n for n, v in vars(torch).items() if torch_before.get(n) != id(v)]
said["touched"] += [n for n, v in vars(torch.cuda).items() if cuda_before.get(n) != id(v)]
said["applied"] = [row.target for row in rows_for(cpu)]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    """What a process sees that prepares megatron-core for the first time."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FRESH], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_row_replaces_its_target_once(fresh: dict[str, Any]) -> None:
    assert fresh["applied"] == [row.target for row in TABLE]
    assert fresh["same"] == []
    assert fresh["changed_again"] == []


def test_the_listed_modules_bring_every_module_that_the_table_touches(fresh: dict[str, Any]) -> None:
    assert fresh["imported"]


def test_nothing_is_compiled_behind_the_back_of_a_cpu(fresh: dict[str, Any]) -> None:
    assert fresh["compiled"] > 10, "megatron-core no longer compiles at import: the change is not needed"
    assert fresh["compiled_after"] == 0
    assert core("jit").jit_fuser is core("jit").noop_decorator


def test_names_of_torch_stay_what_they_were(fresh: dict[str, Any]) -> None:
    assert fresh["touched"] == []


def test_another_release_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0")
    with pytest.raises(ValueError, match=rf"megatron-core 0\.17\.0 is installed, but lf is written for {VERSION}"):
        prepare_megatron.__wrapped__(cpu)


def test_the_installed_release_is_the_one_of_the_table() -> None:
    assert importlib.metadata.version("megatron-core") == VERSION


def test_a_process_stays_on_one_kind_of_device() -> None:
    with pytest.raises(ValueError, match="this process uses megatron-core on cpu; start another one for cuda"):
        prepare_megatron(CUDA)


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        (cpu, {"always", "no_te", "cpu"}),
        (CUDA, {"always", "no_te"}),
        (WITH_TE, {"always"}),
        (kunlun, {"always", "no_te"}),
    ],
    ids=["cpu", "cuda", "cuda_with_te", "kunlun"],
)
def test_a_device_gets_the_rows_it_needs(device: Device, wanted: set[str]) -> None:
    rows = rows_for(device)
    assert {row.when for row in rows} == wanted
    assert rows == tuple(row for row in TABLE if row.when in wanted)


def test_every_row_says_what_and_why() -> None:
    assert len({row.target for row in TABLE}) == len(TABLE)
    assert all(len(row.why) > 20 and ":" in row.target for row in TABLE)


@pytest.mark.parametrize(
    "target", ["transformer.attention:no_such_name", "transformer.no_such_module:x", "transformer.mlp:MLP.nope.deeper"]
)
def test_a_missing_target_is_an_error(target: str) -> None:
    row = Row(target=target, make=lambda original: None, why="a test says so", when="always")
    with pytest.raises(
        ValueError, match=rf"megatron-core has no {target}, which lf must change because a test says so"
    ):
        mcore_compat._apply(row)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a CUDA card")
def test_outside_megatron_cuda_is_still_not_there() -> None:
    calls: list[Callable[[], Any]] = [
        torch.cuda.current_device,
        torch.cuda.get_rng_state,
        torch.cuda.current_stream,
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.ones_like(torch.zeros(2), device="cuda"),
        lambda: torch.zeros(2).to("cuda"),
    ]
    for call in calls:
        with pytest.raises((ValueError, AssertionError), match=r"CUDA|NVIDIA"):
            call()
    assert not torch.cuda.is_available()


def test_inside_megatron_cuda_is_the_cpu() -> None:
    inside = core("tensor_parallel.layers").torch
    assert inside is not torch
    assert inside.cuda.current_device() == torch.device("cpu")
    for device in ("cuda", "cuda:1", 0, torch.device("cuda"), inside.cuda.current_device(), None):
        assert inside.zeros(2, device=device).device.type == "cpu"
    assert inside.empty(2, device="meta").device.type == "meta"
    assert inside.full((2,), 3.0, device="cuda", pin_memory=True).tolist() == [3.0, 3.0]
    assert inside.nn is torch.nn
    assert inside.cuda.amp is torch.cuda.amp
    with inside.cuda.stream(inside.cuda.Stream()), inside.cuda.nvtx.range("work"):
        inside.cuda.current_stream().wait_stream(inside.cuda.default_stream())
    first, second = inside.cuda.Event(enable_timing=True), inside.cuda.Event()
    first.record()
    second.record()
    assert first.elapsed_time(second) >= 0.0
    assert second.query()
    assert (inside.cuda.memory_allocated(), inside.cuda.device_count()) == (0, 1)


def turned(x: Tensor, positions: Tensor, theta: float, rot: int) -> Tensor:
    """Rotates pairs (i, i + rot / 2) of heads as complex numbers, in double precision."""
    angles = positions.double()[..., None] / theta ** (torch.arange(0, rot, 2).double() / rot)
    first, second = x[..., :rot].double().chunk(2, -1)
    pairs = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[..., None, :]
    return torch.cat((pairs.real, pairs.imag, x[..., rot:].double()), -1)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rotary_takes_one_table_for_rows_and_for_packed_documents(fraction: float) -> None:
    apply = core("transformer.attention").apply_rotary_pos_emb
    positions_BS = torch.tensor([[0, 1, 2, 3, 0, 1], [5, 6, 7, 8, 9, 10]])
    rope = Rope(theta=100.0, fraction=fraction)
    x = torch.randn(6, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    table = rope_table(rope, 8, positions_BS, 0)
    made = apply(x, table, config=None, mscale=1.0, cp_group=None)
    torch.testing.assert_close(made.double(), turned(x, positions_BS.t(), 100.0, int(8 * fraction)), rtol=0, atol=1e-6)
    packed = x.transpose(0, 1).flatten(0, 1)
    table = rope_table(rope, 8, positions_BS.reshape(1, -1), 0)
    made = apply(packed, table, config=None, cu_seqlens=torch.tensor([0, 4, 12]), mscale=1.0, cp_group=None)
    torch.testing.assert_close(
        made.double(), turned(packed, positions_BS.flatten(), 100.0, int(8 * fraction)), rtol=0, atol=1e-6
    )


def test_recompute_without_output_asks_for_no_transformer_engine() -> None:
    random = core("tensor_parallel.random")
    assert random.CheckpointWithoutOutput().fp8 is False
    assert random.CheckpointWithoutOutput(fp8=False).fp8 is False
    assert random.CheckpointWithoutOutput(fp8=object()).fp8 is True
    random.model_parallel_cuda_manual_seed(3, tp_rank=0, ep_rank=0, etp_rank=0)
    x = torch.randn(4, 4)

    def run(again: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        leaf = x.clone().requires_grad_()

        def inside(y: Tensor) -> Tensor:
            return F.dropout(torch.tanh(y), 0.5)

        if not again:
            out = inside(leaf).pow(2)
        else:
            kept = random.CheckpointWithoutOutput()
            hidden = kept.checkpoint(inside, leaf)
            out = hidden.pow(2)
            kept.discard_output_and_register_recompute(out)
            assert hidden.untyped_storage().size() == 0
        value = out.detach().clone()
        out.sum().backward()
        assert leaf.grad is not None
        return value, leaf.grad

    for a, b in zip(run(False), run(True), strict=True):
        assert torch.equal(a, b)


def test_a_bias_of_a_frozen_weight_has_its_gradient() -> None:
    """Upstream returns none, so this fails where the row is missing."""
    layers = core("tensor_parallel.layers")
    x, weight = torch.randn(5, 2, 8, requires_grad=True), torch.randn(3, 8)
    bias = torch.randn(3, requires_grad=True)
    out = layers.linear_with_frozen_weight(
        input=x,
        weight=weight,
        bias=bias,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=False,
        tp_group=None,
    )
    wanted = F.linear(x, weight, bias)
    torch.testing.assert_close(out, wanted)
    grads = torch.autograd.grad(out.square().sum(), (x, bias))
    torch.testing.assert_close(grads, torch.autograd.grad(wanted.square().sum(), (x, bias)))


def test_the_distributed_optimiser_takes_any_optimiser() -> None:
    assert core("optimizer.distrib_optimizer").Adam is torch.optim.Optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_runs_without_transformer_engine(dtype: torch.dtype) -> None:
    utils = core("transformer.moe.moe_utils")
    assert utils.te_general_gemm is None
    x = torch.randn(5, 2, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 8, dtype=dtype, requires_grad=True)
    out = utils.router_gating_linear(x, weight, None, torch.float32)
    wanted = F.linear(x.float(), weight.float())
    grads = torch.autograd.grad(out.square().sum(), (x, weight))
    wanted_grads = torch.autograd.grad(wanted.square().sum(), (x, weight))
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(grads, wanted_grads)


def test_the_norm_of_gradients_is_one_number_of_all_tensors(one_process: None) -> None:
    clip = core("optimizer.clip_grads")
    grads = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (1, 7, 64)]
    wanted = float(torch.cat(grads).double().norm())
    assert clip.get_grad_norm_fp32(grads, grad_stats_parallel_group=dist.group.WORLD) == pytest.approx(wanted, rel=1e-6)
    assert clip.get_grad_norm_fp32([], grad_stats_parallel_group=dist.group.WORLD) == 0.0


@pytest.mark.parametrize("module", ["transformer.moe.moe_utils", "transformer.moe.token_dispatcher"])
def test_sizes_leave_the_device_as_numbers(module: str) -> None:
    move = core(module).maybe_move_tensor_to_cpu
    tensor = torch.tensor([2, 3])
    assert isinstance(move(tensor, as_numpy=True, record_stream=True), np.ndarray)
    assert move(tensor, as_numpy=True).tolist() == [2, 3]
    assert move(tensor) is tensor
    assert move([2, 3], as_numpy=True) == [2, 3]
    assert move(None, as_numpy=True) is None


def uneven(sizes: list[int], dtype: torch.dtype) -> dict[str, Any]:
    """Gathers and scatters pieces of different sizes, with their gradients, through megatron's autograd functions."""
    prepare_megatron(cpu)
    mappings, rank = core("tensor_parallel.mappings"), dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    piece = torch.randn(sizes[rank], 3, generator=draw).to(dtype).requires_grad_()
    whole = mappings.gather_from_sequence_parallel_region(piece, group=dist.group.WORLD, output_split_sizes=sizes)
    pull = torch.randn(sum(sizes), 3, generator=draw).to(dtype)
    (piece_grad,) = torch.autograd.grad(whole, piece, pull)
    full = torch.randn(sum(sizes), 3, generator=draw).to(dtype).requires_grad_()
    part = mappings.reduce_scatter_to_sequence_parallel_region(full, group=dist.group.WORLD, input_split_sizes=sizes)
    push = torch.randn(sizes[rank], 3, generator=draw).to(dtype)
    (full_grad,) = torch.autograd.grad(part, full, push)
    made = {"piece": piece, "whole": whole, "pull": pull, "piece_grad": piece_grad}
    made |= {"full": full, "part": part, "push": push, "full_grad": full_grad}
    return {name: tensor.detach() for name, tensor in made.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[3, 1], [2, 2], [0, 4]], ids=str)
def test_pieces_of_any_size_are_gathered_and_scattered(workers: Workers, sizes: list[int], dtype: torch.dtype) -> None:
    ranks = workers.run(2, uneven, sizes, dtype)
    whole = torch.cat([r["piece"] for r in ranks])
    pulled = torch.split(sum(r["pull"] for r in ranks), sizes)
    summed = torch.split(sum(r["full"] for r in ranks), sizes)
    pushed = torch.cat([r["push"] for r in ranks])
    for rank, made in enumerate(ranks):
        assert torch.equal(made["whole"], whole)
        assert torch.equal(made["piece_grad"], pulled[rank])
        assert torch.equal(made["part"], summed[rank])
        assert torch.equal(made["full_grad"], pushed)


def test_the_state_of_the_cpu_generator_stands_for_cudas() -> None:
    random = core("tensor_parallel.random")
    torch.manual_seed(1)
    state = random._get_cuda_rng_state()
    first = torch.rand(3)
    random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    random._set_cuda_rng_state(state, graph_safe=False)
    assert torch.equal(torch.rand(3), first)
    assert random.torch.cuda.get_rng_state().equal(torch.get_rng_state())


def tracker() -> Any:
    random = core("tensor_parallel.random")
    made = random.CudaRNGStatesTracker()
    made.add("a", 1)
    made.add("b", 2)
    torch.manual_seed(0)
    return made


def numbers(seed: int, count: int) -> list[float]:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_named_state_moves_inside_its_forks_only(caplog: pytest.LogCaptureFixture) -> None:
    states = tracker()
    drawn = {name: [] for name in ("a", "b", "outside")}
    with caplog.at_level(logging.WARNING):
        for name in ("a", "outside", "b", "a", "outside", "b"):
            with states.fork(name) if name != "outside" else contextlib.nullcontext():
                drawn[name].append(torch.rand(1).item())
    assert drawn == {"a": numbers(1, 2), "b": numbers(2, 2), "outside": numbers(0, 2)}
    assert not caplog.records


def test_nested_forks_share_the_states() -> None:
    states = tracker()
    a, b = numbers(1, 4), numbers(2, 2)
    with states.fork("a"):
        assert torch.rand(1).item() == a[0]
        with states.fork("b"):
            assert torch.rand(1).item() == b[0]
            with states.fork("a"):
                assert torch.rand(1).item() == a[1]
            assert torch.rand(1).item() == b[1]
        assert torch.rand(1).item() == a[2]
        with states.fork("a"):
            assert torch.rand(1).item() == a[3]
    assert torch.rand(1).item() == numbers(0, 1)[0]


def test_a_fork_ends_where_an_error_leaves_it() -> None:
    states = tracker()

    def stop() -> None:
        with states.fork("a"):
            torch.rand(1)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stop()
    assert torch.rand(1).item() == numbers(0, 1)[0]
    with states.fork("a"):
        assert torch.rand(1).item() == numbers(1, 2)[1]


def test_an_unknown_state_is_an_error() -> None:
    with pytest.raises(Exception, match="cuda rng state nobody is not added"), tracker().fork("nobody"):
        pass


def test_recompute_draws_the_same_numbers_again() -> None:
    random = core("tensor_parallel.random")
    random.model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0)
    seen: list[Tensor] = []

    def inside(x: Tensor) -> Tensor:
        with random.get_cuda_rng_tracker().fork():
            seen.append(torch.rand(3))
        seen.append(torch.rand(3))
        return x * seen[-2] * seen[-1]

    x = torch.ones(3, requires_grad=True)
    random.checkpoint(inside, False, x).sum().backward()
    after = torch.rand(3)
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
    assert not torch.equal(after, seen[1])
    assert torch.equal(x.grad, seen[0] * seen[1])


def bridged() -> list[int]:
    prepare_megatron(cpu)
    inside = core("pipeline_parallel.bridge_communicator").dist
    assert inside.get_rank is dist.get_rank
    group, _ = inside.new_subgroups_by_enumeration([[0], [1]], backend="nccl")
    both, _ = inside.new_subgroups_by_enumeration([[0, 1]], backend="nccl")
    total = torch.tensor([dist.get_rank() + 1])
    inside.all_reduce(total, group=both)
    return [group.size(), both.size(), int(total)]


def test_the_bridge_between_components_asks_for_no_nccl(workers: Workers) -> None:
    assert workers.run(2, bridged) == [[1, 2, 3], [1, 2, 3]]


def test_moving_to_cuda_stays_here() -> None:
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert tensor.cuda(0, non_blocking=True) is tensor
    assert tensor.record_stream(None) is None


def test_types_are_called_cudas_inside_the_block_only() -> None:
    plain, half = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    original = Tensor.type
    with cuda_type_names(cpu):
        assert (plain.type(), half.type()) == ("torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor")
        assert plain.type(torch.float64).dtype == torch.float64
    assert Tensor.type is original
    with pytest.raises(ValueError, match="inside"), cuda_type_names(cpu):
        raise ValueError("inside")
    assert Tensor.type is original
    assert plain.type() == "torch.FloatTensor"
    with cuda_type_names(CUDA):
        assert Tensor.type is original
        assert plain.type() == "torch.FloatTensor"


def test_the_proxy_is_a_module_of_its_own() -> None:
    proxy = core("optimizer.clip_grads").torch
    assert isinstance(proxy, types.ModuleType)
    assert proxy is core("tensor_parallel.layers").torch
    assert sys.modules["torch"] is torch
