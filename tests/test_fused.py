"""Functions with a backward of their own, against torch's: values, gradients, dtypes and layouts."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from lf.models.layers.fused import geglu, rms_norm, swiglu
from lf.models.layers.loss import token_losses
from lf.models.layers.rope import rotate
from lf.models.spec import IGNORE
from tests.cases import ALONE


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return draw(*shape, seed=seed, dtype=dtype).requires_grad_()


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Returns the value of a function and its gradients, for a gradient that differs everywhere."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, draw(*out.shape, seed=9, dtype=out.dtype))


def torch_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def torch_geglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def torch_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@pytest.mark.parametrize("shape", [(6,), (5, 3, 8), (2, 1, 2, 4)])
def test_gradients_are_those_of_finite_differences(shape: tuple[int, ...]) -> None:
    table = draw(2, *shape, seed=2, dtype=torch.float64)
    assert gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (leaf(*shape), leaf(shape[-1], seed=1)))
    assert gradcheck(lambda x: rms_norm(x, None, 1e-3), (leaf(*shape),))
    assert gradcheck(swiglu, (leaf(*shape),))
    assert gradcheck(geglu, (leaf(*shape),))
    assert gradcheck(lambda x: rotate(x, table), (leaf(*shape),))
    assert gradcheck(lambda x: rotate(x, table[..., :2]), (leaf(*shape),))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.integers(1, 40), width=st.integers(1, 70).map(lambda n: 2 * n), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_values_and_gradients_are_those_of_torch(rows: int, width: int, scale: float) -> None:
    x, weight, (cos, sin) = draw(rows, 3, width) * scale, draw(width, seed=1), draw(2, rows, 3, width, seed=2)
    pairs = [
        (
            gradients(lambda x, w: rms_norm(x, w, 1e-6), x, weight),
            gradients(lambda x, w: F.rms_norm(x, (width,), w, 1e-6), x, weight),
        ),
        (
            gradients(lambda x: rms_norm(x, None, 1e-6), x),
            gradients(lambda x: F.rms_norm(x, (width,), None, 1e-6), x),
        ),
        (gradients(swiglu, x), gradients(torch_swiglu, x)),
        (gradients(geglu, x), gradients(torch_geglu, x)),
        (
            gradients(lambda x: rotate(x, torch.stack((cos, sin))), x),
            gradients(lambda x: torch_rotate(x, cos, sin), x),
        ),
    ]
    for ours, theirs in pairs:
        for value, reference in zip(ours, theirs, strict=True):
            torch.testing.assert_close(value, reference, rtol=0.0, atol=2e-6 * float(reference.abs().max()))


def test_a_slice_of_a_wider_tensor_is_as_good_as_a_copy() -> None:
    wide = draw(4, 3, 2, 12)
    x, weight, table = wide[..., 3:9], draw(6, seed=1), draw(2, 4, 3, 1, 6, seed=2)
    for function in (
        lambda x: rms_norm(x, weight, 1e-6),
        lambda x: rms_norm(x, None, 1e-6),
        swiglu,
        geglu,
        lambda x: rotate(x, table),
    ):
        for value, reference in zip(gradients(function, x), gradients(function, x.contiguous()), strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-6, atol=1e-6)


def test_half_precision_keeps_its_dtype_and_is_computed_in_float32() -> None:
    x, weight = draw(7, 64, dtype=torch.bfloat16), draw(64, seed=1, dtype=torch.bfloat16)
    values = gradients(lambda x, w: rms_norm(x, w, 1e-6), x, weight)
    references = gradients(lambda x, w: rms_norm(x, w, 1e-6), x.float(), weight.float())
    for value, reference in zip(values, references, strict=True):
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.float(), reference, rtol=2e-2, atol=2e-2)
    assert torch.equal(values[0], references[0].bfloat16())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 4),
    length=st.integers(1, 9),
    vocab=st.integers(2, 40),
    padding=st.integers(0, 5),
    data=st.data(),
)
def test_losses_are_those_of_torch(rows: int, length: int, vocab: int, padding: int, data: st.DataObject) -> None:
    labels = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.one_of(st.just(IGNORE), st.integers(0, vocab - 1)), min_size=length, max_size=length),
                min_size=rows,
                max_size=rows,
            )
        )
    )
    logits = draw(length, rows, vocab + padding) * 4
    losses, grad = gradients(lambda z: token_losses(z, labels, vocab, IGNORE, ALONE), logits)

    def reference(z: Tensor) -> Tensor:
        return F.cross_entropy(z[..., :vocab].permute(1, 2, 0), labels, ignore_index=IGNORE, reduction="none")

    their_losses, their_grad = gradients(reference, logits)
    torch.testing.assert_close(losses, their_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, their_grad, rtol=1e-6, atol=1e-6)
    assert not losses[labels == IGNORE].any()
    assert not grad.transpose(0, 1)[labels == IGNORE].any()
    assert not grad[..., vocab:].any()


def test_a_second_backward_through_a_loss_is_refused() -> None:
    loss = token_losses(leaf(3, 1, 5, dtype=torch.float32), torch.tensor([[0, 1, 2]]), 5, IGNORE, ALONE).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
