"""What LeRobot reads beside the weights of a policy: its processors, and the robot's own sizes in config.json.

The format is that of `PolicyProcessorPipeline.save_pretrained` in lerobot 0.4.4: a JSON file that lists steps by their
registered names, and a safetensors file for each step with statistics.

Every scaling of lf is affine, (x - shift) / scale, so that it is LeRobot's `MEAN_STD` with other numbers, whatever made
them; LeRobot adds 1e-8 to the scale when it normalises.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save

from lf.models.spec import Affine

PRE, POST = "policy_preprocessor", "policy_postprocessor"
STATE, ACTION = "observation.state", "action"
PALIGEMMA = "google/paligemma-3b-pt-224"
"""The tokenizer that LeRobot takes, by its name on the hub."""
_NORM_MAP = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
_EPS = 1e-8


def with_sizes(config: Mapping[str, Any], state: int, actions: int) -> dict[str, Any]:
    """Returns a config.json whose features have the robot's dims: LeRobot cuts actions to them."""
    inputs = {key: value for key, value in config["input_features"].items() if key != STATE}
    return {
        **config,
        "input_features": {**inputs, STATE: {"type": "STATE", "shape": [state]}},
        "output_features": {**config["output_features"], ACTION: {"type": "ACTION", "shape": [actions]}},
    }


def lerobot_files(
    config: Mapping[str, Any], prompt: int, state: Affine | None, actions: Affine, delta: bool
) -> dict[str, bytes]:
    """Returns the files of a Pi0.5 policy, by name; none where config.json is not LeRobot's.

    Without a state, and with actions that are differences to it, there are no processors: LeRobot has no such Pi0.5.
    """
    if "input_features" not in config or "output_features" not in config:
        return {}
    sized = with_sizes(config, 0 if state is None else len(state[0]), len(actions[0]))
    more = {} if state is None or delta else processors(sized, prompt, state, actions)
    return {"config.json": _json(sized), **more}


def processors(config: Mapping[str, Any], prompt: int, state: Affine, actions: Affine) -> dict[str, bytes]:
    """Returns the files of a Pi0.5 policy's processors, by name; `config` is what `with_sizes` returned.

    The state goes into the prompt as it is, not filled up to the model's width, as lf and openpi have it.
    """
    numbers = save({**_stats(STATE, state), **_stats(ACTION, actions)})
    features = {**config["input_features"], **config["output_features"]}
    steps = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        _scaling(PRE, 2, "normalizer_processor", features),
        {
            "registry_name": "pi05_prepare_state_tokenizer_processor_step",
            "config": {"max_state_dim": len(state[0]), "task_key": "task"},
        },
        {
            "registry_name": "tokenizer_processor",
            "config": {
                "max_length": prompt,
                "task_key": "task",
                "padding_side": "right",
                "padding": "max_length",
                "truncation": True,
                "tokenizer_name": PALIGEMMA,
            },
        },
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    back = [
        _scaling(POST, 0, "unnormalizer_processor", config["output_features"]),
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    return {
        f"{PRE}.json": _json({"name": PRE, "steps": steps}),
        f"{POST}.json": _json({"name": POST, "steps": back}),
        str(steps[2]["state_file"]): numbers,
        str(back[0]["state_file"]): numbers,
    }


def _scaling(pipeline: str, at: int, name: str, features: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "registry_name": name,
        "config": {"eps": _EPS, "features": dict(features), "norm_map": _NORM_MAP},
        "state_file": f"{pipeline}_step_{at}_{name}.safetensors",
    }


def _stats(key: str, affine: Affine) -> dict[str, torch.Tensor]:
    shift, scale = (torch.tensor(values, dtype=torch.float32) for values in affine)
    return {f"{key}.mean": shift, f"{key}.std": scale}


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
