"""Records `hf/kimi_k2`: what transformers' DeepSeek-V3 computes for a small model in the shape of Kimi-K2's text model.

`python tests/golden/record_kimi_k2.py FOLDER`. transformers has no class for model_type `kimi_k2`; the published
config.json (https://huggingface.co/moonshotai/Kimi-K2-Base) names DeepSeek-V3's architecture, with one group of experts
and a YaRN that blends over no band (beta_fast = beta_slow = 1). Layout of the folder: `lf/train/parity.py`.
"""

import copy
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
}
PUBLISHED = {
    "model_type": "kimi_k2",
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
}
"""What the published config.json says besides."""


def record(folder: Path) -> None:
    """Writes config.json, the weights, and inputs, outputs and gradients."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # It writes into the rope_scaling that it is given.
    config = DeepseekV3Config(**copy.deepcopy(SHAPE), attn_implementation="eager", experts_implementation="eager")
    model = DeepseekV3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            # Norms and biases start at constants, which would hide a missing one.
            if "correction_bias" in name:
                tensor.normal_(std=0.1)
            elif "norm" in name:
                tensor.normal_(mean=1.0, std=0.2)
            elif tensor.ndim > 1:
                tensor.normal_(std=1.2 / tensor.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps({**PUBLISHED, **SHAPE}, indent=2, sort_keys=True) + "\n")
    ids = torch.randint(0, config.vocab_size, (2, 24))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :3] = -100
    mask[1, 19:], labels[1, 19:] = 0, -100
    out = model(input_ids=ids, attention_mask=mask, labels=labels)
    out.loss.backward()
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    made = {**inputs, "logits": out.logits, "loss": out.loss[None], **_grads(model, folder)}
    save_file({name: tensor.detach().contiguous() for name, tensor in made.items()}, folder / "io.safetensors")


def _grads(model: DeepseekV3ForCausalLM, folder: Path) -> dict[str, torch.Tensor]:
    """Returns the gradients by the names of the checkpoint, which has a tensor for each expert."""
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    fused = {name: grad for name, grad in grads.items() if "mlp.experts." in name}
    found = {f"grad.{name}": grad for name, grad in grads.items() if name not in fused}
    for name, grad in fused.items():
        place, kind = name.rsplit(".", 1)
        for index, one in enumerate(grad):
            parts = (
                zip(("gate_proj", "up_proj"), one.chunk(2), strict=True)
                if kind == "gate_up_proj"
                else [("down_proj", one)]
            )
            found |= {f"grad.{place}.{index}.{part}.weight": value for part, value in parts}
    stored = load_file(folder / "model.safetensors").keys()
    assert {name.removeprefix("grad.") for name in found} == {n for n in stored if "correction_bias" not in n}
    return found


if __name__ == "__main__":
    record(Path(sys.argv[1]))
