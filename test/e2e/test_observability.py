"""What a server says of HiSparse while it runs: metrics, the decode log line, /server_info, and a recorded trace."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import hisparse_kernel.reference as reference
from hisparse.local_server import LocalServer
from hisparse.simulator.simulate import regions_of, simulate
from hisparse.trace_format import Trace

from .pair import DEVICE_BUFFER_SIZE, FLAGS, FORKED, INDEX_TOPK, PAGE_SIZE, prompt, when_written

LAYERS = 2
REGIONS = 8
POOL_TOKENS = 1536
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "hisparse.json"
KINDS = ("tail_ring_positions", "hit_positions", "missed_positions")


class Observed(NamedTuple):
    server: LocalServer
    traces: Path

    def scrape(self) -> dict[str, float]:
        """Samples of HiSparse's by name, the prefix left out; buckets left out too."""
        return {
            sample.name.removeprefix("sglang:hisparse_"): sample.value
            for sample in self.samples()
            if sample.name.startswith("sglang:hisparse_") and not sample.name.endswith("_bucket")
        }

    def samples(self) -> list[Any]:
        text = self.server.get("/metrics")
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def state(self) -> dict[str, Any]:
        state = self.server.hisparse_state()
        assert state is not None
        return state

    def settled(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Metrics and state of the idle server; metrics of the last steps come when the scheduler finds itself idle."""
        deadline = time.monotonic() + 30
        while True:
            state, scraped = self.state(), self.scrape()
            if state["regions_used"] == 0 and scraped["selected_positions_total"] == state["selected_positions"]:
                return scraped, state
            assert time.monotonic() < deadline, (scraped, state)
            time.sleep(0.2)


@pytest.fixture(scope="module")
def observed(conditioned_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    directory = tmp_path_factory.mktemp("observed")
    config = {"device_buffer_size": DEVICE_BUFFER_SIZE, "trace": str(directory / "traces")}
    flags = (
        *(*FLAGS, "--enable-hisparse", "--hisparse-config", json.dumps(config)),
        *("--enable-metrics", "--decode-log-interval", "5", "--served-model-name", "observed"),
        *("--max-total-tokens", str(POOL_TOKENS), "--schedule-conservativeness", "0.1"),
    )
    with LocalServer(
        conditioned_checkpoint, *flags, log=directory / "log", environment={"OMP_NUM_THREADS": "1"}, launcher=FORKED
    ) as server:
        yield Observed(server, directory / "traces")
        assert server.alive and "Traceback" not in server.log_text(), server.log_tail()


def test_every_metric_is_there_from_the_start(observed: Observed) -> None:
    scraped, state = observed.settled()
    assert scraped["host_pool_tokens"] == state["host_pool_tokens"] == POOL_TOKENS
    assert scraped["regions"] == state["regions"] == REGIONS
    assert scraped["retractions_total"] == 0
    (sample,) = (s for s in observed.samples() if s.name == "sglang:hisparse_selected_positions_total")
    assert sample.labels["model_name"] == "observed"
    assert {"model_name", "tp_rank", "pp_rank", "engine_type"} <= set(sample.labels)


def test_totals_agree_with_each_other_and_the_server(observed: Observed) -> None:
    before, _ = observed.settled()
    prefix = prompt(1, 300)
    observed.server.generate([prefix + prompt(2, 5)], max_new_tokens=20, ignore_eos=True)
    lengths = (1, 64, 150)
    answers = observed.server.generate(
        [prefix + prompt(3, 9), *(prompt(10 + n, n) for n in lengths)], max_new_tokens=100, ignore_eos=True
    )
    scraped, state = observed.settled()
    for figure in ("selected_positions", *KINDS, "swapped_in_bytes", "backed_up_bytes", "prefix_tokens_gathered"):
        assert scraped[f"{figure}_total"] == state[figure] > before[f"{figure}_total"], figure
    assert scraped["selected_positions_total"] == sum(scraped[f"{kind}_total"] for kind in KINDS)
    row_bytes = state["swapped_in_bytes"] // state["missed_positions"]
    assert state["host_pool_bytes"] == (POOL_TOKENS + PAGE_SIZE) * LAYERS * row_bytes
    assert state["swapped_in_bytes"] == state["missed_positions"] * row_bytes
    # Every token is stored once: new prompt tokens and each step's input; the last output never, and a step that SGLang
    # ran ahead of a request's end is stored too.
    cached = answers[0]["meta_info"]["cached_tokens"]
    assert cached >= 256
    new = 305 + 19 + (300 + 9 - cached) + sum(lengths) + 4 * 99
    stored = (scraped["backed_up_bytes_total"] - before["backed_up_bytes_total"]) / (row_bytes * LAYERS)
    assert new <= stored <= new + 5
    assert scraped["prefix_tokens_gathered_total"] - before["prefix_tokens_gathered_total"] == cached
    assert scraped["regions_used"] == scraped["host_pool_used_tokens"] == 0
    assert scraped["host_pool_cached_tokens"] == state["host_pool_cached_tokens"] >= 300


def test_totals_never_fall_and_the_state_is_seen_under_load(observed: Observed) -> None:
    """Six requests outgrow the pool together: some are retracted."""
    before, _ = observed.settled()
    prompts = [prompt(200 + i, n) for i, n in enumerate((100, 150, 200, 250, 300, 120))]
    load = threading.Thread(
        target=observed.server.generate, args=(prompts,), kwargs={"max_new_tokens": 300, "ignore_eos": True}
    )
    load.start()
    last, most_regions, most_tokens = before, 0.0, 0.0
    while load.is_alive():
        scraped = observed.scrape()
        for name, value in scraped.items():
            if name.endswith(("_total", "_count", "_sum")):
                assert value >= last[name], name
        assert scraped["selected_positions_total"] == sum(scraped[f"{kind}_total"] for kind in KINDS)
        assert 0 <= scraped["regions_used"] <= REGIONS
        assert 0 <= scraped["host_pool_used_tokens"] + scraped["host_pool_cached_tokens"] <= POOL_TOKENS
        most_regions = max(most_regions, scraped["regions_used"])
        most_tokens = max(most_tokens, scraped["host_pool_used_tokens"])
        last = scraped
        load.join(0.3)
    assert most_regions >= 2 and most_tokens >= 100
    after, state = observed.settled()
    assert after["retractions_total"] == state["retractions"] > 0
    theirs = {sample.name: sample.value for sample in observed.samples()}
    assert after["retractions_total"] == theirs["sglang:num_retracted_requests_total"]


def test_swap_in_time_is_sampled(observed: Observed) -> None:
    observed.server.generate([prompt(5, 80)], max_new_tokens=30, ignore_eos=True)
    scraped, _ = observed.settled()
    assert scraped["swap_in_seconds_count"] >= 5
    assert 1e-5 < scraped["swap_in_seconds_sum"] / scraped["swap_in_seconds_count"] < 1


def test_the_decode_log_line(observed: Observed) -> None:
    observed.server.generate([prompt(6, 80)], max_new_tokens=30, ignore_eos=True)
    lines = [line for line in observed.server.log_text().splitlines() if "Decode batch" in line]
    assert lines
    for line in lines:
        found = re.search(r"hisparse hit rate: ([\d.]+), swapped in: ([\d.]+) MB, regions: (\d)/8", line)
        assert found and 0 <= float(found[1]) <= 1, line


def test_the_dashboard_asks_for_what_there_is(observed: Observed) -> None:
    observed.settled()
    names = {sample.name for sample in observed.samples()}
    asked = {
        name
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"sglang:\w+", target["expr"])
    }
    assert len(asked) >= 14
    assert asked <= names, asked - names


def test_a_replayed_trace_gives_the_servers_counters(observed: Observed) -> None:
    """Prefix hits, retractions and all: the selections, put through the reference, hit and miss as they did here."""
    observed.server.generate([prompt(7, 64), prompt(8, 400)], max_new_tokens=80, ignore_eos=True)
    _, state = observed.settled()
    trace = when_written(Path(state["trace_folder"]), state["selected_positions"])
    assert Path(state["trace_folder"]).parent == observed.traces
    about = trace.about
    assert (about["model"], about["top_k"], about["layers"], about["device_buffer_size"]) == (
        *("observed", INDEX_TOPK, list(range(LAYERS)), DEVICE_BUFFER_SIZE),
    )
    counted = [state[kind] for kind in KINDS]
    assert replayed(trace) == counted
    simulated = simulate(trace, regions_of(trace), buffer=DEVICE_BUFFER_SIZE, policy="lru")
    assert simulated.counts.sum(0).tolist() == counted, "hisparse simulate says what the server did"


def replayed(trace: Trace) -> list[int]:
    """Tail, hit and miss entries over all requests and layers, by the reference's own LRU; rows are of no matter."""
    counters = torch.zeros(3, dtype=torch.int64)
    buffer, page_size = trace.about["device_buffer_size"], trace.page_size
    longest = int(trace.seq_len.max())
    rows = torch.zeros(max(longest, buffer + page_size), 16, dtype=torch.uint8)
    one = torch.zeros(1, dtype=torch.int32)
    for request, layer, steps in trace.sequences():
        state = {
            "owners": torch.full((1, buffer), -1, dtype=torch.int32),
            "lru_order": torch.arange(buffer, dtype=torch.int16).unsqueeze(0),
        }
        seed = torch.from_numpy(trace.seed_of(request, layer))
        reference.seed(
            candidates=seed.unsqueeze(0),
            regions=one,
            workspace_starts=one,
            workspace=rows,
            hot_rows=rows.clone(),
            page_size=page_size,
            **state,
        )
        for step in steps:
            reference.swap_in(
                selected=torch.from_numpy(trace.selected[step : step + 1]),
                seq_lens=torch.tensor(trace.seq_len[step : step + 1]),
                req_pool_indices=one,
                num_real_reqs=one + 1,
                req_to_token=torch.arange(longest, dtype=torch.int32).unsqueeze(0),
                host_rows=rows,
                hot_rows=rows.clone(),
                tail_start=torch.tensor([trace.seq_len[steps[0]] - 1], dtype=torch.int32),
                page_size=page_size,
                out=torch.empty(1, trace.top_k, dtype=torch.int32),
                counters=counters,
                **state,
            )
    return counters.tolist()
