"""Decode throughput against concurrency: without HiSparse, with SGLang's own, with ours; one device budget for KV.

    python benchmark/serving/bench_concurrency.py --out DIR [--budget-gib 4.5] [--prompt 32768] [--levels 1 4 16 64]

Starts the servers on one GPU (idle ones sleep), measures one after another, writes DIR/concurrency.json, a table
(DIR/concurrency.md, also printed) and DIR/concurrency.png. A level is reached by sending more prompts of their own;
when all that fit are decoding, tokens are counted for a few seconds at each hit rate. The selection comes from
selection_plugin/, the model from layer_shapes.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import profile_decode
import stream_client as client
from layer_shapes import VOCABULARY, write_config
from modes import Mode, plan_modes

from hisparse.local_server import LocalServer, ServerDied

SETTLE_S = 1.0
WINDOW_TRIES = 3
PREFILL = "Prefill batch"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-gib", type=float, default=4.5, help="device memory for KV")
    parser.add_argument("--prompt", type=int, default=32_768, help="tokens a prompt")
    parser.add_argument("--new", type=int, default=6_000, help="most tokens generated a request")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument(
        "--hits", type=float, nargs="+", default=[95, 90, 80], help="percent of selected rows on the GPU"
    )
    parser.add_argument("--modes", nargs="+", default=["off", "builtin", "ours"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--buffer", type=int, default=4096, help="device_buffer_size")
    parser.add_argument("--window-s", type=float, default=3.0)
    parser.add_argument("--ttft-prompts", type=int, default=3, help="prompts sent alone for the time to first token")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="levels to profile; 0 = a prompt alone")
    parser.add_argument("--deadline-s", type=float, default=560, help="stop beginning levels after this long")
    parser.add_argument("--flags", default="", help="further flags for every server")
    options = parser.parse_args()
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    model = write_config(options.out / "model", layers=options.layers)
    selection = options.out / "selection"
    modes = plan_modes(options, selection)
    results: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}, "machine": _machine()}
    with ExitStack() as stack:
        servers = _start_all(stack, modes, model, options)
        print(f"servers up after {time.monotonic() - started:.0f} s: {', '.join(servers)}", flush=True)
        for mode in modes:
            if mode.name not in servers:
                continue
            selection.unlink(missing_ok=True)
            deadline = started + options.deadline_s
            rows = asyncio.run(measure(servers[mode.name], mode, selection, options, deadline))
            results[mode.name] = {"flags": list(mode.flags), "sizes": mode.sizes, **rows}
            (options.out / "concurrency.json").write_text(json.dumps(results, indent=1))
            print(f"{mode.name} done after {time.monotonic() - started:.0f} s", flush=True)
            servers[mode.name].stop()
    report(options.out, results)


def _start_all(stack: ExitStack, modes: list[Mode], model: Path, options: argparse.Namespace) -> dict[str, LocalServer]:
    """Start every server, all at once; a server that does not come up is named and left out."""
    waiting = {}
    for mode in modes:
        server = LocalServer(
            model, *mode.flags, *options.flags.split(), log=options.out / f"{mode.name}.log",
            environment=mode.environment, launcher=mode.launcher, timeout_s=400,
        )  # fmt: skip
        waiting[mode.name] = server
        server.start()
        stack.callback(server.stop)
    servers = {}
    for name, server in waiting.items():
        try:
            server.wait()
            servers[name] = server
        except ServerDied as error:
            print(f"{name} did not start: {error}"[-1500:], flush=True)
    return servers


async def measure(
    server: LocalServer, mode: Mode, selection: Path, options: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    """Everything about one server: time to first token alone, then level after level."""
    async with client.session() as session:
        ids = [client.prompt(seed, options.prompt, VOCABULARY) for seed in range(max(options.levels))]
        alone = []
        for seed in range(options.ttft_prompts + 1):  # the first one compiles what is left to compile
            stream = client.start(session, server.url, client.prompt(10_000 + seed, options.prompt, VOCABULARY), 2)
            assert stream.task is not None
            await stream.task
            assert stream.arrivals, f"{mode.name}: {stream.error}"
            alone.append(stream.ttft)
        if 0 in options.profile:
            profiled = asyncio.create_task(asyncio.to_thread(_profile, server, mode, 0, options, 4))
            await asyncio.sleep(1)
            stream = client.start(session, server.url, client.prompt(20_000, options.prompt, VOCABULARY), 2)
            await profiled
            await client.finish([stream])
        streams: list[client.Stream] = []
        levels = []
        for level in options.levels:
            if time.monotonic() > deadline:
                print(f"{mode.name}: no time for level {level}", flush=True)
                break
            _write_miss_rate(selection, 1 - options.hits[0] / 100)
            fresh = [client.start(session, server.url, ids[i], options.new) for i in range(len(streams), level)]
            streams += fresh
            await _all_decoding(streams)
            for hits in options.hits if mode.depends_on_hits else options.hits[:1]:
                _write_miss_rate(selection, 1 - hits / 100)
                levels.append(await _window(server, mode, streams, level, hits, options.window_s))
            levels[-1]["ttft_s"] = [round(s.ttft, 3) for s in fresh if s.arrivals]
            if level in options.profile:
                await asyncio.to_thread(_profile, server, mode, level, options)
        errors = [s.error for s in streams if s.error]
        await client.finish(streams)
    return {
        "ttft_alone_s": [round(t, 3) for t in alone[1:]],
        "levels": levels,
        "errors": errors[:5],
        "retractions": server.log_text().count("retract"),
        "state": server.hisparse_state() if server.alive else None,
    }


def _profile(
    server: LocalServer, mode: Mode, level: int, options: argparse.Namespace, steps: int = profile_decode.STEPS
) -> None:
    """Write DIR/profile-MODE-LEVEL.md; level 0 is a prompt alone."""
    trace = profile_decode.record(server, options.out / f"trace-{mode.name}-{level}", steps)
    text = profile_decode.table(profile_decode.summarise(trace, steps)) if trace else "no trace came"
    (options.out / f"profile-{mode.name}-{level}.md").write_text(text + "\n")


async def _all_decoding(streams: list[client.Stream], quiet_s: float = 4.0) -> None:
    """Wait until every stream has a token, or no further one got its first while the others went on decoding."""
    seen, since = -1, time.perf_counter()
    while True:
        await asyncio.sleep(0.1)
        begun = sum(bool(s.arrivals) for s in streams)
        ended = sum(s.task is not None and s.task.done() for s in streams)
        if begun == len(streams) or ended == len(streams):
            return
        newest = max((s.arrivals[-1] for s in streams if s.arrivals), default=0.0)
        going = time.perf_counter() - newest < 0.5
        if begun != seen or not going:
            seen, since = begun, time.perf_counter()
        elif time.perf_counter() - since > quiet_s:
            return


async def _window(
    server: LocalServer, mode: Mode, streams: list[client.Stream], level: int, hits: float, seconds: float
) -> dict[str, Any]:
    await asyncio.sleep(SETTLE_S)
    # A window in which the server also prefilled, after a retraction say, does not show decode.
    for _ in range(WINDOW_TRIES):
        prefills = server.log_text().count(PREFILL)
        before = await asyncio.to_thread(server.hisparse_state) if mode.name == "ours" else None
        await asyncio.sleep(0.2)
        begin = time.perf_counter()
        await asyncio.sleep(seconds)
        window = client.Window.of(streams, begin, time.perf_counter())
        disturbed = server.log_text().count(PREFILL) != prefills
        if not disturbed:
            break
    row = {
        "level": level, "hits": hits, "running": window.running,
        "tokens_per_s": round(window.tokens / window.seconds, 1),
        "disturbed": disturbed,
        "itl_p50_ms": round(window.gap_ms(0.5), 3), "itl_p99_ms": round(window.gap_ms(0.99), 3),
    }  # fmt: skip
    if before is not None:
        after = await asyncio.to_thread(server.hisparse_state)
        assert after is not None
        gone = {key: after[key] - before[key] for key in ("selected_positions", "missed_positions")}
        row["hit_rate"] = round(1 - gone["missed_positions"] / max(gone["selected_positions"], 1), 4)
    print(mode.name, row, flush=True)
    return row


def _write_miss_rate(selection: Path, rate: float) -> None:
    fresh = selection.with_suffix(".new")
    fresh.write_text(f"{rate:.6f}")
    fresh.replace(selection)


def _machine() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip() + f"; Python {sys.version.split()[0]}"


def report(out: Path, results: dict[str, Any]) -> None:
    """Write and print the table; draw the plot."""
    names = [name for name in ("off", "builtin", "ours") if name in results]
    lines = ["| server | sent | hits | running | tokens/s | ITL p50 | p99 ms | hit rate seen |", "|---|" + "---:|" * 7]
    for name in names:
        for row in results[name]["levels"]:
            hits = row["hits"] if name != "off" else "any"
            seen = f"{100 * row['hit_rate']:.1f} %" if "hit_rate" in row else ""
            star = "*" if row["disturbed"] else ""
            lines.append(
                f"| {name} | {row['level']} | {hits} | {row['running']} | {row['tokens_per_s']:.0f}{star} | "
                f"{row['itl_p50_ms']:.2f} | {row['itl_p99_ms']:.2f} | {seen} |"
            )
    lines.append("\n\\* the server also prefilled meanwhile")
    for name in names:
        alone = results[name]["ttft_alone_s"]
        lines.append(f"\nTTFT alone, {name}: {statistics.median(alone):.3f} s ({alone})")
    text = "\n".join(lines)
    (out / "concurrency.md").write_text(text + "\n")
    print(text)
    try:
        from plot_concurrency import plot
    except ImportError as error:
        print(f"no plot: {error}")
        return
    plot(results, out / "concurrency.png")


if __name__ == "__main__":
    main()
