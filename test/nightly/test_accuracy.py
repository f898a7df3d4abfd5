"""With real weights: grade-school arithmetic as well with HiSparse as without.

HISPARSE_MODEL_PATH names the checkpoint, HISPARSE_NIGHTLY_FLAGS what it needs (--tp-size 8, ...). SGLang's evaluation
fetches GSM8K from the network, or reads the file that HISPARSE_GSM8K names.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hisparse.local_server import LocalServer

from .servers import FLAGS, hisparse_flags

MODEL = os.environ.get("HISPARSE_MODEL_PATH") or None
QUESTIONS = 400
TOLERANCE = 0.02
"""Two runs of one server differ by this much, as default top-k and batches differ from run to run."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nightly,
    pytest.mark.skipif(MODEL is None, reason="HISPARSE_MODEL_PATH names no real weights"),
]


def accuracy(server: LocalServer) -> float:
    command = [sys.executable, "-m", "sglang.test.few_shot_gsm8k", "--num-questions", str(QUESTIONS)]
    command += ["--host", "http://127.0.0.1", "--port", str(server.port)]
    if data := os.environ.get("HISPARSE_GSM8K"):
        command += ["--data-path", data]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"Accuracy: ([\d.]+)", output)
    assert found, output[-2000:]
    return float(found[1])


def test_accuracy_is_that_without_hisparse(tmp_path: Path) -> None:
    assert MODEL is not None
    scores = {}
    for name, more in (("off", ()), ("on", hisparse_flags())):  # one after the other: each fills the machine
        with LocalServer(Path(MODEL), *FLAGS, *more, log=tmp_path / f"{name}.log", timeout_s=3600) as server:
            scores[name] = accuracy(server)
    print(f"accuracy: {scores}", file=sys.stderr)
    assert abs(scores["on"] - scores["off"]) <= TOLERANCE, scores
