"""`hisparse demo`: the real server, a small model, HiSparse on and off, one table."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparse.budget import GIB
from hisparse.local_server import LocalServer, ServerDied
from hisparse.row_format import Bf16Row

PROJECT = Path(__file__).parents[2]
QUESTIONS = (
    "What stays on the device?",
    "How is a position in the tail ring found?",
    "What happens to a request that is retracted?",
    "Which rows does swap-in evict?",
)
DOCUMENT_CHARACTERS = 6000
"""Of docs/architecture.md or, in an installed package, of the coordinator's source. About as many tokens: the demo's
tokenizer is byte-level."""

NEW_TOKENS = 64
INDEX_TOPK = 128
DEVICE_BUFFER_SIZE = 256
FLAGS = (
    *("--context-length", "8192"),
    *("--max-total-tokens", "32768"),
    *("--max-running-requests", str(len(QUESTIONS))),
    "--sleep-on-idle",
)
HISPARSE_FLAGS = ("--enable-hisparse", "--hisparse-config", f'{{"device_buffer_size": {DEVICE_BUFFER_SIZE}}}')


@dataclass(frozen=True)
class Run:
    """What one server did with the questions.

    Attributes:
        tokens: the answers' tokens. logprobs: theirs.
        tokens_per_s: generated tokens a second with the document cached, all questions at once.
        row_bytes: KV rows it holds on the device. hit_rate: None without HiSparse.
    """

    tokens: list[list[str]]
    logprobs: list[list[float]]
    tokens_per_s: float
    row_bytes: int
    hit_rate: float | None
    command: str


def demo(*, keep: bool) -> int:
    """Ask the questions with HiSparse on, then off, and print the comparison.

    Args:
        keep: leave the checkpoint and the logs in place.

    Returns:
        Exit status: 0 if all outputs are the same, else 1.
    """
    from hisparse.cpu.checkpoint import make_checkpoint

    folder = Path(tempfile.mkdtemp(prefix="hisparse-demo-"))
    checkpoint = folder / "model"
    try:
        make_checkpoint(checkpoint, style="conditioned", layers=4, index_topk=INDEX_TOPK)
        print(f"A DeepSeek-V3.2-architecture model with random weights (4 layers, index_topk {INDEX_TOPK}).")
        on = _serve(checkpoint, folder / "on.log", *HISPARSE_FLAGS)
        off = _serve(checkpoint, folder / "off.log")
    except ServerDied as error:
        keep = True
        print(f"hisparse: error: the server did not start: {error}")
        return 1
    finally:
        if keep:
            print(f"Checkpoint and logs: {folder}")
        else:
            shutil.rmtree(folder)
    same = on.tokens == off.tokens and on.logprobs == off.logprobs
    print(_table(on, off, same))
    print(f"\nBy hand (any DSA checkpoint in place of the model):\n  {on.command}")
    return 0 if same else 1


def _serve(checkpoint: Path, log: Path, *flags: str) -> Run:
    label = "on" if flags else "off"
    print(f"Starting sglang with HiSparse {label} ...", flush=True)
    with LocalServer(checkpoint, *FLAGS, *flags, log=log) as server:
        print(f"  {len(QUESTIONS)} questions about a document of {DOCUMENT_CHARACTERS} characters ...", flush=True)
        _ask(server)
        started = time.perf_counter()
        choices = _ask(server)
        seconds = time.perf_counter() - started
        state = server.hisparse_state()
        tokens = [choice.logprobs.tokens for choice in choices]
        command = shlex.join(["hisparse", "serve", *server.command[server.command.index("--model-path") :]])
        return Run(
            tokens=tokens,
            logprobs=[choice.logprobs.token_logprobs for choice in choices],
            tokens_per_s=sum(map(len, tokens)) / seconds,
            row_bytes=state["hot_rows_bytes"] + state["workspace_bytes"] if state else _pool_bytes(server, checkpoint),
            hit_rate=state["hit_rate"] if state else None,
            command=command.replace(str(checkpoint), "MODEL"),
        )


def _ask(server: LocalServer) -> list[Any]:
    """All questions in one request of the OpenAI client: the batch is the same for both servers, and in bfloat16 the
    batch alone can move a token."""
    from openai import OpenAI

    client = OpenAI(base_url=server.url + "/v1", api_key="none", timeout=600)
    prompts = [f"{_document()}\n\nQuestion: {question}\nAnswer:" for question in QUESTIONS]
    answer = client.completions.create(
        model="demo", prompt=prompts, max_tokens=NEW_TOKENS, temperature=0, logprobs=1, extra_body={"ignore_eos": True}
    )
    return sorted(answer.choices, key=lambda choice: choice.index)


def _document() -> str:
    page = PROJECT / "docs" / "architecture.md"
    source = page if page.exists() else Path(__file__).with_name("coordinator.py")
    return source.read_text()[:DOCUMENT_CHARACTERS]


def _pool_bytes(server: LocalServer, checkpoint: Path) -> int:
    """KV rows of SGLang's own pool: every slot, every layer, and its padding page."""
    model = json.loads((checkpoint / "config.json").read_text())
    row = Bf16Row(model["kv_lora_rank"], model["qk_rope_head_dim"])
    info = server.get("/get_server_info")
    return model["num_hidden_layers"] * (info["max_total_num_tokens"] + info["page_size"]) * row.row_bytes


def _table(on: Run, off: Run, same: bool) -> str:
    total = sum(map(len, off.tokens))
    equal = sum(
        a == b for ours, plain in zip(on.tokens, off.tokens, strict=True) for a, b in zip(ours, plain, strict=False)
    )
    rows = [
        ("", "HiSparse on", "off"),
        ("tokens identical", f"{equal} of {total}", ""),
        ("log probabilities identical", "yes" if on.logprobs == off.logprobs else "NO", ""),
        ("KV rows on the device", f"{on.row_bytes / GIB * 1024:.1f} MiB", f"{off.row_bytes / GIB * 1024:.1f} MiB"),
        ("hit rate of the hot buffer", f"{on.hit_rate:.1%}", "-"),
        ("generated tokens/s", f"{on.tokens_per_s:.1f}", f"{off.tokens_per_s:.1f}"),
    ]
    lines = [f"  {name:<28}{ours:>14}{plain:>14}".rstrip() for name, ours, plain in rows]
    return "\n".join(["", *lines, "", "  outputs are the same" if same else "  OUTPUTS DIFFER"])
