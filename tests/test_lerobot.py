"""Rows of LeRobot datasets are those of the recording, in both formats, whatever is asked of them."""

import gc
import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lf.data.config import Camera, LeRobotData, Mixture, Normalise, Signal, TextData, Weighted
from lf.data.lerobot import LeRobotRows
from lf.data.loader import Share, by_turns, prefetch, read_rows, step_rows
from lf.data.normalise import compute_stats, decode_actions, make_normaliser, restore
from lf.data.source import DataCtx, Rows, normalisers_of, open_data
from tests.data_tools import context
from tests.robot_tools import CAMERAS, FPS, SIZE, TASKS, Toy, change_column, level, write_v21, write_v30
from tests.test_video import resident

TOY = Toy()
RAW = Normalise(state="none", actions="none")
DATA = LeRobotData(path="", chunk=3, normalise=RAW)
Writer = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("robot")
    pictures = attrs.evolve(TOY, kind="image")
    return {
        "v2.1": write_v21(folder / "toy21"),
        "v3.0": write_v30(folder / "toy30"),
        "v2.1 images": write_v21(folder / "images21", pictures),
        "v3.0 images": write_v30(folder / "images30", pictures),
    }


@pytest.fixture
def ctx(tmp_path: Path) -> DataCtx:
    return context(tmp_path)


def open_rows(cfg: LeRobotData, ctx: DataCtx) -> LeRobotRows:
    rows = open_data(cfg, ctx)
    assert isinstance(rows, LeRobotRows)
    return rows


def shown(picture: np.ndarray[Any, Any]) -> int:
    return round(float(picture.mean()))


def window(episode: int, at: int, steps: list[int]) -> tuple[list[int], list[bool]]:
    """Frames of a window, counted over the dataset, and its padding, from the definition."""
    wanted = [at + step for step in steps]
    last = TOY.lengths[episode] - 1
    return [TOY.starts[episode] + min(max(k, 0), last) for k in wanted], [not 0 <= k <= last for k in wanted]


def check_row(row: dict[str, Any], episode: int, at: int, chunk: int) -> None:
    number = TOY.starts[episode] + at
    frames, is_pad = window(episode, at, list(range(chunk)))
    assert (row["episode"], row["frame"], row["task"]) == (episode, at, TASKS[TOY.task(episode)])
    assert row["timestamp"] == np.float32(at / FPS)
    assert (row["state"] == TOY.states[number]).all()
    assert (row["actions"] == TOY.actions[frames]).all()
    assert row["action_is_pad"].tolist() == is_pad
    for camera, key in enumerate(CAMERAS):
        assert row["images"][key].shape == (3, *SIZE)
        assert row["images"][key].dtype == np.uint8
        assert abs(shown(row["images"][key]) - level(camera, number)) <= 3
        assert row["image_mask"][key] is True


@pytest.mark.parametrize("kind", ["v2.1", "v3.0", "v2.1 images", "v3.0 images"])
def test_every_row_is_that_of_the_recording(made: dict[str, Path], ctx: DataCtx, kind: str) -> None:
    rows = open_rows(attrs.evolve(DATA, path=str(made[kind])), ctx)
    assert len(rows) == sum(TOY.lengths)
    numbers = itertools.count()
    for episode, length in enumerate(TOY.lengths):
        for at in range(length):
            row = rows.frame_row(next(numbers))
            check_row(row, episode, at, DATA.chunk)
            assert row["id"] == f"{made[kind].name}/{episode}/{at}"


@pytest.mark.parametrize("kind", ["v2.1", "v3.0"])
def test_windows_pad_at_both_ends_and_never_leave_the_episode(made: dict[str, Path], ctx: DataCtx, kind: str) -> None:
    steps = list(range(-2, 6))
    seconds = tuple(step / FPS for step in steps)
    cfg = attrs.evolve(
        DATA,
        path=str(made[kind]),
        state_seconds=seconds,
        cameras=(Camera(name="front", key=CAMERAS[0], seconds=seconds),),
        extra=(Signal(name="act", key="action", seconds=seconds), Signal(name="now", key="index")),
    )
    rows = open_rows(cfg, ctx)
    for episode, length in enumerate(TOY.lengths):
        for at in range(length):
            row = rows.frame_row(TOY.starts[episode] + at)
            frames, is_pad = window(episode, at, steps)
            assert (row["state"] == TOY.states[frames]).all()
            assert (row["act"] == TOY.actions[frames]).all()
            assert [shown(picture) for picture in row["images"]["front"]] == pytest.approx(
                [level(0, number) for number in frames], abs=3
            )
            pads = (row["state_is_pad"], row["act_is_pad"], row["image_is_pad"]["front"])
            assert all(pad.tolist() == is_pad for pad in pads)
            assert row["now"] == [TOY.starts[episode] + at]
            assert (row["state_raw"] == TOY.states[TOY.starts[episode] + at]).all()


def test_a_window_of_one_time_keeps_its_axis(made: dict[str, Path], ctx: DataCtx) -> None:
    cameras = (Camera(name="front", key=CAMERAS[0], seconds=(0.0,)),)
    row = open_rows(attrs.evolve(DATA, path=str(made["v3.0"]), state_seconds=(0.0,), cameras=cameras), ctx).frame_row(0)
    assert row["state"].shape == (1, 3)
    assert row["images"]["front"].shape == (1, 3, *SIZE)


@pytest.mark.parametrize("kind", ["v2.1", "v3.0"])
@pytest.mark.parametrize("chosen", [(1,), (3, 1), (3,), (0, 1, 3)], ids=str)
def test_a_subset_has_the_rows_of_the_whole(
    made: dict[str, Path], ctx: DataCtx, kind: str, chosen: tuple[int, ...]
) -> None:
    rows = open_rows(attrs.evolve(DATA, path=str(made[kind]), episodes=chosen), ctx)
    places = [(episode, at) for episode in sorted(chosen) for at in range(TOY.lengths[episode])]
    assert len(rows) == len(places)
    for number, (episode, at) in enumerate(places):
        check_row(rows.frame_row(number), episode, at, DATA.chunk)


def test_only_the_chosen_episodes_have_to_be_there(made: dict[str, Path], ctx: DataCtx, tmp_path: Path) -> None:
    root = shutil.copytree(made["v2.1"], tmp_path / "part")
    for episode in (0, 1, 3):
        (root / f"data/chunk-000/episode_{episode:06d}.parquet").unlink()
    cfg = attrs.evolve(DATA, path=str(root), episodes=(2,))
    check_row(open_rows(cfg, ctx).frame_row(4), 2, 4, DATA.chunk)
    with pytest.raises(ValueError, match=r"part, episode 0, data/.*000000\.parquet: the file of its rows is not there"):
        open_data(attrs.evolve(cfg, episodes=None), ctx)


def test_a_camera_that_the_dataset_lacks_is_masked(made: dict[str, Path], ctx: DataCtx) -> None:
    cameras = (Camera(name="base", key=CAMERAS[1]), Camera(name="left"), Camera(name="right", seconds=(0.0, 0.1)))
    row = open_rows(attrs.evolve(DATA, path=str(made["v3.0"]), cameras=cameras), ctx).frame_row(8)
    assert row["image_mask"] == {"base": True, "left": False, "right": False}
    assert abs(shown(row["images"]["base"]) - level(1, 8)) <= 3
    assert row["images"].keys() == {"base"}
    assert row["image_is_pad"]["right"].tolist() == [False, False]


def test_states_and_actions_may_be_of_several_features(made: dict[str, Path], ctx: DataCtx) -> None:
    cfg = attrs.evolve(DATA, path=str(made["v3.0"]), state=("action", "observation.state"), cameras=())
    row = open_rows(cfg, ctx).frame_row(7)
    assert (row["state"] == np.concatenate([TOY.actions[7], TOY.states[7]])).all()
    assert "images" not in row
    bare = open_rows(attrs.evolve(cfg, state=(), actions=()), ctx).frame_row(7)
    assert not {"state", "actions"}.intersection(bare)


def test_rows_are_scaled_by_the_statistics_of_the_chosen_episodes(made: dict[str, Path], ctx: DataCtx) -> None:
    how = Normalise(state="mean_std", actions="quantile")
    cfg = attrs.evolve(DATA, path=str(made["v2.1"]), episodes=(0, 2), cameras=(), normalise=how)
    rows = open_rows(cfg, ctx)
    kept = [*range(5), *range(6, 13)]
    state = make_normaliser("mean_std", compute_stats(lambda: [TOY.states[kept]], "x"))
    actions = make_normaliser("quantile", compute_stats(lambda: [TOY.actions[kept]], "x"))
    assert (rows.normalisers.state, rows.normalisers.actions) == (state, actions)
    row = rows.frame_row(4)
    assert np.allclose(row["state"], (TOY.states[4] - TOY.states[kept].mean(0)) / TOY.states[kept].std(0), atol=1e-5)
    assert (row["state_raw"] == TOY.states[4]).all()
    assert np.allclose(restore(rows.normalisers.actions, row["actions"], "x"), TOY.actions[[4, 4, 4]], atol=1e-6)


def test_differences_are_scaled_by_statistics_of_chunks_without_their_padding(
    made: dict[str, Path], ctx: DataCtx
) -> None:
    how = Normalise(state="none", actions="mean_std", delta=(True, False))
    rows = open_rows(attrs.evolve(DATA, path=str(made["v2.1"]), cameras=(), normalise=how), ctx)
    moved, base = [], TOY.states[:, :2] * [1, 0]
    for episode, length in enumerate(TOY.lengths):
        for at in range(length):
            start = TOY.starts[episode]
            moved += [TOY.actions[start + k] - base[start + at] for k in range(at, min(at + DATA.chunk, length))]
    assert rows.normalisers.actions is not None
    assert np.allclose(rows.normalisers.actions.shift, np.mean(moved, 0), atol=1e-6)
    assert np.allclose(rows.normalisers.actions.scale, np.std(moved, 0), atol=1e-6)
    row = rows.frame_row(6)
    raw = decode_actions(rows.normalisers, row["actions"], row["state_raw"])
    assert np.allclose(raw, TOY.actions[6:9], atol=1e-6)


def test_given_normalisers_are_used_as_they_are(made: dict[str, Path], ctx: DataCtx, tmp_path: Path) -> None:
    from lf.config import to_json

    cfg = attrs.evolve(DATA, path=str(made["v2.1"]), cameras=(), normalise=Normalise())
    train = open_rows(attrs.evolve(cfg, episodes=(0, 2)), ctx)
    held_out = open_rows(attrs.evolve(cfg, episodes=(3,)), attrs.evolve(ctx, normalisers=train.normalisers))
    assert held_out.normalisers == train.normalisers
    file = tmp_path / "normalisers.json"
    file.write_text(to_json(train.normalisers))
    from_file = open_rows(attrs.evolve(cfg, episodes=(3,), normalise=Normalise(file=str(file))), ctx)
    assert (from_file.frame_row(1)["state"] == held_out.frame_row(1)["state"]).all()
    with pytest.raises(ValueError, match=r"normalisers\.json has statistics of 3 dims of the state, and rows have 2"):
        open_data(attrs.evolve(cfg, state=("action",), normalise=Normalise(file=str(file))), ctx)


def ids(rows: Rows, steps: range, dp: int = 1, batch: int = 4) -> list[list[str]]:
    """Ids of the rows of each step, over all ranks."""
    found = []
    for step in steps:
        shares = [Share(micro_batch=2, dp=dp, dp_rank=rank) for rank in range(dp)]
        parts = [by_turns(rows, step_rows(step, batch), share).micro for share in shares]
        found.append([row["id"] for turn in zip(*parts, strict=True) for part in turn for row in part if row])
    return found


def test_the_order_goes_on_at_any_step_on_any_number_of_ranks(made: dict[str, Path], tmp_path: Path) -> None:
    cfg = attrs.evolve(DATA, path=str(made["v3.0"]))
    whole = ids(open_data(cfg, context(tmp_path)), range(1, 11))
    epochs = [name for step in whole for name in step]
    assert len(set(epochs[:17])) == 17
    assert {name.split(" ")[1] for name in epochs[:17]} == {name.split(" ")[1] for name in epochs[17:34]}
    assert [name.split(" ")[1] for name in epochs[:17]] != [name.split(" ")[1] for name in epochs[17:34]]
    for k in (2, 5, 8):
        assert ids(open_data(cfg, context(tmp_path)), range(k, 11), dp=2) == whole[k - 1 :]
    assert ids(open_data(cfg, context(tmp_path, seed=1)), range(1, 11)) != whole


def test_threads_read_the_rows_that_one_reads(
    made: dict[str, Path], ctx: DataCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = open_rows(attrs.evolve(DATA, path=str(made["v3.0"])), ctx)
    alone = [rows.row(*divmod(k, len(rows))) for k in range(20)]
    monkeypatch.setattr(LeRobotRows, "threads", 4)
    together = read_rows(rows, range(20))
    for one, other in zip(alone, together, strict=True):
        assert one["id"] == other["id"]
        assert all((one["images"][key] == other["images"][key]).all() for key in CAMERAS)


def test_memory_and_open_files_do_not_grow_over_two_thousand_rows(
    made: dict[str, Path], ctx: DataCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LeRobotRows, "threads", 2)
    rows = open_rows(attrs.evolve(DATA, path=str(made["v2.1"])), ctx)

    def held() -> tuple[int, int]:
        gc.collect()
        return resident(), len(os.listdir("/proc/self/fd")) - len(rows.decoders)

    def read(steps: range) -> int:
        share = Share(micro_batch=20)
        with prefetch(lambda step: by_turns(rows, step_rows(step, 20), share).micro, steps) as fetched:
            return sum(len(item.value[0]) for item in fetched)

    assert read(range(1, 21)) == 400
    memory, files = held()
    assert read(range(21, 121)) == 2000
    later = held()
    # Two thousand rows have 37 MB of pixels.
    assert later[0] - memory < 12e6
    assert later[1] <= files + 2
    assert len(rows.decoders) <= 16
    rows.decoders.close()


def test_facts_name_sizes_and_notice_a_change(made: dict[str, Path], ctx: DataCtx, tmp_path: Path) -> None:
    cfg = attrs.evolve(DATA, path=str(made["v2.1"]), normalise=Normalise())
    facts = open_data(cfg, ctx).describe()
    assert facts.pop("content") > 0
    assert facts == {"rows": 17, "episodes": 4, "cameras": 2, "state_dims": 3, "action_dims": 2, "length": 3}

    def content(root: Path) -> int:
        return open_data(attrs.evolve(cfg, path=str(root)), ctx).describe()["content"]

    root = shutil.copytree(made["v2.1"], tmp_path / "moved")
    seen = [content(root)]
    assert seen == [open_data(cfg, ctx).describe()["content"]]
    change_column(root / "data/chunk-000/episode_000003.parquet", "action", lambda values: values + 1)
    seen.append(content(root))
    video = root / f"videos/chunk-000/{CAMERAS[0]}/episode_000001.mp4"
    shutil.copy(made["v2.1"] / f"videos/chunk-000/{CAMERAS[1]}/episode_000001.mp4", video)
    seen.append(content(root))
    tasks = root / "meta/tasks.jsonl"
    tasks.write_text(tasks.read_text().replace("cup", "pan"))
    (root / "meta/episodes.jsonl").write_text((root / "meta/episodes.jsonl").read_text().replace("cup", "pan"))
    seen.append(content(root))
    assert len(set(seen)) == 4


def test_rows_are_audited_once_for_a_content(
    made: dict[str, Path], ctx: DataCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lf.data.lerobot_store as store

    cfg = attrs.evolve(DATA, path=str(made["v3.0"]))
    first = open_rows(cfg, ctx).frame_row(9)
    monkeypatch.setattr(store, "scan", lambda *_: pytest.fail("audited again"))
    again = open_rows(attrs.evolve(cfg, chunk=5), ctx).frame_row(9)
    assert (again["actions"][:3] == first["actions"]).all()


def part(root: Path, weight: float, **fields: Any) -> Weighted:
    return Weighted(data=attrs.evolve(DATA, path=str(root), **{"cameras": (), **fields}), weight=weight)


def test_datasets_are_mixed_by_weight_and_scaled_alike(made: dict[str, Path], ctx: DataCtx, tmp_path: Path) -> None:
    other = write_v30(tmp_path / "other", Toy(lengths=(6, 1), cameras=(), seed=5))
    cameras = (Camera(name="front", key=CAMERAS[0]),)
    how: dict[str, Any] = {"normalise": Normalise(state="mean_std", actions="min_max")}
    mixed = open_data(
        Mixture(
            parts=(
                part(made["v2.1"], 1, cameras=cameras, **how),
                part(other, 3, cameras=(Camera(name="front"),), **how),
            )
        ),
        ctx,
    )
    norms = normalisers_of(mixed)
    assert norms is not None
    states = np.concatenate([TOY.states, Toy(lengths=(6, 1), seed=5).states])
    assert norms.state == make_normaliser("mean_std", compute_stats(lambda: [states], "x"))
    rows = [mixed.row(*divmod(k, len(mixed))) for k in range(24)]
    assert sum(row["id"].startswith("0/") for row in rows) == 6
    assert {row["image_mask"]["front"] for row in rows if row["id"].startswith("0/")} == {True}
    assert {row["image_mask"]["front"] for row in rows if row["id"].startswith("1/")} == {False}
    for row in rows:
        assert np.allclose(restore(norms.state, row["state"], "x"), row["state_raw"], atol=1e-6)
    facts = mixed.describe()
    assert (facts["state_dims"], facts["action_dims"], facts["length"], facts["rows"]) == (3, 2, 3, 24)


@pytest.mark.parametrize(
    ("toy", "fields", "message"),
    [
        (Toy(lengths=(4,), cameras=(), fps=15), {}, r"toy21 and other differ in fps 10\.0 and 15\.0"),
        (Toy(lengths=(4,), cameras=(), action_dim=3), {}, "differ in dims of the actions 2 and 3"),
        (Toy(lengths=(4,), cameras=()), {"chunk": 5}, "differ in chunk 3 and 5"),
        (Toy(lengths=(4,), cameras=()), {"cameras": (Camera(name="top"),)}, r"differ in cameras \[\] and \['top'\]"),
        (Toy(lengths=(4,), cameras=()), {"normalise": Normalise()}, "differ in normalise"),
    ],
)
def test_datasets_that_are_not_alike_cannot_be_mixed(
    made: dict[str, Path], ctx: DataCtx, tmp_path: Path, toy: Toy, fields: dict[str, Any], message: str
) -> None:
    other = write_v30(tmp_path / "other", toy)
    with pytest.raises(ValueError, match=message):
        open_data(Mixture(parts=(part(made["v2.1"], 1), part(other, 1, **fields))), ctx)
    normalisers = open_rows(attrs.evolve(DATA, path=str(made["v2.1"])), ctx).normalisers
    mixture = Mixture(parts=(part(made["v2.1"], 1), part(other, 1, **fields)))
    with pytest.raises(ValueError, match=message):
        open_data(mixture, attrs.evolve(ctx, normalisers=normalisers))


def test_robots_and_texts_cannot_be_mixed(made: dict[str, Path], ctx: DataCtx, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text that is long enough")
    text = Weighted(data=TextData(paths=(str(tmp_path / "a.txt"),), seq_len=4))
    with pytest.raises(ValueError, match=r"data\.parts are of robots and of texts"):
        open_data(Mixture(parts=(part(made["v2.1"], 1), text)), ctx)


def test_a_task_is_found_by_its_index_and_not_by_its_row(made: dict[str, Path], ctx: DataCtx, tmp_path: Path) -> None:
    root = shutil.copytree(made["v3.0"], tmp_path / "tasks")
    pq.write_table(
        pa.table({"task_index": [1, 7, 0], "task": [TASKS[1], "other", TASKS[0]]}), root / "meta/tasks.parquet"
    )
    rows = open_rows(attrs.evolve(DATA, path=str(root)), ctx)
    assert [rows.frame_row(start)["task"] for start in TOY.starts[:-1]] == [TASKS[n % 2] for n in range(4)]


def test_rows_are_found_in_another_file_than_the_one_named(made: dict[str, Path], ctx: DataCtx, tmp_path: Path) -> None:
    root = shutil.copytree(made["v3.0"], tmp_path / "late")
    data = root / "data/chunk-000"
    first, second = pq.read_table(data / "file-000.parquet"), pq.read_table(data / "file-001.parquet")
    pq.write_table(first.slice(0, 5), data / "file-000.parquet")
    pq.write_table(pa.concat_tables([first.slice(5), second]), data / "file-001.parquet")
    rows = open_rows(attrs.evolve(DATA, path=str(root)), ctx)
    for number, (episode, at) in enumerate((e, k) for e, n in enumerate(TOY.lengths) for k in range(n)):
        check_row(rows.frame_row(number), episode, at, DATA.chunk)
    before = rows.describe()["content"]
    change_column(data / "file-001.parquet", "action", lambda values: values * 2)
    assert open_data(attrs.evolve(DATA, path=str(root)), ctx).describe()["content"] != before


def test_columns_may_be_lists_of_any_length(made: dict[str, Path], ctx: DataCtx, tmp_path: Path) -> None:
    root = shutil.copytree(made["v3.0"], tmp_path / "lists")
    for path in (root / "data").rglob("*.parquet"):
        table = pq.read_table(path)
        for key in ("action", "observation.state"):
            table = table.set_column(table.column_names.index(key), key, pa.array(table[key].to_pylist()))
        assert pa.types.is_list(table.schema.field("action").type)
        pq.write_table(table, path)
    check_row(open_rows(attrs.evolve(DATA, path=str(root)), ctx).frame_row(8), 2, 2, DATA.chunk)


def test_the_times_of_a_long_recording_may_be_float32(ctx: DataCtx, tmp_path: Path) -> None:
    """At 2,000 s a float32 is 1.2e-4 s wide, which is more than the tolerance."""
    root = write_v30(tmp_path / "long", Toy(lengths=(40,), cameras=()))
    path = root / "data/chunk-000/file-000.parquet"
    change_column(path, "timestamp", lambda times: (2000 + times.astype(np.float64)).astype(np.float32))
    assert len(open_rows(attrs.evolve(DATA, path=str(root)), ctx)) == 40


def test_grey_and_transparent_pictures_become_colours(ctx: DataCtx, tmp_path: Path) -> None:
    from tests.robot_tools import frame, png

    root = write_v30(tmp_path / "grey", Toy(lengths=(2,), kind="image", cameras=CAMERAS[:1]))
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    kind = table.schema.field(CAMERAS[0]).type
    pictures = [{"bytes": png(frame(0, 0), "L"), "path": None}, {"bytes": png(frame(0, 1), "RGBA"), "path": "1.png"}]
    pq.write_table(table.set_column(table.column_names.index(CAMERAS[0]), CAMERAS[0], pa.array(pictures, kind)), path)
    rows = open_rows(attrs.evolve(DATA, path=str(root)), ctx)
    for number in (0, 1):
        assert (rows.frame_row(number)["images"][CAMERAS[0]] == frame(0, number).transpose(2, 0, 1)).all()


def test_the_config_of_the_docs_opens(ctx: DataCtx, tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs/robot_data.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    root = write_v30(tmp_path / "so101")
    row = open_rows(attrs.evolve(names["data"], path=str(root)), ctx).frame_row(7)
    assert row["images"]["left_wrist"].shape == (2, 3, *SIZE)
    assert row["image_mask"] == {"base": True, "left_wrist": True, "right_wrist": False}
    assert row["actions"].shape == (10, 2)
