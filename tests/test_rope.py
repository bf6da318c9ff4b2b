"""Rotary embedding against transformers, over many settings, and its own laws."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from lf.models.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    Rope,
    RopeScaling,
    YarnScaling,
    inverse_frequencies,
    rope_table,
    rotate,
)
from lf.models.llm.rope_config import write_rope

MAX_LENGTH = 512

factors = st.floats(1.0, 64.0)
originals = st.integers(16, 65536)
weights = st.one_of(st.none(), st.floats(0.1, 2.0))

scalings = st.one_of(
    st.builds(LinearScaling, factor=factors),
    st.builds(DynamicScaling, factor=factors, original=st.just(MAX_LENGTH)),
    st.builds(
        lambda factor, low, step, original: Llama3Scaling(factor=factor, low=low, high=low + step, original=original),
        factors,
        st.floats(0.5, 2.0),
        st.floats(0.5, 8.0),
        originals,
    ),
    st.builds(
        YarnScaling,
        factor=factors,
        original=originals,
        beta_fast=st.floats(8.0, 64.0),
        beta_slow=st.floats(0.5, 4.0),
        attention_factor=weights,
        mscale=weights,
        mscale_all_dim=weights,
        truncate=st.booleans(),
    ),
)

ropes = st.builds(Rope, theta=st.floats(100.0, 1e7), fraction=st.sampled_from([1.0, 0.5, 0.25]), scaling=scalings)
head_dims = st.sampled_from([16, 24, 64, 72, 128, 256])


def hf_config(rope: Rope, head_dim: int) -> Any:
    parameters = write_rope(rope, MAX_LENGTH)["rope_parameters"]
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters=parameters,
    )


def hf_frequencies(rope: Rope, head_dim: int, length: int) -> tuple[torch.Tensor, float]:
    config = hf_config(rope, head_dim)
    frequencies, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, seq_len=length)
    return frequencies, factor


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rope=ropes, head_dim=head_dims, length=st.integers(1, 8 * MAX_LENGTH))
def test_frequencies_equal_those_of_transformers(rope: Rope, head_dim: int, length: int) -> None:
    ours, factor = inverse_frequencies(rope, head_dim, length)
    theirs, their_factor = hf_frequencies(rope, head_dim, length)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
    assert factor == pytest.approx(their_factor, rel=1e-6)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(theta=st.floats(100.0, 1e7), head_dim=head_dims)
def test_plain_frequencies_equal_those_of_transformers(theta: float, head_dim: int) -> None:
    ours, factor = inverse_frequencies(Rope(theta=theta), head_dim, 7)
    theirs, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(hf_config(Rope(theta=theta), head_dim))
    assert torch.equal(ours, theirs)
    assert factor == 1.0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rope=ropes, head_dim=head_dims, seed=st.integers(0, 99), longest=st.integers(2, 4 * MAX_LENGTH))
def test_table_equals_the_rotary_module_of_transformers(rope: Rope, head_dim: int, seed: int, longest: int) -> None:
    positions = torch.randint(0, longest, (2, 9), generator=torch.Generator().manual_seed(seed))
    positions[0, 0] = longest - 1
    table = rope_table(rope, head_dim, positions, longest)
    cos, sin = LlamaRotaryEmbedding(hf_config(rope, head_dim))(torch.zeros(1), positions)
    assert table.shape == (2, 9, 2, 1, cos.shape[-1])
    assert table.dtype == torch.float32
    # transformers grows the base of dynamic scaling in fp32, so angles differ by 1e-7 of up to 2048 radians.
    atol = 1e-3 if isinstance(rope.scaling, DynamicScaling) else 1e-5
    torch.testing.assert_close(table[0, :, :, 0], cos.transpose(0, 1), rtol=0.0, atol=atol)
    torch.testing.assert_close(table[1, :, :, 0], sin.transpose(0, 1), rtol=0.0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate_is_bitwise_that_of_transformers(dtype: torch.dtype) -> None:
    rope, positions = Rope(theta=1e6), torch.arange(11).expand(3, 11) + torch.tensor([[0], [5], [900]])
    x = torch.randn(11, 3, 4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    turned = rotate(x, rope_table(rope, 16, positions, 911))
    cos, sin = LlamaRotaryEmbedding(hf_config(rope, 16))(x, positions)
    theirs, _ = apply_rotary_pos_emb(x.permute(1, 2, 0, 3), x.permute(1, 2, 0, 3), cos, sin)
    assert turned.dtype == dtype
    assert torch.equal(turned, theirs.permute(2, 0, 1, 3))


def test_partial_rotation_leaves_the_rest_of_the_head() -> None:
    x = torch.randn(5, 2, 3, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5).expand(2, 5)
    turned = rotate(x, rope_table(Rope(fraction=0.25), 16, positions, 5))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], rotate(x[..., :4], rope_table(Rope(), 4, positions, 5)))
    assert not torch.equal(turned[1:, ..., :4], x[1:, ..., :4])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(rope=ropes, shift=st.integers(1, 400))
def test_scores_depend_on_distance_alone(rope: Rope, shift: int) -> None:
    rope = attrs.evolve(rope, scaling=NoScaling()) if isinstance(rope.scaling, YarnScaling) else rope
    q, k = torch.randn(2, 6, 1, 1, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = []
    for start in (0, shift):
        table = rope_table(rope, 16, torch.arange(start, start + 6)[None], 1000)
        scores.append(torch.einsum("sbhd,tbhd->st", rotate(q, table), rotate(k, table)))
    torch.testing.assert_close(scores[0], scores[1], rtol=0.0, atol=1e-3)


def test_dynamic_scaling_starts_beyond_the_original_length() -> None:
    rope = Rope(scaling=DynamicScaling(factor=4.0, original=64))
    plain, _ = inverse_frequencies(Rope(), 16, 64)
    for length in (1, 63, 64):
        assert torch.equal(inverse_frequencies(rope, 16, length)[0], plain)
    assert (inverse_frequencies(rope, 16, 65)[0][1:] < plain[1:]).all()
    assert (inverse_frequencies(rope, 16, 200)[0][1:] < inverse_frequencies(rope, 16, 100)[0][1:]).all()


@pytest.mark.parametrize(("fraction", "head_dim"), [(1.0, 7), (0.5, 6), (0.1, 16)])
def test_dims_without_pairs_are_refused(fraction: float, head_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"rope.fraction = {fraction} of attention.head_dim = {head_dim}"):
        inverse_frequencies(Rope(fraction=fraction), head_dim, 8)


def test_dynamic_scaling_refuses_a_single_pair() -> None:
    with pytest.raises(ValueError, match="more than 2 rotated dims"):
        inverse_frequencies(Rope(scaling=DynamicScaling(factor=2.0, original=8)), 2, 9)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Rope(theta=1.0), "theta"),
        (lambda: Rope(fraction=0.0), "fraction"),
        (lambda: Rope(fraction=1.5), "fraction"),
        (lambda: LinearScaling(factor=0.0), "factor"),
        (lambda: Llama3Scaling(factor=8.0, low=4.0, high=4.0), "high = 4.0"),
        (lambda: YarnScaling(factor=4.0, original=32, beta_fast=1.0, beta_slow=2.0), "beta_fast = 1.0"),
        (lambda: YarnScaling(factor=4.0, original=0), "original"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_scaling_without_a_rule_says_what_to_register() -> None:
    @attrs.frozen(kw_only=True)
    class Mine(RopeScaling):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine.*@scaled_frequencies.register"):
        inverse_frequencies(Rope(scaling=Mine()), 8, 8)
