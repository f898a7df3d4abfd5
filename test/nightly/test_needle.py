"""A trained model on the GPU: with HiSparse its answers are as right as without."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hisparse.local_server import LocalServer

from .servers import FLAGS, INDEX_TOPK, ask, hisparse_flags, row_flags, start_together

pytestmark = [pytest.mark.gpu, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
LENGTHS = (4096, 16_384)
FACTS_A_DEPTH = 4


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_recall_is_that_without_hisparse(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes hidden at every depth; top-k 2,048, as SGLang's kernels want it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmark" / "needle"))
    import evaluate
    import recall_texts

    maker = evaluate.Maker(ROOT / "models" / "needle")
    flags = (
        *FLAGS, *row_flags(dtype), "--context-length", "20480", "--max-total-tokens", "262144",
        "--max-running-requests", "10", "--cuda-graph-max-bs-decode", "10", "--mem-fraction-static", "0.3",
        "--json-model-override-args", json.dumps({"index_topk": INDEX_TOPK}),
    )  # fmt: skip
    servers = {
        name: LocalServer(ROOT / "models" / "needle", *flags, *more, log=tmp_path / f"{name}.log", timeout_s=600)
        for name, more in (("on", hisparse_flags(host_memory_gib=8)), ("off", ()))
    }
    right = {name: 0 for name in servers}
    asked = 0
    with start_together(servers):
        for length in LENGTHS:
            text = recall_texts.make_text(maker, length, 0, FACTS_A_DEPTH)
            asked += len(text.questions)
            for name, server in servers.items():
                for start in range(0, len(text.questions), 10):
                    questions = text.questions[start : start + 10]
                    answers = ask(server, [question.prompt for question in questions], 32)
                    right[name] += sum(
                        _says(maker, answer.tokens, question.reply)
                        for answer, question in zip(answers, questions, strict=True)
                    )
    print(f"needle, {dtype}: right of {asked}: {right}", file=sys.stderr)
    assert right["off"] >= 0.9 * asked
    assert right["on"] == right["off"]


def _says(maker: object, tokens: list[int], reply: str) -> bool:
    expected = maker.ids(reply)  # type: ignore[attr-defined]
    return tokens[: len(expected)] == expected
