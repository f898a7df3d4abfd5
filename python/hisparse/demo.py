"""`hisparse demo`: the real server and a small trained model, HiSparse on and off, questions with known answers."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparse.local_server import LocalServer, ServerDied
from hisparse.row_format import Bf16Row

PROJECT = Path(__file__).parents[2]
MODEL = PROJECT / "models" / "needle"
TEXTS = (PROJECT / "docs" / "architecture.md", PROJECT / "LICENSE")
TEXT_CHARACTERS = 8_000
"""About 3,900 tokens of the model's tokenizer."""

CODES = {"Lyra": "48213", "Tovani": "20417", "Kest": "90938", "Berudo": "55172", "Salin": "31906"}
"""The facts hidden in the text, evenly spread from its first line to its last."""

ASKED = (("Lyra",), ("Tovani",), ("Kest",), ("Berudo",), ("Salin",), ("Salin", "Kest", "Lyra"))
NEW_TOKENS = 64
FLAGS = (
    *("--context-length", "8192"),
    *("--max-total-tokens", "65536"),
    *("--max-running-requests", str(len(ASKED))),
    "--sleep-on-idle",
)
HISPARSE_FLAGS = ("--enable-hisparse", "--hisparse-config", '{"device_buffer_size": 512}')


@dataclass(frozen=True)
class Run:
    """What one server did with the questions.

    Attributes:
        tokens, logprobs: of each answer. answers: their texts.
        seconds: from the questions to the last answer, prefill included.
        row_bytes: KV rows held on the device, the prefill workspace included.
        hit_rate: None without HiSparse.
        command: how to start this server by hand.
    """

    tokens: list[list[str]]
    logprobs: list[list[float]]
    answers: list[str]
    seconds: float
    row_bytes: int
    hit_rate: float | None
    command: str


def demo(*, keep: bool) -> int:
    """Ask with HiSparse on, then off, and print answers and comparison.

    Args:
        keep: leave the server logs in place.

    Returns:
        Exit status: 0 if all outputs are the same, else 1.
    """
    if not MODEL.exists():
        print("hisparse: error: the demo needs models/needle of the repository; run it from a clone.", file=sys.stderr)
        return 1
    logs = Path(tempfile.mkdtemp(prefix="hisparse-demo-"))
    print(f"{len(CODES)} codes hidden in {TEXT_CHARACTERS} characters of {' and '.join(path.name for path in TEXTS)}.")
    try:
        on = _run(logs / "on.log", *HISPARSE_FLAGS)
        off = _run(logs / "off.log")
    except ServerDied as error:
        print(f"hisparse: error: a server failed: {error}", file=sys.stderr)
        return 1
    finally:
        if keep:
            print(f"Server logs: {logs}")
        else:
            shutil.rmtree(logs)
    same = on.tokens == off.tokens and on.logprobs == off.logprobs
    print(f"\n{_answers(on)}\n\n{_comparison(on, off, same)}\n\nBy hand:\n  {on.command}")
    return 0 if same else 1


def _run(log: Path, *flags: str) -> Run:
    print(f"Starting SGLang with HiSparse {'on' if flags else 'off'} ...", flush=True)
    with LocalServer(MODEL, *FLAGS, *flags, log=log) as server:
        print(f"  {len(ASKED)} requests of about 3,900 tokens at once ...", flush=True)
        started = time.perf_counter()
        choices = _ask(server)
        seconds = time.perf_counter() - started
        state = server.hisparse_state()
        if flags and state is None:
            raise ServerDied("HiSparse is not active in it; `hisparse doctor` says why.")
        command = shlex.join(["hisparse", "serve", *server.command[server.command.index("--model-path") :]])
        return Run(
            tokens=[choice.logprobs.tokens for choice in choices],
            logprobs=[choice.logprobs.token_logprobs for choice in choices],
            answers=[choice.text for choice in choices],
            seconds=seconds,
            row_bytes=state["hot_rows_bytes"] + state["workspace_bytes"] if state else _pool_bytes(server),
            hit_rate=state["hit_rate"] if state else None,
            command=command,
        )


def _ask(server: LocalServer) -> list[Any]:
    """All questions in one call of the OpenAI client: both servers get the same batches, which in bfloat16 alone can
    move a token."""
    from openai import OpenAI

    client = OpenAI(base_url=server.url + "/v1", api_key="none", timeout=600)
    answer = client.completions.create(
        model="needle",
        prompt=[f"<|bos|><|user|>{_text()}\n{_question(names)}<|end|><|assistant|>" for names in ASKED],
        max_tokens=NEW_TOKENS,
        temperature=0,
        logprobs=1,
    )
    return sorted(answer.choices, key=lambda choice: choice.index)


def _text() -> str:
    lines = "\n".join(path.read_text() for path in TEXTS)[:TEXT_CHARACTERS].splitlines()
    for i, (name, code) in reversed(list(enumerate(CODES.items()))):
        lines.insert(i * len(lines) // (len(CODES) - 1), f"The access code of {name} is {code}.")
    return "\n".join(lines)


def _question(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return f"What is the access code of {names[0]}?"
    return f"What are the access codes of {', '.join(names[:-1])} and {names[-1]}?"


def _expected(names: tuple[str, ...]) -> str:
    return "\n".join(f"The access code of {name} is {CODES[name]}." for name in names)


def _pool_bytes(server: LocalServer) -> int:
    """KV rows of SGLang's own pool: every slot, every layer, and its padding page."""
    model = json.loads((MODEL / "config.json").read_text())
    row = Bf16Row(model["kv_lora_rank"], model["qk_rope_head_dim"])
    info = server.get("/server_info")
    return model["num_hidden_layers"] * (info["max_total_num_tokens"] + info["page_size"]) * row.row_bytes


def _answers(run: Run) -> str:
    lines = []
    for names, answer in zip(ASKED, run.answers, strict=True):
        verdict = "right" if answer.strip() == _expected(names) else "WRONG"
        lines += [
            f"  {_question(names)}",
            *(f"    {line}" for line in answer.strip().splitlines()),
            f"    -> {verdict}",
        ]
    return "\n".join(lines)


def _comparison(on: Run, off: Run, same: bool) -> str:
    total = sum(map(len, off.tokens))
    pairs = zip(on.tokens, off.tokens, strict=True)
    equal = sum(a == b for ours, plain in pairs for a, b in zip(ours, plain, strict=False))
    produced = [sum(map(len, run.tokens)) / run.seconds for run in (on, off)]
    rows = (
        ("", "HiSparse on", "off"),
        ("tokens identical", f"{equal} of {total}", ""),
        ("log probabilities identical", "yes" if on.logprobs == off.logprobs else "NO", ""),
        ("KV rows on the device", f"{on.row_bytes / 2**20:.1f} MiB", f"{off.row_bytes / 2**20:.1f} MiB"),
        ("hit rate of the hot buffer", f"{on.hit_rate:.1%}", "-"),
        ("output tokens/s with prefill", f"{produced[0]:.1f}", f"{produced[1]:.1f}"),
    )
    lines = [f"  {name:<30}{ours:>14}{plain:>14}".rstrip() for name, ours, plain in rows]
    return "\n".join([*lines, "", "  outputs are the same" if same else "  OUTPUTS DIFFER"])
