"""Reading and writing the checkpoint: one bf16 safetensors file with the parameter names of DeepSeek-V3.2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from model import Config, Needle
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
STATE = "train_state.json"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Needle:
    """The model of `folder` with its weights converted to `dtype`."""
    model = Needle(Config.load(folder))
    model.load_state_dict(load_file(str(folder / WEIGHTS)))
    frequencies = model.frequencies
    model = model.to(dtype).eval()
    model.frequencies = frequencies  # angles of far positions need float32
    return model


def save(model: Needle, folder: Path, state: dict[str, Any]) -> None:
    """Weights as bf16 (2 bytes a parameter) and the place in the training plan."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to("cpu", torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, str(folder / WEIGHTS), metadata={"format": "pt"})
    (folder / STATE).write_text(json.dumps(state, indent=1) + "\n")


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE).read_text())
