"""Recall of needle through the real server on the CPU, and HiSparse on compared with off, token by token.

    python benchmark/needle/serve_recall.py models/needle out/needle-recall

Every text hides facts at depth 0, 0.25, 0.5, 0.75 and 1. The text is sent once by itself; then its questions, each a
request with the text before it, go out in calls of ten. So the text's KV comes from the radix cache, with HiSparse from
the host pool, and all servers see the same batches. Temperature 0.

An answer is right when it is the expected sentence, to the letter. Two servers are the same when tokens and their log
probabilities are equal, compared as numbers, without tolerance.

Finished texts are in FOLDER/answers.jsonl and are not asked again: run the command again after an interruption. In the
end the tables are printed and written to FOLDER/recall.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import recall_tables
from evaluate import LENGTHS, Maker
from recall_texts import Text, make_text
from tqdm import tqdm

from hisparse.local_server import LocalServer

ASKED_AT_ONCE = 10
NEW_TOKENS = 32
PLUGIN = Path(__file__).parent / "server_plugin"
CONTEXT_LEN = max(LENGTHS) + 64
FLAGS = (
    *("--context-length", str(CONTEXT_LEN)),
    *("--max-total-tokens", "65536"),
    *("--max-running-requests", str(ASKED_AT_ONCE)),
    "--sleep-on-idle",
)


class Plan(NamedTuple):
    """Texts of a length, and facts at each depth of each. Their product is the questions a cell."""

    texts: int
    facts_a_depth: int


PLANS = {1024: Plan(4, 2), 2048: Plan(4, 2), 4096: Plan(2, 4), 8192: Plan(1, 8), 16384: Plan(1, 8)}
"""A long text is expensive to prefill and has room for many facts."""

CONFIGURATIONS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "HiSparse": (("--enable-hisparse", "--hisparse-config", '{"device_buffer_size": 512}'), {}),
    "top-k 256": ((), {}),
    "dense": (("--json-model-override-args", json.dumps({"index_topk": CONTEXT_LEN})), {"NEEDLE_DENSE": "1"}),
}


def environment(**more: str) -> dict[str, str]:
    """For a server with the plug-in of this folder."""
    paths = [str(PLUGIN), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def ask(server: LocalServer, text: Text) -> list[dict[str, Any]]:
    """The text by itself, then its questions in calls of ten."""
    assert "flushed" in str(server.post("/flush_cache?timeout=60")).lower()
    server.generate([text.prefix], max_new_tokens=1)
    answers = []
    for start in range(0, len(text.questions), ASKED_AT_ONCE):
        body = {
            "input_ids": [question.prompt for question in text.questions[start : start + ASKED_AT_ONCE]],
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS},
            "return_logprob": True,
        }
        answers += server.post("/generate", body, timeout_s=1800)
    return [
        {
            "depth": question.depth,
            "right": answer["text"].strip() == question.reply,
            "text": answer["text"],
            "tokens": answer["output_ids"],
            "logprobs": [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
            "cached_tokens": answer["meta_info"]["cached_tokens"],
        }
        for question, answer in zip(text.questions, answers, strict=True)
    ]


def run(model: Path, folder: Path, configuration: str, lengths: list[int], done: list[dict[str, Any]]) -> None:
    """Ask what is not in `done` yet, and append it to FOLDER/answers.jsonl."""
    finished = {(line["length"], line["seed"]) for line in done if line["configuration"] == configuration}
    cases = [(n, seed) for n in lengths for seed in range(PLANS[n].texts) if (n, seed) not in finished]
    if not cases:
        return
    flags, more = CONFIGURATIONS[configuration]
    log = folder / f"{configuration.replace(' ', '-')}.log"
    maker = Maker(model)
    with (
        LocalServer(model, *FLAGS, *flags, log=log, environment=environment(**more)) as server,
        tqdm(total=sum(n for n, _ in cases), desc=configuration, unit="tok") as bar,
    ):
        for length, seed in cases:
            text = make_text(maker, length, seed, PLANS[length].facts_a_depth)
            started = time.perf_counter()
            answers = ask(server, text)
            line = {
                "configuration": configuration,
                "length": length,
                "seed": seed,
                "seconds": time.perf_counter() - started,
                "answers": answers,
            }
            with (folder / "answers.jsonl").open("a") as out:
                out.write(json.dumps(line) + "\n")
            bar.update(length)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path, help="answers, server logs and tables go here")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    answers = options.folder / "answers.jsonl"
    for configuration in options.configurations.split(","):
        done = recall_tables.read(answers)
        run(options.model, options.folder, configuration, [int(n) for n in options.lengths.split(",")], done)
    cells = recall_tables.cells(recall_tables.read(answers))
    (options.folder / "recall.json").write_text(json.dumps([cell._asdict() for cell in cells], indent=1) + "\n")
    print(recall_tables.markdown(cells))
    print(f"{os.cpu_count()} CPU cores, {platform.platform()}, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
