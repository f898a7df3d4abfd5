"""Parameter counts against models built by others, and what a config.json may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.config import HiSparseError
from hisparse.planner.model import from_config, load_model
from hisparse.planner.presets import PRESETS

NEEDLE = Path(__file__).parents[2] / "models/needle"


def transformers_parameters(name: str) -> int:
    """Parameters of transformers' own model of a preset, built without memory."""
    import transformers

    kind = "DeepseekV32" if name == "deepseek-v3.2" else "GlmMoeDsa"
    given = {key: value for key, value in PRESETS[name].items() if key != "quantization_config"}
    config = getattr(transformers, f"{kind}Config")(**given)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    # The router's bias is a buffer there.
    return counted + sum(value.numel() for key, value in model.named_buffers() if "e_score_correction_bias" in key)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_equal_those_of_transformers(name: str) -> None:
    assert load_model(name).parameters == transformers_parameters(name)


@pytest.mark.parametrize(("name", "billions"), (("deepseek-v3.2", 671), ("glm-5", 744), ("glm-5.2", 744)))
def test_parameters_are_about_what_the_makers_say(name: str, billions: int) -> None:
    assert load_model(name).parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_parameters_equal_those_of_a_checkpoint() -> None:
    with (NEEDLE / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    assert load_model(str(NEEDLE)).parameters * 2 == sum(
        end - start for start, end in (t["data_offsets"] for t in tensors)
    )


def test_one_gpu_holds_every_parameter_and_the_copies() -> None:
    model = load_model(str(NEEDLE))
    nbytes = model.weight_bytes(gpus=1, attention_gpus=1)
    assert sum(nbytes.values()) - nbytes["kv_b copies"] == 2 * model.parameters


def test_more_gpus_hold_less_each_but_never_less_than_their_share() -> None:
    model = load_model("deepseek-v3.2")
    one = sum(model.weight_bytes(gpus=1, attention_gpus=1).values())
    eight = sum(model.weight_bytes(gpus=8, attention_gpus=8).values())
    grouped = sum(model.weight_bytes(gpus=8, attention_gpus=1).values())
    assert one / 8 < eight < grouped < one


def test_fp8_is_half_and_a_scale_for_each_block() -> None:
    from hisparse.planner.model import matrix_bytes

    assert matrix_bytes(256, 384, quantised=False) == 2 * 256 * 384
    assert matrix_bytes(256, 384, quantised=True) == 256 * 384 + 4 * 2 * 3
    assert matrix_bytes(129, 1, quantised=True) == 129 + 4 * 2


@pytest.mark.parametrize(
    ("changed", "sentence"),
    (
        ({"index_topk": None}, "must have a whole number index_topk, not None"),
        ({"hidden_size": "big"}, "must have a whole number hidden_size, not 'big'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
    ),
)
def test_a_config_that_cannot_be_read_is_named(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HiSparseError, match=sentence):
        from_config({**PRESETS["glm-5"], **changed}, name="x")


def test_a_dense_model_is_refused() -> None:
    config = {key: value for key, value in PRESETS["glm-5"].items() if key != "index_topk"}
    with pytest.raises(HiSparseError, match="not a sparse-attention"):
        from_config(config, name="x")


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(HiSparseError, match=r"must be one of deepseek-v3\.2, glm-5"):
        load_model(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(HiSparseError, match="is not valid JSON"):
        load_model(str(tmp_path))
