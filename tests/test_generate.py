"""Continuing a text: as transformers does greedily, equal with and without the cache, and drawn as it should be."""

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lf
from lf.data.hf_tokenizer import read_tokenizer
from lf.devices.cpu import cpu
from lf.models import generate as module
from lf.models.decoder import DecoderConfig
from lf.models.generate import Sampling, allowance, choose, distribution, generate, stream_text
from lf.models.layers.rope import DynamicScaling, Rope, YarnScaling
from lf.models.spec import Batch, build_model, forward
from lf.models.toy import Toy
from lf.train.checkpoint import CheckpointError
from lf.train.convert import import_folder
from lf.train.start import load_model, open_start
from lf.train.start import local_context as context
from lf.train.state import initial_value
from scripts.generate import main
from tests.cases import DENSE
from tests.moe_cases import MODELS as SPARSE
from tests.test_convert import write_tokenizer
from tests.test_train import go, small_run
from tests.vlm_cases import IMAGE
from tests.vlm_cases import MODELS as PICTURED
from tests.workers import Workers

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden" / "hf"
PROMPT = (5, 17, 3, 99, 42, 8, 64)

quick = settings(max_examples=50, deadline=None, derandomize=True)


def built(cfg: DecoderConfig) -> nn.Module:
    """The model with weights wide enough for attention to matter."""
    from lf.parallel.megatron import placements

    ctx = context(cfg, cpu)
    model = build_model(cfg, ctx)
    with torch.no_grad():
        for param, placed in placements(model, ctx):
            param.copy_(initial_value(attrs.evolve(cfg, init_std=0.3), 0, placed, param, None))
    return model


def continued(cfg: DecoderConfig, model: nn.Module, prompt: Sequence[int] = PROMPT, **how: Any) -> list[int]:
    eos = how.pop("eos", None)
    return list(generate(cfg, model, prompt, Sampling(**how), eos=eos, device="cpu"))


@pytest.mark.parametrize(
    "family", ["llama", "llama31", "qwen2", "qwen3", "qwen2_moe", "deepseek_v2", "deepseek_v3", "minimax_m2"]
)
def test_greedy_is_that_of_transformers(one_process: None, family: str) -> None:
    from transformers import AutoModelForCausalLM

    start = open_start(str(GOLDEN / family), None)
    assert isinstance(start.model, DecoderConfig)
    model = load_model(start, context(start.model, cpu))
    peer = AutoModelForCausalLM.from_pretrained(GOLDEN / family)
    peer.generation_config.eos_token_id = None

    def reference(prompt: Sequence[int], **how: Any) -> list[int]:
        ids = torch.tensor([prompt])
        made = peer.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **how)
        return made[0, len(prompt) :].tolist()

    for prompt in (PROMPT, PROMPT[:1]):
        ours = continued(start.model, model, prompt, tokens=40)
        assert ours == reference(prompt, max_new_tokens=40)
        stop = ours[5]
        cut = continued(start.model, model, prompt, tokens=40, eos=stop)
        assert cut == ours[: ours.index(stop)]
        assert [*cut, stop] == reference(prompt, max_new_tokens=40, eos_token_id=stop)


def attention(**changes: Any) -> DecoderConfig:
    return attrs.evolve(DENSE, attention=attrs.evolve(DENSE.attention, **changes))


MODELS = {
    "full attention": DENSE,
    "some layers with a window": attention(window=4, window_layers=(1,)),
    "a window of one key": attention(window=1, window_layers=(0, 1)),
    "dynamic rope": attrs.evolve(DENSE, rope=Rope(scaling=DynamicScaling(factor=4.0, original=8)), max_length=8 * 8),
    "yarn": attrs.evolve(DENSE, rope=Rope(scaling=YarnScaling(factor=4.0, original=8))),
    "padded vocabulary": attrs.evolve(DENSE, vocab_multiple=64),
    "experts, latent attention": attrs.evolve(SPARSE["all"], layers=2),
}


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["prompt", "one token"])
@pytest.mark.parametrize("name", MODELS)
def test_the_cache_changes_nothing(
    one_process: None, monkeypatch: pytest.MonkeyPatch, name: str, prompt: tuple[int, ...]
) -> None:
    cfg, steps = MODELS[name], 24
    model = built(cfg)
    logits: list[Tensor] = []
    lengths: list[int] = []

    def watched_choice(logits_V: Tensor, how: Sampling, generator: torch.Generator) -> int:
        assert not logits_V.requires_grad
        logits.append(logits_V)
        return choose(logits_V, how, generator)

    def watched_forward(cfg: DecoderConfig, model: nn.Module, batch: Batch) -> Tensor:
        lengths.append(batch["tokens"].shape[1])
        return forward(cfg, model, batch)

    monkeypatch.setattr(module, "choose", watched_choice)
    monkeypatch.setattr(module, "forward", watched_forward)
    cached = continued(cfg, model, prompt, tokens=steps, temperature=1.0)
    growing = [len(prompt) + i for i in range(steps)]
    assert lengths == (growing if name == "dynamic rope" else [len(prompt)] + [1] * (steps - 1))
    monkeypatch.setattr(module, "_cache", lambda cfg, model: contextlib.nullcontext(False))
    assert continued(cfg, model, prompt, tokens=steps, temperature=1.0) == cached
    assert lengths[steps:] == growing
    assert len(set(cached)) > 9
    for one, other in zip(logits[:steps], logits[steps:], strict=True):
        assert one.shape == (cfg.vocab,)
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


def test_padded_vocabulary_is_never_drawn(one_process: None) -> None:
    cfg = attrs.evolve(DENSE, vocab_multiple=1024)
    ids = continued(cfg, built(cfg), tokens=60, temperature=50.0)
    assert max(ids) < cfg.vocab
    assert len(set(ids)) > 20


def test_draws_follow_the_seed(one_process: None) -> None:
    model = built(DENSE)
    first, again, other = (continued(DENSE, model, tokens=30, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_a_generator_leaves_the_model_and_torch_as_they_were(one_process: None) -> None:
    model = built(DENSE)
    model.train()
    ids = generate(DENSE, model, PROMPT, Sampling(tokens=9), eos=None, device="cpu")
    next(ids)
    assert torch.is_grad_enabled()
    assert not model.training
    ids.close()  # type: ignore[attr-defined]
    assert model.training
    # A second text does not see the first.
    assert continued(DENSE, model, tokens=5) == continued(DENSE, model, tokens=5)


def test_a_text_ends_at_the_length_of_the_model(one_process: None) -> None:
    cfg = attrs.evolve(DENSE, max_length=10)
    model = built(cfg)
    assert len(continued(cfg, model, tokens=50)) == 3
    assert len(continued(cfg, model, tokens=2)) == 2
    for prompt, said in (
        ((), "the prompt has no tokens"),
        ((1,) * 10, r"the prompt has 10 tokens, .* model\.max_length = 10; shorten it"),
        ((1, 131), r"model\.vocab = 131, but the data has token id 131"),
    ):
        with pytest.raises(ValueError, match=said):
            generate(cfg, model, prompt, Sampling(), eos=None, device="cpu")
    assert allowance(Toy(), (1,) * 9999, Sampling(tokens=7)) == 7


def test_a_model_that_gives_no_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="logits are not finite"):
        choose(torch.tensor([0.0, float("nan")]), Sampling(), torch.Generator())
    with pytest.raises(ValueError, match=r"top_p = 0\.5 does nothing at temperature"):
        Sampling(top_p=0.5)


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12),
    temperature=st.floats(0.05, 5.0),
    top_p=st.floats(0.001, 1.0),
)
@quick
def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it(
    logits: list[float], temperature: float, top_p: float
) -> None:
    values = torch.tensor(logits)
    full = torch.softmax(values.double() / temperature, -1)
    made = distribution(values, Sampling(temperature=temperature, top_p=top_p))
    kept = made > 0
    assert float(made.sum()) == pytest.approx(1.0)
    assert torch.allclose(made, torch.where(kept, full, 0.0) / full[kept].sum())
    mass = float(full[kept].sum())
    assert mass >= top_p - 1e-9
    assert mass - float(full[kept].min()) < top_p + 1e-9
    if not bool(kept.all()):
        assert float(full[~kept].max()) <= float(full[kept].min())


def test_any_temperature_above_zero_gives_a_distribution() -> None:
    tied = torch.tensor([1.0, 3.0, 3.0])
    made = distribution(tied, Sampling(temperature=1e-300))
    assert made.tolist() == [0.0, 0.5, 0.5]
    assert distribution(tied, Sampling(temperature=1e9)).tolist() == pytest.approx([1 / 3] * 3)


def test_tokens_are_drawn_as_often_as_they_should_be() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -30.0])
    how = Sampling(temperature=0.7, top_p=0.95)
    expected = distribution(logits, how)
    generator = torch.Generator().manual_seed(0)
    count = 4000
    drawn = torch.bincount(torch.tensor([choose(logits, how, generator) for _ in range(count)]), minlength=5)
    spread = (expected * (1 - expected) / count).sqrt()
    assert bool(((drawn / count - expected).abs() <= 4 * spread).all())
    assert (expected > 0).sum() == 3


def byte_tokens(text: str) -> list[int]:
    return list(text.encode())


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.text(max_size=20))
@quick
def test_streamed_text_has_whole_characters_only(prompt: str, text: str) -> None:
    parts = list(stream_text(decode_bytes, byte_tokens(prompt), byte_tokens(text)))
    assert "".join(parts) == text
    assert "\ufffd" in prompt + text or not any("\ufffd" in part for part in parts)


def test_streamed_text_may_break_off_and_start_with_a_space() -> None:
    assert list(stream_text(decode_bytes, byte_tokens("a"), b"b\xe4\xbd")) == ["b", "\ufffd"]
    assert "".join(stream_text(decode_bytes, byte_tokens("a"), b"\xffb\xf0\x9f\x91\x8dc")) == "\ufffdb👍c"
    words = ["▁Hello", "▁big", "▁world", "!"]

    def sentencepiece(ids: Sequence[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert list(stream_text(sentencepiece, [0], [1, 2, 3] + [2] * 40))[:5] == [
        " big",
        " world",
        "!",
        " world",
        " world",
    ]


def test_text_comes_before_the_next_token_is_asked_for() -> None:
    asked = []

    def ids() -> Iterator[int]:
        for token in b"xyz":
            asked.append(token)
            yield token

    stream = stream_text(decode_bytes, b"a", ids())
    assert next(stream) == "x"
    assert asked == [ord("x")]


def script(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "scripts/generate.py", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main([*map(str, args)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_the_script_takes_a_converted_folder(
    one_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = shutil.copytree(GOLDEN / "llama", tmp_path / "hf")
    said = refused(capsys, original, "--prompt", "x")
    assert said.startswith(f"error: tokenizer '{original}': there is no tokenizer.json")
    write_tokenizer(original)
    import_folder(original, tmp_path / "lf")
    start, tokenizer = open_start(str(original), None), read_tokenizer(original)
    model = load_model(start, context(start.model, cpu))
    prompt = tokenizer.encode_batch(["if(x):"])[0]
    how = {"tokens": 20, "temperature": 1.5, "top_p": 0.9, "seed": 3}
    assert isinstance(start.model, DecoderConfig)
    expected = tokenizer.decode([*prompt, *continued(start.model, model, prompt, eos=tokenizer.eos, **how)])
    flags = [text for key, value in how.items() for text in (f"--{key.replace('_', '-')}", value)]
    done = script(tmp_path / "lf", "--prompt", "if(x):", "--device", "cpu", *flags)
    assert done.returncode == 0, done.stderr
    assert "if(x):" + done.stdout == expected + "\n"
    assert refused(capsys, tmp_path / "lf", "--prompt", "x" * 256).startswith("error: the prompt has 256 tokens")
    assert refused(capsys, tmp_path, "--prompt", "x").startswith(f"error: {tmp_path / 'config.json'} is missing")


def test_weights_that_are_not_finite_are_refused_by_name(one_process: None, tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "llama", tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told = f"{folder}: model.layers.1.self_attn.k_proj.weight has values that are not finite; the file is damaged"
    start = open_start(str(folder), None)
    with pytest.raises(ValueError, match=re.escape(told)):
        load_model(start, context(start.model, cpu))
    with pytest.raises(CheckpointError, match=re.escape(told)):
        import_folder(folder, tmp_path / "lf")
    assert not (tmp_path / "lf").exists()


def test_the_script_takes_a_run_folder(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / "text" / f"{i}.txt").write_text(" ".join(f"word{(i * j) % 17} = {j}" for j in range(5, 60)))
    run = small_run(tmp_path / "text", "toy", steps=2, log=lf.Log())
    workers.run(1, go, run, tmp_path / "run", tmp_path)
    done = script(tmp_path / "run", "--prompt", "word1 = ", "--tokens", 5)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    for flags in (("--prompt", ""), ("--prompt", "x", "--top-p", "1.5"), ("--prompt", "x", "--tokens", "0"), ()):
        with pytest.raises(SystemExit) as caught:
            main([str(tmp_path / "run"), *flags])
        assert caught.value.code == 2


def test_a_prompt_with_the_tokens_of_pictures_is_refused() -> None:
    with pytest.raises(ValueError, match="and none is given; leave them out"):
        allowance(PICTURED["levels"], [1, IMAGE, 2], Sampling())
    assert allowance(PICTURED["levels"], [1, 2], Sampling(tokens=3)) == 3
