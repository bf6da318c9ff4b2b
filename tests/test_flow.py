"""Flow matching: distributions of times, shifts, experts, weights and draws; and the packing of samples of any size."""

import math

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lf.models import spec
from lf.models.diffusion import flow, packed
from lf.models.diffusion.flow import ConstantShift, Flow, LogitNormal, Mode, Sampling, TokenShift, Uniform
from lf.models.diffusion.latent import fake_rows
from lf.models.diffusion.packed import Packing
from lf.models.diffusion.wan import wan_tiny
from tests.latent_tools import batch_of, tiny

SAMPLERS = {
    "uniform": Uniform(),
    "logit-normal": LogitNormal(mean=0.4, std=0.8),
    "mode": Mode(scale=1.29),
    "ends": Mode(scale=-0.8),
}

# Times


def published(name: str, rng: np.random.Generator, count: int) -> np.ndarray:
    """Returns draws by the published formulas, which draw forward and invert nothing."""
    if name == "uniform":
        return rng.random(count)
    if name == "logit-normal":
        return 1.0 / (1.0 + np.exp(-rng.normal(0.4, 0.8, count)))
    scale, u = SAMPLERS[name].scale, rng.random(count)
    return 1.0 - u - scale * (np.cos(np.pi * u / 2.0) ** 2 - 1.0 + u)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_times_follow_the_published_distribution(name: str, shift: float) -> None:
    rng = np.random.default_rng(0)
    chosen = Flow(sampler=SAMPLERS[name], shift=ConstantShift(factor=shift))
    ours = np.sort([flow.time_of(chosen, 64, part) for part in rng.random(2000)])
    theirs = published(name, rng, 200_000)
    theirs = np.sort(shift * theirs / (1.0 + (shift - 1.0) * theirs))
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand.
    below = np.searchsorted(theirs, ours) / len(theirs)
    assert np.abs(below - np.arange(2000) / 2000).max() < 1.95 / 2000**0.5
    # Chi-square over twenty equally likely bins: 43.8 is exceeded once in a thousand.
    counts = np.histogram(below, bins=20, range=(0.0, 1.0))[0]
    assert ((counts - 100.0) ** 2 / 100.0).sum() < 43.8


@pytest.mark.parametrize("name", SAMPLERS)
def test_experts_share_the_times_of_one_model(name: str) -> None:
    whole = Flow(sampler=SAMPLERS[name], shift=ConstantShift(factor=5.0))
    high, low = flow.high_part(whole, 0.875), flow.low_part(whole, 0.875)
    assert (low.low, low.high, high.low, high.high) == (0.0, 0.875, 0.875, 1.0)
    parts = [(i + 0.5) / 400 for i in range(400)]
    times = [flow.time_of(whole, 64, part) for part in parts]
    edge = sum(time < 0.875 for time in times)
    assert 0 < edge < 400
    # Each has the whole model's distribution where it works: the same quantiles, in its own share of them.
    share = flow.part_below(whole.sampler, flow.shifted(0.875, 1 / 5.0))
    assert abs(share - edge / 400) < 0.01
    for part in (0.1, 0.5, 0.9):
        assert flow.time_of(low, 64, part) == pytest.approx(flow.time_of(whole, 64, share * part), abs=1e-9)
        at = share + (1.0 - share) * part
        assert flow.time_of(high, 64, part) == pytest.approx(flow.time_of(whole, 64, at), abs=1e-9)
    assert all(0.0 <= flow.time_of(low, 64, part) <= 0.875 <= flow.time_of(high, 64, part) <= 1.0 for part in parts)


def test_quantiles_rise_and_parts_invert_them() -> None:
    for sampler in SAMPLERS.values():
        made = [flow.quantile(sampler, part / 50) for part in range(51)]
        assert made == sorted(made)
        assert (made[0], made[-1]) == (pytest.approx(0.0, abs=1e-12), pytest.approx(1.0))
        assert flow.part_below(sampler, flow.quantile(sampler, 0.3)) == pytest.approx(0.3)


def test_shifts_grow_with_the_tokens() -> None:
    shift = TokenShift(tokens=(256, 4096), log_factor=(0.5, 1.15))
    for tokens, log in ((256, 0.5), (4096, 1.15), (2176, 0.825)):
        # Flux and Qwen-Image state it as exp(m) / (exp(m) + 1 / t - 1).
        factor = flow.shift_factor(shift, tokens)
        assert flow.shifted(0.3, factor) == pytest.approx(math.exp(log) / (math.exp(log) + 1 / 0.3 - 1.0))
    chosen = Flow(shift=shift)
    assert flow.time_of(chosen, 256, 0.5) < flow.time_of(chosen, 4096, 0.5)


def test_weights_are_the_published_ones() -> None:
    def weight(kind: flow.Weighting, time: float) -> float:
        return flow.weight_of(Flow(weighting=kind, gamma=5.0), time)

    assert weight("none", 0.7) == 1.0
    assert weight("sigma_sqrt", 0.5) == 4.0
    assert weight("cosmap", 0.5) == pytest.approx(2 / (math.pi * 0.5))
    grid = [weight("bell", (i + 0.5) / 1000) for i in range(1000)]
    assert sum(grid) / 1000 == pytest.approx(1.0, abs=1e-5)
    assert (weight("bell", 0.0), weight("bell", 1.0)) == (pytest.approx(0.0), pytest.approx(0.0))
    # DiffSynth's table of a thousand times has the same peak.
    assert max(grid) == pytest.approx(1.580, abs=1e-3)
    for time in (0.1, 0.5, 0.9):
        snr = ((1 - time) / time) ** 2
        assert weight("min_snr", time) == pytest.approx(min(snr, 5.0) * time**2)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: flow.high_part(Flow(), 1.0), "boundary = 1.0 must lie between 0 and 1"),
        (lambda: flow.low_part(Flow(), 0.0), "boundary = 0.0 must lie between 0 and 1"),
        (lambda: flow.high_part(Flow(), 875.0), "boundary = 875.0"),
        (lambda: Flow(low=0.6, high=0.5), "flow.low = 0.6 must be below flow.high = 0.5"),
        (lambda: Flow(caption_dropout=1.0), "caption_dropout"),
        (lambda: Mode(scale=2.0), "scale"),
        (lambda: TokenShift(tokens=(4096, 256)), "must rise"),
        (lambda: Sampling(guidance=0.5), "guidance"),
    ],
)
def test_what_cannot_be_is_refused(make: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()  # type: ignore[operator]


def test_a_thousand_times_stay_a_thousand() -> None:
    """Also in a model that computes in bfloat16, where a cast would leave 294."""
    times = torch.tensor([flow.shifted(i / 1000, 5.0) for i in range(1, 1001)])
    assert len((times * 1000).bfloat16().unique()) < 300
    model, seen = tiny(wan_tiny, dtype=torch.bfloat16), []
    model.time.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    grids = ((1, 1, 1),) * 1000
    packing = Packing(grids=tuple((grid,) for grid in grids), texts=(1,) * 1000, runs=((1,),) * 1000)
    with torch.no_grad():
        told = model(torch.ones(1000, 16), times, torch.ones(1000, 16), packing)
    ((given, embedded),) = seen
    assert given.dtype == embedded.dtype == torch.float32
    assert len(given.unique()) == len(embedded.unique(dim=0)) == 1000
    assert told.dtype == torch.float32
    drawn = batch_of(wan_tiny, [{**row, "id": str(i)} for i, row in enumerate(fake_rows(wan_tiny.space, 1, 0) * 300)])
    assert drawn["time"].dtype == drawn["sigma"].dtype == drawn["noise"].dtype == torch.float32
    assert len(drawn["time"].unique()) == 300


# Draws


def test_draws_are_functions_of_seed_step_and_sample() -> None:
    rows = fake_rows(wan_tiny.space, 4, 0)
    cfg = attrs.evolve(wan_tiny, flow=attrs.evolve(wan_tiny.flow, caption_dropout=0.5))
    whole, alone = batch_of(cfg, [*rows]), batch_of(cfg, [rows[2], rows[0]])
    for name, lengths in (("noise", "lengths"), ("sigma", "lengths"), ("weight", "lengths"), ("text", "texts")):
        parts = whole[name].split(getattr(whole["packing"], lengths))
        assert torch.equal(torch.cat((parts[2], parts[0])), alone[name])
    for seed, step in ((4, 5), (3, 6)):
        other = spec.draw(cfg, alone, seed, step)
        assert not torch.equal(other["noise"], alone["noise"])
        assert not torch.equal(other["time"], alone["time"])


def test_captions_are_dropped_as_often_as_asked() -> None:
    cfg = attrs.evolve(wan_tiny, padding="masked", flow=attrs.evolve(wan_tiny.flow, caption_dropout=0.25))
    (row,) = fake_rows(cfg.space, 1, 0)
    row["text"] = torch.zeros(3, 16)
    batch = batch_of(cfg, [{**row, "id": str(i)} for i in range(800)])
    texts = batch["text"].split(batch["packing"].texts)
    dropped = [len(text) == 1 and bool((text == 0.5).all()) for text in texts]
    assert all(drop or (len(text) == 3 and not text.any()) for drop, text in zip(dropped, texts, strict=True))
    # Four deviations of a binomial.
    assert abs(sum(dropped) - 200) < 4 * (800 * 0.25 * 0.75) ** 0.5
    with pytest.raises(ValueError, match=r"caption_dropout = 0.25, but the row has no `empty`"):
        batch_of(cfg, [{**row, "empty": None}])


def test_noise_is_normal_and_given_tokens_have_none() -> None:
    row = {**fake_rows(wan_tiny.space, 1, 0)[0], "latents": torch.ones(4, 3, 32, 32), "given": 1}
    batch = batch_of(wan_tiny, [row])
    noised = batch["noised"]
    assert int(noised.sum()) == 2 * 16 * 16
    assert abs(float(batch["noise"].mean())) < 4 / batch["noise"].numel() ** 0.5
    assert abs(float(batch["noise"].std()) - 1.0) < 0.03
    assert (batch["sigma"][~noised] == 0).all()
    assert (batch["sigma"][noised] == batch["time"][1]).all()
    assert batch["time"][0] == 0.0
    assert batch["weight"].sum() == pytest.approx(1.0)
    x = flow.noisy(batch["latents"], batch["noise"], batch["sigma"])
    assert torch.equal(x[~noised], batch["latents"][~noised])


def test_the_schedule_goes_from_noise_to_data() -> None:
    times = flow.schedule(Sampling(steps=4, shift=ConstantShift(factor=3.0)), 64)
    assert (times[0], times[-1]) == (1.0, 0.0)
    assert list(times) == sorted(times, reverse=True)
    assert times[2] == pytest.approx(0.75)


# Packing


@pytest.mark.parametrize("first", [True, False])
def test_patches_come_back(first: bool) -> None:
    latent = torch.randn(3, 4, 6, 2, generator=torch.Generator().manual_seed(0))
    tokens = packed.patchify(latent, (2, 3, 1), first)
    assert tokens.shape == (2 * 2 * 2, 18)
    assert torch.equal(packed.unpatchify(tokens, (2, 2, 2), (2, 3, 1), first), latent)
    # The first token is the first patch, and its first numbers are channels of a place, or places of a channel.
    corner = latent[:, :2, :3, :1]
    assert torch.equal(tokens[0], corner.flatten() if first else corner.flatten(1).t().flatten())


def test_patches_are_those_of_the_convolution() -> None:
    from lf.models.diffusion.wan_model import PatchEmbedding

    layer = PatchEmbedding(5, 7, (1, 2, 3))
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(layer.weight, generator=generator)
    latent = torch.randn(5, 2, 4, 6, generator=generator)
    ours = layer(packed.patchify(latent, (1, 2, 3), False))
    theirs = F.conv3d(latent[None], layer.weight, layer.bias, stride=(1, 2, 3))[0].flatten(1).t()
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("runs", [(2, 3, 1), (2, 2, 2)])
def test_runs_are_modulated_each_by_its_own(runs: tuple[int, ...]) -> None:
    x, branch = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    shift, scale = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(runs))
    assert torch.allclose(packed.modulate(x, shift, scale, runs), x * (1 + scale[owner]) + shift[owner])
    assert torch.allclose(packed.add_gated(x, branch, shift, runs), x + branch * shift[owner])


@pytest.mark.parametrize(("queries", "keys"), [((2, 3, 1), (1, 4, 2)), ((2, 2, 2), (3, 3, 3)), ((0, 4, 2), (2, 1, 3))])
def test_samples_attend_to_themselves_alone(queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(n), 2, 4, generator=generator) for n in (queries, keys, keys))
    of_q, of_k = (torch.repeat_interleave(torch.arange(3), torch.tensor(n)) for n in (queries, keys))
    scores = torch.einsum("qnd,knd->nqk", q, k) / 2.0
    weight = scores.masked_fill(of_q[:, None] != of_k, -torch.inf).softmax(-1)
    expected = torch.einsum("nqk,knd->qnd", weight, v).flatten(1)
    assert torch.allclose(packed.attend(q, k, v, queries, keys), expected, atol=1e-6)


def test_two_streams_come_apart_again() -> None:
    one, other = torch.arange(5.0)[:, None], -torch.arange(6.0)[:, None]
    joint = packed.interleave((one, other), ((2, 3), (1, 5)))
    assert joint.flatten().tolist() == [0, 1, -0.0, 2, 3, 4, -1, -2, -3, -4, -5]
    again = packed.separate(joint, ((2, 3), (1, 5)))
    assert torch.equal(again[0], one)
    assert torch.equal(again[1], other)


def test_rotation_turns_pairs_and_its_backward_turns_back() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    table = torch.stack((angle.cos(), angle.sin()))[:, :, None]
    pairs = (
        torch.view_as_complex(x.detach().unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    assert torch.allclose(packed.rotate_pairs(x, table), torch.view_as_real(pairs).flatten(-2))
    assert torch.autograd.gradcheck(lambda t: packed.rotate_pairs(t, table), (x,))
