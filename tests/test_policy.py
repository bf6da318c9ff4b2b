"""A policy sees what it was trained on, and gives back actions in the robot's units."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing

import lf
from lf.acting import load
from lf.acting.load import load_policy, policy_batch, untrained_policy
from lf.acting.policy import Observation, Policy
from lf.data.hf_tokenizer import read_tokenizer
from lf.data.lerobot import LeRobotRows, make_prompt
from lf.data.normalise import decode_actions
from lf.data.source import acting_of, open_data
from lf.devices.cpu import cpu
from lf.models import spec, toy
from lf.models.embodied.pi05 import pi05_tiny
from lf.train.checkpoint import CheckpointError
from lf.train.convert import export_folder, import_folder
from lf.train.start import acting_files, load_model, open_start
from tests.data_tools import context
from tests.robot_tools import CAMERAS, Toy, write_v21
from tests.test_train import go, tensors
from tests.workers import Workers

BASE, LEFT = pi05_tiny.cameras
MODEL = attrs.evolve(pi05_tiny, vocab=300, prompt=60, horizon=4)
TASK = "push the block"


def robot_run(root: Path, **changes: Any) -> lf.Run:
    data = lf.LeRobotData(
        path=str(root),
        cameras=(lf.Camera(name=BASE, key=CAMERAS[0]), lf.Camera(name=LEFT, key=CAMERAS[1])),
        chunk=4,
        normalise=lf.Normalise(delta=(True, False)),
        max_prompt=60,
    )
    run = lf.Run(
        model=MODEL,
        tokenizer=lf.TrainedBpe(vocab=300),
        data=data,
        batch=4,
        optim=lf.AdamW(lr=3e-3, ema=0.5),
        parallel=lf.TorchParallel(micro_batch=4),
        steps=2,
    )
    return attrs.evolve(run, **changes)


@attrs.frozen(kw_only=True)
class Trained:
    """A run of two steps, and what it was."""

    run: lf.Run
    folder: Path
    cache: Path


@pytest.fixture(scope="module")
def trained(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    # Two files of tests use it.
    place = tmp_path_factory.getbasetemp() / "policy"
    run = robot_run(place / "toy")
    if not place.exists():
        write_v21(place / "toy", Toy())
        workers.run(1, go, run, place / "run", place)
    return Trained(run=run, folder=place / "run", cache=place)


def observation(seed: int = 0, **changes: Any) -> Observation:
    rng = np.random.default_rng(seed)
    images = {name: rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in (BASE, LEFT)}
    seen = Observation(images=images, state=rng.standard_normal(3).astype(np.float32), task=TASK)
    return attrs.evolve(seen, **changes)


def raw(rows: LeRobotRows, row: dict[str, Any]) -> Observation:
    """The frame of a row, as a robot would send it."""
    images = {name: np.ascontiguousarray(np.moveaxis(image, 0, -1)) for name, image in row["images"].items()}
    state = np.zeros(0, np.float32) if not rows.cfg.state else row["state_raw"]
    return Observation(images=images, state=state, task=row["task"])


@pytest.mark.parametrize(
    ("cameras", "normalise"),
    [
        ((CAMERAS[0], CAMERAS[1]), lf.Normalise(delta=(True, False))),
        ((CAMERAS[0], ""), lf.Normalise(state="mean_std", actions="min_max")),
    ],
)
def test_an_observation_becomes_the_batch_of_its_frame(
    tmp_path: Path, cameras: tuple[str, str], normalise: lf.Normalise
) -> None:
    root = write_v21(tmp_path / "toy", Toy())
    named = tuple(lf.Camera(name=name, key=key) for name, key in zip((BASE, LEFT), cameras, strict=True))
    data = lf.LeRobotData(path=str(root), cameras=named, chunk=4, normalise=normalise)
    ctx = context(tmp_path, prompt=functools.partial(spec.prompt, MODEL))
    rows = open_data(data, ctx)
    assert isinstance(rows, LeRobotRows)
    facts = acting_of(rows)
    assert facts is not None
    assert facts.cameras == tuple(camera.name for camera in named if camera.key)
    words = make_prompt(ctx.prompt, ctx.tokenizer, "test")
    wanted = [rows.row(0, index) for index in range(5)]
    batch = spec.draw(MODEL, spec.collate(MODEL, wanted, wanted[0]), 0, 0)
    made = policy_batch(MODEL, facts, words, [raw(rows, row) for row in wanted], [row["id"] for row in wanted])
    assert made.keys() == batch.keys()
    for name in made.keys() - {"actions", "counted"}:
        same = (
            torch.equal(made[name], batch[name]) if isinstance(made[name], torch.Tensor) else made[name] == batch[name]
        )
        assert same, name
    # What the loader scaled comes back at the same state.
    for row in wanted:
        state, at = row["state_raw"], np.flatnonzero(~row["action_is_pad"])
        start = int(rows.starts[np.searchsorted(rows.episodes, row["episode"])]) + row["frame"]
        back = decode_actions(facts.normalisers, row["actions"], state)[at]
        assert np.allclose(back, rows.columns["action"][start : start + len(at)], atol=1e-5)


def test_a_policy_of_a_run_acts_as_its_checkpoint_says(trained: Trained) -> None:
    policy = load_policy(trained.folder)
    assert (policy.cameras, policy.state_dims, policy.action_dims) == ((BASE, LEFT), 3, 2)
    assert (policy.horizon, policy.fps) == (4, 10.0)
    seen = observation()
    (chunk,) = policy.act([seen], [0])
    assert (chunk.shape, chunk.dtype) == ((4, 2), np.float32)


def test_a_chunk_depends_on_its_own_observation_and_seed_alone(trained: Trained) -> None:
    policy = load_policy(trained.folder)
    one, other = observation(0), observation(1)
    ((alone,), (again,)) = policy.act([one], [7]), policy.act([one], [7])
    assert np.array_equal(alone, again)
    _, beside, changed = policy.act([other, one, one], [7, 7, 8])
    assert np.allclose(alone, beside, atol=1e-5)
    assert np.abs(alone - changed).max() > 1e-3
    assert policy.act([], []) == []


def test_noise_is_a_function_of_the_seed_alone(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[torch.Tensor] = []

    def note(cfg: object, model: object, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        drawn.append(batch["noise"])
        return torch.zeros_like(batch["noise"])

    policy = load_policy(trained.folder)
    monkeypatch.setattr(load, "sample", note)
    one = observation(0)
    policy.act([one], [7])
    policy.act([observation(1), attrs.evolve(one, state=np.nextafter(one.state, np.float32(9))), one], [5, 7, 8])
    alone, beside = drawn
    assert torch.equal(alone[0], beside[1])
    assert not torch.equal(alone[0], beside[0])
    assert not torch.equal(alone[0], beside[2])


def test_differences_are_undone_with_the_raw_state(monkeypatch: pytest.MonkeyPatch, trained: Trained) -> None:
    policy = load_policy(trained.folder)
    monkeypatch.setattr(load, "sample", lambda cfg, model, batch: torch.zeros(len(batch["ids"]), 4, 8))
    state = np.array([5.0, 6.0, 7.0], np.float32)
    (chunk,) = policy.act([observation(state=state)], [0])
    facts = load._of_run(trained.folder, None, print).facts
    assert facts.normalisers.actions is not None
    shift = np.array(facts.normalisers.actions.shift)
    assert np.allclose(chunk, shift + np.array([5.0, 0.0]), atol=1e-6)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    module = policy.act.args[1]  # type: ignore[attr-defined]
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_averages_are_taken_unless_asked_otherwise(trained: Trained) -> None:
    saved = tensors(trained.folder, 2)
    assert any(name.startswith("ema/") for name in saved)
    for averaged, kind in ((None, "ema"), (True, "ema"), (False, "weight")):
        for name, tensor in weights(load_policy(trained.folder, averaged=averaged)).items():
            expected = saved.get(f"{kind}/{name}", saved[f"weight/{name}"])
            assert torch.equal(tensor, expected), (averaged, name)


def test_the_untrained_policy_is_the_first_step_of_its_run(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(trained.cache))
    policy = untrained_policy(trained.run)
    first = load_model(open_start("", MODEL), spec.Ctx(device=cpu), trained.run.seed).state_dict()
    assert all(torch.equal(tensor, first[name]) for name, tensor in weights(policy).items())
    assert policy.act.args[2] == load_policy(trained.folder).act.args[2]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"data is lf\.data\.config\.TextData, which is no robot's"):
        untrained_policy(text_run(trained.cache))


def text_run(place: Path) -> lf.Run:
    (place / "words.txt").write_text("a few words " * 200)
    data = lf.TextData(paths=(str(place / "words.txt"),), seq_len=8)
    return lf.Run(model=toy.Toy(vocab=300, hidden=16), tokenizer=lf.TrainedBpe(vocab=300), data=data, batch=2, steps=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": {"front": np.zeros((4, 4, 3), np.uint8)}}, "has the camera front, and the policy was trained with"),
        ({"images": {}}, f"has no picture; give at least one of {BASE}, {LEFT}"),
        ({"images": {BASE: np.zeros((3, 4, 4), np.uint8)}}, r"is uint8 \[3, 4, 4\]; give uint8 \[height, width, 3\]"),
        ({"images": {BASE: np.zeros((4, 4, 3), np.float32)}}, r"is float32 \[4, 4, 3\]; give uint8"),
        ({"state": np.zeros(2, np.float32)}, r"state is float32 \[2\], and the policy was trained with float32 \[3\]"),
        ({"state": np.array([0, np.nan, 0], np.float32)}, r"dims \[1\] of the state are not finite \(nan\)"),
        ({"images": {BASE: np.zeros((1, 9000, 3), np.uint8)}}, r"is \[1, 9000, 3\]; a side may have 8192 pixels"),
        ({"state": np.array([0, 3e38, 0], np.float32)}, r"dims \[1\] of the state are far from all"),
        ({"state": np.array([0, 1e300, 0])}, r"dims \[1\] of the state are far from all"),
        ({"task": "word " * 60}, "shorten the task's text"),
    ],
)
def test_what_a_policy_cannot_act_on_is_refused(trained: Trained, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_policy(trained.folder).act([observation(**changes)], [0])


def test_a_camera_that_a_robot_lacks_is_masked(trained: Trained) -> None:
    policy = load_policy(trained.folder)
    both = observation()
    strip = np.zeros((1, 8192, 3), np.uint8)
    assert np.isfinite(policy.act([attrs.evolve(both, images={BASE: strip})], [0])[0]).all()
    ((one,),) = (policy.act([attrs.evolve(both, images={BASE: both.images[BASE]})], [0]),)
    assert np.isfinite(one).all()
    facts, words = policy.act.args[2:4]  # type: ignore[attr-defined]
    one_camera = attrs.evolve(both, images={LEFT: both.images[LEFT]})
    batch = policy_batch(MODEL, facts, words, [both, one_camera], ["x", "y"])
    assert batch["cameras"].tolist() == [[True, True], [False, True]]


def test_folders_that_are_no_policy_s_are_refused(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has one set of weights; leave `averaged` out"):
        load_policy(trained.folder / "hf", averaged=True)
    facts = load._of_run(trained.folder, None, print).facts
    windowed = attrs.evolve(facts, beyond=("state",))
    found = attrs.evolve(load._of_run(trained.folder, None, print), facts=windowed)
    with pytest.raises(ValueError, match="trained on state of its data, which one observation cannot give"):
        load._policy(found, "cpu", "float32", 0)


def test_a_tokenizer_that_changed_is_refused(trained: Trained, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained.folder, copy)
    file = copy / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "version": "1.0"}, indent=3))
    with pytest.raises(CheckpointError, match=r"is not what .* was trained with; put its files back"):
        load_policy(copy)


def test_an_export_is_the_policy_of_its_run_and_says_what_lerobot_needs(trained: Trained, tmp_path: Path) -> None:
    seen = observation()
    (chunk,) = load_policy(trained.folder).act([seen], [3])
    export_folder(trained.folder, tmp_path / "converted")
    for folder in (trained.folder / "hf", tmp_path / "converted"):
        policy = load_policy(folder)
        assert (policy.cameras, policy.state_dims, policy.horizon, policy.fps) == ((BASE, LEFT), 3, 4, 10.0)
        assert np.array_equal(policy.act([seen], [3])[0], chunk)
        config = json.loads((folder / "config.json").read_text())
        assert config["output_features"]["action"]["shape"] == [2]
        assert config["input_features"]["observation.state"]["shape"] == [3]
        # Differences to the state are nothing that LeRobot's Pi0.5 has.
        assert not list(folder.glob("policy_*"))
    (trained.folder / "hf" / "acting.json").rename(tmp_path / "acting.json")
    try:
        with pytest.raises(ValueError, match=r"has no acting\.json, which says how states and actions are scaled"):
            load_policy(trained.folder / "hf")
    finally:
        (tmp_path / "acting.json").rename(trained.folder / "hf" / "acting.json")


def test_lerobot_s_processors_scale_as_lf_does(tmp_path: Path) -> None:
    root = write_v21(tmp_path / "toy", Toy())
    run = robot_run(root)
    ctx = context(tmp_path)
    rows = open_data(attrs.evolve(run.data, normalise=lf.Normalise(), max_prompt=0), ctx)
    assert isinstance(rows, LeRobotRows)
    files = acting_files(MODEL, None, acting_of(rows))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    before, after = (json.loads(files[f"policy_{name}processor.json"])["steps"] for name in ("pre", "post"))
    assert [step["registry_name"] for step in before] == [
        "rename_observations_processor",
        "to_batch_processor",
        "normalizer_processor",
        "pi05_prepare_state_tokenizer_processor_step",
        "tokenizer_processor",
        "device_processor",
    ]
    stats = load_file(tmp_path / before[2]["state_file"])
    row = rows.row(0, 0)
    raw = torch.from_numpy(row["state_raw"])
    scaled = (raw - stats["observation.state.mean"]) / (stats["observation.state.std"] + before[2]["config"]["eps"])
    assert torch.allclose(scaled, torch.from_numpy(row["state"]), atol=1e-5)
    back = load_file(tmp_path / after[0]["state_file"])
    actions = torch.from_numpy(row["actions"]) * back["action.std"] + back["action.mean"]
    assert np.allclose(actions.numpy(), decode_actions(rows.normalisers, row["actions"], row["state_raw"]), atol=1e-6)
    # The prompt holds the state as it is, and not filled up to the model's width.
    assert before[3]["config"]["max_state_dim"] == 3


def test_prompts_begin_as_the_tokenizer_s_template_has_it(trained: Trained, tmp_path: Path) -> None:
    plain = tokenizers.Tokenizer.from_file(str(trained.folder / "tokenizer" / "tokenizer.json"))
    shutil.copytree(trained.folder / "tokenizer", tmp_path / "tokenizer")
    end = "<|endoftext|>"
    plain.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, plain.token_to_id(end))])
    plain.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    without, found = read_tokenizer(trained.folder / "tokenizer"), read_tokenizer(tmp_path / "tokenizer")
    assert (without.start, found.start) == ((), (found.eos,))
    ids = [make_prompt(None, one, "test")(TASK, np.zeros(0, np.float32)).tolist() for one in (without, found)]
    assert ids[1] == [found.eos, *ids[0]]
    assert ids[1] == plain.encode(TASK).ids


def test_an_imported_policy_acts_with_what_is_put_beside_it(trained: Trained, tmp_path: Path) -> None:
    import_folder(trained.folder / "hf", tmp_path / "lf")
    with pytest.raises(ValueError, match=r"lf has no acting\.json, .* train the policy on the robot's data"):
        load_policy(tmp_path / "lf")
    shutil.copy(trained.folder / "hf" / "acting.json", tmp_path / "lf")
    seen = observation()
    assert np.array_equal(
        load_policy(tmp_path / "lf").act([seen], [1])[0], load_policy(trained.folder).act([seen], [1])[0]
    )
