"""Hit rate of the hot buffer at one, two and four times top-k, and a recorded trace of selections.

    python benchmark/needle/hit_rate.py models/needle out/needle-hit-rate --traces benchmark/needle/traces

The selections are those of a trained indexer on the requests of `workloads`, the same for every buffer size. The rates
are the server's own counts, of decode alone. Traces come from the run with the smallest buffer; benchmark/needle/traces
says what they hold.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import facts
import numpy as np
from evaluate import Maker
from recall_texts import make_text
from serve_recall import environment
from tqdm import tqdm

from hisparse.local_server import LocalServer
from hisparse.trace_format import Trace, read_trace, write_trace

TOP_K = 256
BUFFERS = (256, 512, 1024)
LENGTH = 4096
SEEDS = (100, 101)  # two texts, hence two requests at a time
FREE_TOKENS = 256
FLAGS = (
    *("--context-length", "8192"),
    *("--max-total-tokens", "32768"),
    *("--max-running-requests", "4"),
    *("--enable-hisparse", "--hisparse-config"),
)


class Answers(NamedTuple):
    tokens: int
    right: int
    asked: int


Ask = Callable[[list[list[int]], dict[str, Any]], list[dict[str, Any]]]


class Workloads:
    """Requests like a user's, to both texts at once. `ask` sends prompts and returns the server's answers."""

    def __init__(self, maker: Maker) -> None:
        self.maker = maker
        self.texts = [make_text(maker, LENGTH, seed, facts_a_depth=2) for seed in SEEDS]

    def one_fact(self, ask: Ask) -> Answers:
        """One question a request, five requests a text after each other."""
        return _sum(self._asked(ask, [[text.facts[2 * i]] for text in self.texts]) for i in range(5))

    def four_facts(self, ask: Ask) -> Answers:
        """Four facts a question, the most that training had; two questions a text after each other."""
        return _sum(self._asked(ask, [text.facts[start::2][:4] for text in self.texts]) for start in (0, 1))

    def conversation(self, ask: Ask) -> Answers:
        """Four turns, two or three facts a turn; each prompt holds the turns before it."""
        histories = [text.prefix for text in self.texts]
        results = []
        for turn in range(4):
            wanted = [text.facts[turn::4] for text in self.texts]
            prompts = [
                history + self.maker.ids(("<|user|>" if turn else "\n") + _question(asked) + "<|end|><|assistant|>")
                for history, asked in zip(histories, wanted, strict=True)
            ]
            answers = ask(prompts, {"max_new_tokens": 100})
            results.append(_judged(answers, wanted))
            histories = [p + a["output_ids"] for p, a in zip(prompts, answers, strict=True)]
        return _sum(results)

    def free_text(self, ask: Ask) -> Answers:
        """The text goes on: no question, more filler in the manner of the training text."""
        answers = ask([text.prefix for text in self.texts], {"max_new_tokens": FREE_TOKENS, "ignore_eos": True})
        return Answers(sum(len(answer["output_ids"]) for answer in answers), 0, 0)

    def _asked(self, ask: Ask, wanted: list[list[facts.Fact]]) -> Answers:
        prompts = [
            text.prompt(self.maker, [fact.name for fact in asked])
            for text, asked in zip(self.texts, wanted, strict=True)
        ]
        return _judged(ask(prompts, {"max_new_tokens": 100}), wanted)


def _question(asked: list[facts.Fact]) -> str:
    return facts.question([fact.name for fact in asked])


def _judged(answers: list[dict[str, Any]], wanted: list[list[facts.Fact]]) -> Answers:
    """Counts facts whose line is there, at its place."""
    right = 0
    for answer, asked in zip(answers, wanted, strict=True):
        lines = answer["text"].strip().splitlines()
        right += sum(ours == fact.sentence() for ours, fact in zip(lines, asked, strict=False))
    return Answers(sum(len(answer["output_ids"]) for answer in answers), right, sum(map(len, wanted)))


def _sum(results: Any) -> Answers:
    return Answers(*np.sum(list(results), axis=0).tolist())


class Recorder:
    """Makes a trace file of each workload from what the server records. Parts are complete in themselves, and the
    server writes one when nothing has run for a while; so a workload is the parts that came since the one before."""

    def __init__(self, server: LocalServer) -> None:
        self.server = server
        self.seen: set[Path] = set()

    def skip(self) -> None:
        self.seen |= set(self._settled())

    def finish(self, out: Path, workload: str) -> None:
        """Steps and requests are counted from 0 in every file."""
        new = [path for path in self._settled() if path not in self.seen]
        self.seen |= set(new)
        with tempfile.TemporaryDirectory() as folder:
            for path in new:
                shutil.copy(path, folder)
            trace = read_trace(Path(folder))
        requests, request = np.unique(trace.request, return_inverse=True)
        seeds = np.isin(trace.seed_request, requests)
        kept = ("top_k", "page_size", "row_bytes", "device_buffer_size")
        write_trace(
            out,
            Trace(
                about={"workload": workload, **{key: trace.about[key] for key in kept}},
                step=trace.step - trace.step.min(),
                layer=trace.layer,
                request=request,
                seq_len=trace.seq_len,
                selected=trace.selected,
                seed_layer=trace.seed_layer[seeds],
                seed_request=np.searchsorted(requests, trace.seed_request[seeds]),
                seeded=trace.seeded[seeds],
            ),
        )

    def _settled(self) -> list[Path]:
        """The parts, once they hold all positions that the server counted."""
        deadline = time.monotonic() + 60
        while True:
            state = self.server.hisparse_state()
            assert state is not None and time.monotonic() < deadline, state
            parts = sorted(Path(state["trace_folder"]).glob("*.npz"))
            held = 0
            for part in parts:
                trace = read_trace(part)
                held += int(((trace.selected >= 0) & (trace.selected < trace.seq_len[:, None])).sum())
            if held >= state["selected_positions"]:
                return parts
            time.sleep(1.0)


def run(model: Path, folder: Path, buffer: int, traces: Path | None) -> list[dict[str, Any]]:
    """All workloads on one server; a line of figures each."""
    keys = {"device_buffer_size": buffer, **({"trace": str(folder / "recorded")} if traces else {})}
    config = json.dumps(keys)
    workloads = Workloads(Maker(model))
    lines = []
    with LocalServer(
        model, *FLAGS, config, "--sleep-on-idle", log=folder / f"{buffer}.log", environment=environment()
    ) as server:

        def ask(prompts: list[list[int]], sampling: dict[str, Any]) -> list[dict[str, Any]]:
            return server.generate(prompts, **sampling)

        recorder = Recorder(server) if traces else None
        for text in workloads.texts:
            server.generate([text.prefix], max_new_tokens=1)
        if recorder:
            recorder.skip()
        for name in tqdm(("one_fact", "four_facts", "conversation", "free_text"), desc=f"buffer {buffer}"):
            before = server.hisparse_state()
            answers = getattr(workloads, name)(ask)
            if recorder:
                recorder.finish(traces / f"{name}.npz", (getattr(Workloads, name).__doc__ or "").strip())
            after = server.hisparse_state()
            assert before is not None and after is not None
            counts = {
                kind: after[f"{kind}_positions"] - before[f"{kind}_positions"]
                for kind in ("selected", "tail_ring", "hit", "missed")
            }
            rate = 1 - counts["missed"] / counts["selected"]
            lines.append({"buffer": buffer, "workload": name, **answers._asdict(), **counts, "hit_rate": rate})
    return lines


def markdown(lines: list[dict[str, Any]]) -> str:
    """A row a workload, a column a buffer size: hit rate, and rows copied a step, layer and request."""
    buffers = sorted({line["buffer"] for line in lines})
    rows = ["| requests | output tokens | facts right | " + " | ".join(f"buffer {b}" for b in buffers) + " |"]
    rows.append("|" + "---|" * (len(buffers) + 3))
    for name in dict.fromkeys(line["workload"] for line in lines):
        here = {line["buffer"]: line for line in lines if line["workload"] == name}
        shown = [f"{here[b]['hit_rate']:.1%} ({here[b]['missed'] * TOP_K / here[b]['selected']:.1f})" for b in buffers]
        first = here[buffers[0]]
        facts_right = f"{first['right']}/{first['asked']}" if first["asked"] else ""
        rows.append(f"| {name.replace('_', ' ')} | {first['tokens']} | {facts_right} | {' | '.join(shown)} |")
    return "\n".join(rows)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path, help="server logs and figures go here")
    parser.add_argument("--traces", type=Path, help="also record traces, into this folder")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "hit-rate.json"
    lines = json.loads(path.read_text()) if path.exists() else []
    for buffer in BUFFERS:
        if any(line["buffer"] == buffer for line in lines):
            continue
        lines += run(options.model, options.folder, buffer, options.traces if buffer == BUFFERS[0] else None)
        path.write_text(json.dumps(lines, indent=1) + "\n")
    print(markdown(lines))


if __name__ == "__main__":
    main()
