"""Adapters of diffusion models: trained alone, exported in the names of PEFT and diffusers, computed alike there."""

import json
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lf
from lf.models import spec
from lf.models.diffusion.latent import LatentModel
from lf.models.diffusion.qwen_image import qwen_image_tiny
from lf.models.diffusion.wan import wan_tiny
from lf.models.lora import adapt, weight_of
from lf.models.peft import DIFFUSERS
from tests.cases import off
from tests.latent_tools import FakeLatents, tiny, write_base
from tests.test_train import go

LORA = lf.Lora(rank=2, alpha=6.0, targets=("blocks.*attention.q", "blocks.*attention.out", "blocks.*.mlp.*"))
QWEN = attrs.evolve(LORA, targets=("blocks.*.image.q", "blocks.*.image.mlp.*"))


def run_of(cfg: LatentModel, lora: lf.Lora, folder: Path, kind: str) -> lf.Run:
    write_base(cfg, folder)
    return lf.Run(
        model=cfg,
        init=str(folder),
        data=FakeLatents(kind=kind),
        batch=2,
        steps=2,
        adapt=lora,
        optim=lf.AdamW(lr=0.05, schedule=lf.Constant()),
        parallel=lf.TorchParallel(micro_batch=2),
        save=lf.Save(lora="both"),
    )


def peer(folder: Path) -> nn.Module:
    """Returns diffusers' model of a folder."""
    import diffusers

    config = json.loads((folder / "config.json").read_text())
    model: nn.Module = getattr(diffusers, config["_class_name"]).from_config(config)
    model.load_state_dict(load_file(folder / "diffusion_pytorch_model.safetensors"))
    return model.eval()


def wan_output(model: nn.Module) -> Tensor:
    gen = torch.Generator().manual_seed(3)
    x, text = torch.randn(1, 4, 2, 4, 4, generator=gen), torch.randn(1, 6, 16, generator=gen)
    with torch.no_grad():
        return model(x, torch.tensor([500.0]), text, return_dict=False)[0]


def qwen_output(model: nn.Module) -> Tensor:
    gen = torch.Generator().manual_seed(3)
    x, text = torch.randn(1, 4, 16, generator=gen), torch.randn(1, 6, 16, generator=gen)
    mask = torch.ones(1, 6, dtype=torch.bool)
    with torch.no_grad():
        return model(
            hidden_states=x,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            timestep=torch.tensor([0.5]),
            img_shapes=[[(1, 2, 2)]],
            return_dict=False,
        )[0]


@pytest.mark.parametrize("kind", ["wan", "qwen_image"])
def test_peft_and_diffusers_compute_what_the_merged_export_does(one_process: None, kind: str, tmp_path: Path) -> None:
    import peft

    cfg, lora, output = (wan_tiny, LORA, wan_output) if kind == "wan" else (qwen_image_tiny, QWEN, qwen_output)
    go(run_of(cfg, lora, tmp_path / "base", kind), tmp_path / "run", tmp_path)
    expected = output(peer(tmp_path / "run/hf"))
    assert off(output(peer(tmp_path / "base")), expected) > 1e-3
    wrapped = peft.PeftModel.from_pretrained(peer(tmp_path / "base"), tmp_path / "run/adapter")
    assert off(output(wrapped.base_model.model), expected) <= 1e-5
    again = peer(tmp_path / "base")
    again.load_lora_adapter(load_file(tmp_path / "run/adapter" / DIFFUSERS), prefix="transformer")  # type: ignore[operator]
    assert off(output(again), expected) <= 1e-5


def test_only_chosen_layers_are_trained() -> None:
    model = tiny(wan_tiny)
    adapt(model, LORA, spec.weight_map(wan_tiny))
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert len(trained) == 2 * 2 * (2 + 2 + 2)
    assert all(weight_of(name) for name in trained)
    frozen = tiny(wan_tiny)
    with pytest.raises(ValueError, match="PatchEmbedding"):
        adapt(frozen, attrs.evolve(LORA, targets=("patch",)), spec.weight_map(wan_tiny))
