"""The plan: how many requests fit without and with HiSparse, with which flags, and what is in the way of more.

Pool sizes come from `hisparse.budget`, the arithmetic with which the server itself sizes them.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass

from hisparse.budget import GIB, MemoryBudget, plan_budget
from hisparse.config import MAX_DEVICE_BUFFER_SIZE, HiSparseConfig, HiSparseError, ResolvedConfig
from hisparse.link import LinkRate, link_rate
from hisparse.planner.hardware import RUNTIME_BYTES
from hisparse.planner.model import ModelShape

PAGE_SIZE = 64
HIT_RATES = (0.8, 0.9, 0.95)
HOST_SHARE = 0.9
"""Of the host memory given, for the pools; the server refuses pools of more than 95 % of what is free."""

MAX_REQUESTS = 4096
LARGEST_BUFFER_IN_TOP_K = 4
"""A plan raises the buffer, where that costs no request, up to this many times top-k; hit rates flatten beyond."""


@dataclass(frozen=True)
class Machine:
    """gpus: of the whole server, = tensor parallel size. dp: attention groups (data parallel size), each with
    gpus / dp GPUs. host_bytes: memory of the whole host. fraction: --mem-fraction-static. on_gpu: False for the CPU
    back end, which needs one prefill workspace and not two."""

    gpus: int
    dp: int
    gpu_bytes: int
    host_bytes: int
    fraction: float
    on_gpu: bool = True

    @property
    def static_bytes(self) -> int:
        """Device memory for weights and KV: SGLang's fraction of what is free before the weights are loaded."""
        return int((self.gpu_bytes - RUNTIME_BYTES) * self.fraction)


@dataclass(frozen=True)
class Load:
    """prompt_len, output_len: tokens of the requests to plan for. kv_cache_dtype: as in SGLang's flag. buffer: LRU
    rows, None = choose. requests: at once on the whole server, None = as many as fit. step_s: a decode step's time to
    aim at, for judging the link."""

    prompt_len: int
    output_len: int
    kv_cache_dtype: str
    buffer: int | None
    requests: int | None
    step_s: float

    @property
    def context_len(self) -> int:
        return self.prompt_len + self.output_len

    @property
    def request_tokens(self) -> int:
        """Slots of one request at its longest, whole pages."""
        return math.ceil((self.context_len + 1) / PAGE_SIZE) * PAGE_SIZE


@dataclass(frozen=True)
class Plan:
    """What came out. Numbers are of one GPU unless they say otherwise.

    Attributes:
        weights: bytes a part. kv_bytes: what is left of the static memory.
        budget: sizes as the server will print them. requests: at once on one GPU's attention group.
        requests_without: the same without HiSparse. binding: what stands in the way of more requests, a sentence.
    """

    model: ModelShape
    machine: Machine
    load: Load
    weights: dict[str, int]
    kv_bytes: int
    budget: MemoryBudget
    requests: int
    requests_without: int
    binding: str
    link: LinkRate

    @property
    def host_pool_gib(self) -> float:
        """`host_memory_gib` to give, rounded up to 0.1 MiB so that rounding costs no page."""
        return math.ceil(self.budget.host_pool_bytes / GIB * 1e4) / 1e4

    def token_bytes(self, hit_rate: float) -> float:
        """Bytes swapped in for one output token on one GPU: layers x misses x row."""
        return self.model.num_hidden_layers * self.model.index_topk * (1 - hit_rate) * self.budget.row_bytes

    def link_tokens_per_s(self, hit_rate: float, *, scattered: bool = False) -> float:
        """Output tokens a second of the whole server if nothing but the link took time. GPUs of one attention group
        each pull the same rows over their own link; groups pull different ones."""
        rate = self.link.scattered if scattered else self.link.near
        return self.machine.dp * rate / self.token_bytes(hit_rate)

    def link_step_s(self, hit_rate: float) -> float:
        """Copying of one decode step at full concurrency."""
        return self.requests * self.token_bytes(hit_rate) / self.link.near

    def config(self) -> HiSparseConfig:
        return HiSparseConfig(
            device_buffer_size=self.budget.config.device_buffer_size, host_memory_gib=self.host_pool_gib
        )

    def flags(self) -> list[str]:
        """SGLang's, behind --model-path."""
        machine, config = self.machine, self.config()
        keys = {"device_buffer_size": config.device_buffer_size, "host_memory_gib": config.host_memory_gib}
        flags = ["--tp-size", str(machine.gpus)] if machine.gpus > 1 else []
        flags += ["--dp-size", str(machine.dp), "--enable-dp-attention"] if machine.dp > 1 else []
        flags += ["--kv-cache-dtype", self.load.kv_cache_dtype, "--context-length", str(self.load.context_len)]
        flags += ["--mem-fraction-static", str(machine.fraction)]
        flags += ["--max-running-requests", str(self.requests * machine.dp)]
        return [*flags, "--enable-hisparse", "--hisparse-config", json.dumps(keys)]

    def command(self, model_path: str) -> str:
        words = ["python -m sglang.launch_server --model-path", shlex.quote(model_path)]
        return " ".join([*words, *map(shlex.quote, self.flags())])


def make_plan(
    model: ModelShape,
    machine: Machine,
    load: Load,
    *,
    weights_bytes: int | None = None,
    link_gb_s: float | None = None,
) -> Plan:
    """Plan one server.

    Args:
        weights_bytes: of one GPU, instead of counting them. link_gb_s: instead of the measured rate.

    Raises:
        HiSparseError: something does not fit; the message says what would.
    """
    if load.context_len > model.max_position_embeddings:
        raise HiSparseError(
            f"--context-len {load.prompt_len} and --output-len {load.output_len} together are more than the "
            f"{model.max_position_embeddings} tokens of {model.name}."
        )
    if model.num_attention_heads % (machine.gpus // machine.dp):
        raise HiSparseError(
            f"--gpus {machine.gpus} with --dp-size {machine.dp} cannot share the {model.num_attention_heads} attention "
            f"heads of {model.name} evenly."
        )
    parts = model.weight_bytes(gpus=machine.gpus, attention_gpus=machine.gpus // machine.dp)
    weights = parts if weights_bytes is None else {"as given": weights_bytes}
    kv_bytes = machine.static_bytes - sum(weights.values())
    if kv_bytes <= 0:
        raise HiSparseError(
            f"the weights need {sum(weights.values()) / GIB:.1f} GiB on each GPU and {machine.static_bytes / GIB:.1f} "
            f"GiB are there for weights and KV; give more --gpus, a larger --gpu, or a higher --mem-fraction-static."
        )
    row_bytes = model.row_bytes(load.kv_cache_dtype)
    token_bytes = model.num_hidden_layers * (row_bytes + model.index_key_bytes)
    fits = Fit(model, machine, load, kv_bytes, row_bytes)
    buffer = load.buffer if load.buffer is not None else fits.best_buffer()
    wanted = None if load.requests is None else math.ceil(load.requests / machine.dp)
    most, binding = fits.most_requests(buffer)
    if most == 0:
        raise HiSparseError(f"not one request of {load.context_len} tokens fits: {binding}.")
    if wanted is not None and wanted > most:
        raise HiSparseError(
            f"--requests {load.requests} do not fit, {most * machine.dp} do: {binding}; ask for fewer, or for "
            f"shorter ones."
        )
    requests = most if wanted is None else wanted
    return Plan(
        model=model,
        machine=machine,
        load=load,
        weights=weights,
        kv_bytes=kv_bytes,
        budget=fits.budget(buffer, requests),
        requests=requests,
        requests_without=min(MAX_REQUESTS, kv_bytes // token_bytes // load.request_tokens),
        binding=binding if wanted is None else "the number asked for with --requests",
        link=link_rate(row_bytes, link_gb_s),
    )


@dataclass(frozen=True)
class Fit:
    """How many requests fit on one GPU, by buffer size."""

    model: ModelShape
    machine: Machine
    load: Load
    kv_bytes: int
    row_bytes: int

    def best_buffer(self) -> int:
        """Twice top-k, or as many more pages as cost no request."""
        default = self._config(None).device_buffer_size
        most, _ = self.most_requests(default)
        largest = min(LARGEST_BUFFER_IN_TOP_K * self.model.index_topk, MAX_DEVICE_BUFFER_SIZE) // PAGE_SIZE
        low, high = default // PAGE_SIZE, max(largest, default // PAGE_SIZE)
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_requests(middle * PAGE_SIZE)[0] == most:
                low = middle
            else:
                high = middle - 1
        return low * PAGE_SIZE

    def most_requests(self, buffer: int) -> tuple[int, str]:
        """Requests of the load's length, and what keeps one more away."""
        low, high = 0, MAX_REQUESTS
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits_device(buffer, middle):
                low = middle
            else:
                high = middle - 1
        on_device = low
        in_host = max(0, self._host_tokens() // self.load.request_tokens)
        if in_host < on_device:
            return in_host, "host memory for the pool is full"
        if on_device == MAX_REQUESTS:
            return on_device, "nothing, up to the most that is planned for"
        keys = self.load.request_tokens * self.model.num_hidden_layers * self.model.index_key_bytes
        region = self._empty(buffer, 1).region_bytes
        larger = "indexer keys, which all stay on the device" if keys > region else "hot buffer"
        return on_device, (
            f"device memory is full (a request takes {keys / GIB:.2f} GiB of indexer keys and {region / GIB:.2f} GiB "
            f"of hot buffer; the larger part is {larger})"
        )

    def budget(self, buffer: int, requests: int) -> MemoryBudget:
        """The server's own sizing, with a host pool that holds what the requests need."""
        return plan_budget(
            self._config(buffer, self._pool_bytes(requests)),
            layers=self.model.num_hidden_layers,
            row_bytes=self.row_bytes,
            index_key_bytes=self.model.index_key_bytes,
            device_bytes=self.kv_bytes,
            free_host_bytes=0,
            max_requests=requests,
        )

    def _pool_bytes(self, requests: int) -> int:
        """All of the host memory if the device has indexer keys for it; more tokens than running requests need are
        prefixes that stay cached. Never less than the requests need."""
        token = self.model.num_hidden_layers * self.row_bytes
        return max(self._host_bytes(), (requests * self.load.request_tokens + PAGE_SIZE) * token)

    def _host_bytes(self) -> int:
        return int(self.machine.host_bytes * HOST_SHARE) // self.machine.gpus

    def _host_tokens(self) -> int:
        return self._host_bytes() // (self.model.num_hidden_layers * self.row_bytes) - PAGE_SIZE

    def _fits_device(self, buffer: int, requests: int) -> bool:
        needed = self._empty(buffer, requests, slots=requests * self.load.request_tokens)
        return needed.device_bytes <= self.kv_bytes

    def _empty(self, buffer: int, requests: int, slots: int = 0) -> MemoryBudget:
        return MemoryBudget(
            self._config(buffer),
            self.model.num_hidden_layers,
            self.row_bytes,
            self.model.index_key_bytes,
            requests + 1,
            slots,
        )

    def _config(self, buffer: int | None, pool_bytes: int | None = None) -> ResolvedConfig:
        gib = None if pool_bytes is None else pool_bytes / GIB
        config = HiSparseConfig(device_buffer_size=buffer, host_memory_gib=gib)
        return config.resolve(
            index_topk=self.model.index_topk,
            page_size=PAGE_SIZE,
            context_len=self.load.context_len,
            workspaces=2 if self.machine.on_gpu else 1,
        )


def plan_by_context(plan: Plan, lengths: list[int], link_gb_s: float | None) -> list[Plan | None]:
    """The same server planned for other prompt lengths; None where not one request fits."""
    plans: list[Plan | None] = []
    weights_bytes = sum(plan.weights.values())
    for length in lengths:
        load = Load(length, plan.load.output_len, plan.load.kv_cache_dtype, None, None, plan.load.step_s)
        try:
            plans.append(make_plan(plan.model, plan.machine, load, weights_bytes=weights_bytes, link_gb_s=link_gb_s))
        except HiSparseError:
            plans.append(None)
    return plans
