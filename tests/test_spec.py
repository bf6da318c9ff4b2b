"""The default answers of `lf.models.spec`, and ids that a model does not have."""

from typing import Any

import attrs
import numpy as np
import pytest

from lf.models.llm.qwen import qwen3_tiny
from lf.models.spec import IGNORE, ModelConfig, check_model, collate, hf_config, text_batch, weight_map
from lf.models.toy import Toy, from_hf


@attrs.frozen(kw_only=True)
class Bare(ModelConfig):
    """A family without rules."""

    vocab: int = 10


@attrs.frozen(kw_only=True)
class Silent(ModelConfig):
    """A family without a vocabulary."""


def test_a_vocabulary_that_is_too_small_is_refused_by_default() -> None:
    for cfg in (Bare(), Toy(vocab=10)):
        check_model(cfg, {"vocab": 10, "length": 4})
        check_model(cfg, {"length": 4})
        with pytest.raises(ValueError, match=r"model\.vocab = 10, but the data has token id 10; raise model\.vocab"):
            check_model(cfg, {"vocab": 11})
    check_model(Silent(), {"vocab": 11})


@pytest.mark.parametrize(
    ("layers", "said"), [(None, "layers is missing"), ("2", "must be a whole number"), (0, "least 1")]
)
def test_a_toy_is_read_field_by_field(layers: Any, said: str) -> None:
    assert from_hf(hf_config(Toy(layers=3))) == Toy(layers=3)
    with pytest.raises(ValueError, match=said):
        from_hf({"vocab": 10, "hidden": 4, "layers": layers})


def test_a_question_without_a_rule_says_what_to_write() -> None:
    with pytest.raises(NotImplementedError, match=r"weight_map has no rule for tests\.test_spec\.Bare; add one with"):
        weight_map(Bare())


@pytest.mark.parametrize("cfg", [Toy(vocab=10), attrs.evolve(qwen3_tiny, vocab=10)])
@pytest.mark.parametrize(("name", "value"), [("tokens", 10), ("tokens", -1), ("labels", 10), ("labels", -1)])
def test_a_row_with_an_id_that_the_model_does_not_have_is_named(cfg: ModelConfig, name: str, value: int) -> None:
    row: dict[str, Any] = {"tokens": np.arange(4), "labels": np.array([1, 2, 9, IGNORE]), "lengths": (4,), "real": 4}
    good, bad = {**row, "id": "0:0 a.txt"}, {**row, "id": "0:1 b.txt", name: np.array([1, value, 3, 4])}
    assert collate(cfg, [good, None], good)["count"] == 4
    with pytest.raises(
        ValueError, match=rf"row 0:1 b\.txt: {name} has id {value}, and those of the model go from 0 to 9"
    ):
        collate(cfg, [good, bad], good)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokens": np.zeros(5, np.int64)}, "row b has 5 tokens, 4 labels and documents of 4 together"),
        ({"labels": np.zeros(3, np.int64)}, "row b has 4 tokens, 3 labels"),
        ({"lengths": (2, 1)}, "documents of 3 together, where rows of this source have 4 of each; pad"),
    ],
)
def test_a_row_of_another_length_is_named(change: dict[str, Any], told: str) -> None:
    row: dict[str, Any] = {"tokens": np.zeros(4, np.int64), "labels": np.zeros(4, np.int64), "lengths": (3, 1)}
    rows = [{**row, "real": 4, "id": "a"}, {**row, "real": 4, "id": "b", **change}]
    with pytest.raises(ValueError, match=told):
        text_batch(rows)
