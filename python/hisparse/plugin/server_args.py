"""Server arguments: take the flag, refuse what cannot run with it, set defaults, check against the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from hisparse.config import HiSparseConfig, HiSparseError, ResolvedConfig
from hisparse.memory import require_free_memory

logger = logging.getLogger(__name__)

BACKEND_FOR_DTYPE = {"bfloat16": "flashmla_sparse", "fp8_e4m3": "flashmla_kv"}
"""The attention kernel that reads each row format; --dsa-prefill-backend and --dsa-decode-backend alike."""

PAGE_SIZE = 64
"""SGLang's DSA pools and FlashMLA know no other."""


class Unsupported(NamedTuple):
    """A feature that HiSparse does not run with yet."""

    option: str
    asked_for: Callable[[Any], bool]
    why: str


UNSUPPORTED = (
    Unsupported("--speculative-algorithm", lambda a: a.speculative_algorithm is not None,
                "a verify step selects for several positions at once"),
    Unsupported("--enable-hierarchical-cache", lambda a: a.enable_hierarchical_cache,
                "the host pool already holds every token's KV"),
    Unsupported("--enable-lmcache", lambda a: a.enable_lmcache, "the host pool already holds every token's KV"),
    Unsupported("--enable-flexkv", lambda a: a.enable_flexkv, "the host pool already holds every token's KV"),
    Unsupported("--dcp-size", lambda a: a.dcp_size > 1, "a rank would hold only a part of each request's rows"),
    Unsupported("--attn-cp-size", lambda a: a.attn_cp_size > 1, "a prompt would be split over ranks"),
    Unsupported("--enable-prefill-cp", lambda a: a.enable_prefill_cp, "a prompt would be split over ranks"),
    Unsupported("--pp-size", lambda a: a.pp_size > 1, "stages would size their pools differently"),
    Unsupported("--disaggregation-mode", lambda a: a.disaggregation_mode != "null",
                "a decode server would receive rows into device pages"),
    Unsupported("--enable-two-batch-overlap", lambda a: a.enable_two_batch_overlap,
                "two batches would share one workspace"),
    Unsupported("--enable-pdmux", lambda a: a.enable_pdmux, "prefill and decode would share one set of tensors"),
    Unsupported("--prefill-only-disable-kv-cache", lambda a: a.prefill_only_disable_kv_cache,
                "there would be no KV to keep"),
)  # fmt: skip


def active_config(server_args: Any) -> ResolvedConfig | None:
    """The configuration of a server that runs with our HiSparse, else None."""
    return getattr(server_args, "hisparse_active", None)


def resolve_server_args(original: Callable[[], None], server_args: Any) -> None:
    """`ServerArgs.__post_init__` with the flag in our hands. Raises `HiSparseError` where SGLang cannot run with it."""
    if not server_args.enable_hisparse:
        original()
        return
    config = HiSparseConfig.from_json(server_args.hisparse_config)
    refuse_unsupported(server_args)
    set_defaults(server_args)
    # From here on SGLang must not know: its own HiSparse would turn staging on and the leak check off.
    server_args.enable_hisparse = False
    original()
    refuse_features(server_args)  # SGLang folds older names of an option into the present one meanwhile
    resolved = check_against_model(server_args, config)
    for note in resolved.notes:
        logger.warning("HiSparse: %s", note)
    # Past materialisation ServerArgs refuses plain assignment. The attribute travels to the scheduler by pickle.
    object.__setattr__(server_args, "hisparse_active", resolved)


def refuse_unsupported(server_args: Any) -> None:
    """Raise `HiSparseError` for the first option or value that HiSparse does not run with."""
    refuse_features(server_args)
    requests = server_args.max_running_requests
    if requests is not None and requests < 1:
        raise HiSparseError(f"--max-running-requests {requests} does not fit --enable-hisparse: it must be at least 1.")
    groups = server_args.dp_size if server_args.enable_dp_attention else 1
    if requests is not None and requests < groups:
        raise HiSparseError(
            f"--max-running-requests {requests} does not fit --enable-hisparse with --dp-size {groups}: it must be at "
            f"least {groups}, since SGLang divides it by the attention groups."
        )
    for option, value in (
        ("--context-length", server_args.context_length),
        ("--decode-log-interval", server_args.decode_log_interval),
    ):
        if value is not None and value < 1:
            raise HiSparseError(f"{option} {value} does not fit --enable-hisparse: it must be at least 1.")
    fraction = server_args.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        raise HiSparseError(
            f"--mem-fraction-static {fraction} does not fit --enable-hisparse: it must be between 0 and 1."
        )
    chunk = server_args.chunked_prefill_size
    if chunk is not None and chunk != -1 and (chunk < 1 or chunk % (PAGE_SIZE * groups)):
        raise HiSparseError(
            f"--chunked-prefill-size {chunk} does not fit --enable-hisparse: it must be a multiple of "
            f"{PAGE_SIZE * groups}"
            + (f", {PAGE_SIZE} for each of {groups} attention groups" if groups > 1 else "")
            + ", or -1 for whole prompts."
        )
    page_size = server_args.page_size
    if page_size not in (None, PAGE_SIZE):
        raise HiSparseError(f"--page-size {page_size} does not fit --enable-hisparse: it must be {PAGE_SIZE}.")
    for option, value in (
        ("--attention-backend", server_args.attention_backend),
        ("--prefill-attention-backend", server_args.prefill_attention_backend),
        ("--decode-attention-backend", server_args.decode_attention_backend),
    ):
        if value not in (None, "dsa", "nsa"):
            raise HiSparseError(f"{option} {value} does not fit --enable-hisparse: it must be dsa, or not given.")
    dtype = kv_cache_dtype(server_args)
    if dtype not in BACKEND_FOR_DTYPE:
        raise HiSparseError(
            f"--kv-cache-dtype {dtype} does not fit --enable-hisparse: it must be one of auto, bfloat16, fp8_e4m3."
        )
    for option, value in (
        ("--dsa-prefill-backend", server_args.dsa_prefill_backend),
        ("--dsa-decode-backend", server_args.dsa_decode_backend),
    ):
        if value not in (None, BACKEND_FOR_DTYPE[dtype]):
            raise HiSparseError(
                f"{option} {value} does not fit --enable-hisparse with --kv-cache-dtype {dtype}: it must be "
                f"{BACKEND_FOR_DTYPE[dtype]}, or not given."
            )


def refuse_features(server_args: Any) -> None:
    """Raise `HiSparseError` for the first feature of `UNSUPPORTED` that is asked for."""
    for feature in UNSUPPORTED:
        if feature.asked_for(server_args):
            raise HiSparseError(f"--enable-hisparse does not run with {feature.option} yet: {feature.why}.")


def kv_cache_dtype(server_args: Any) -> str:
    """The row format asked for; `auto` means bfloat16, lossless, and SGLang's own default on sm_90."""
    return {"auto": "bfloat16", "bf16": "bfloat16"}.get(server_args.kv_cache_dtype, server_args.kv_cache_dtype)


def set_defaults(server_args: Any) -> None:
    """What SGLang's own HiSparse would choose, and what its absence would choose otherwise."""
    server_args.kv_cache_dtype = kv_cache_dtype(server_args)
    server_args.dsa_prefill_backend = server_args.dsa_decode_backend = BACKEND_FOR_DTYPE[server_args.kv_cache_dtype]
    # A prefill graph would replay one layout of the workspace; ours changes with the batch.
    server_args.disable_prefill_cuda_graph = True


def check_against_model(server_args: Any, config: HiSparseConfig) -> ResolvedConfig:
    """Raise `HiSparseError` unless the model has an indexer and the configuration fits it."""
    from sglang.srt.configs.model_config import get_dsa_index_topk, is_deepseek_dsa

    model = server_args.get_model_config()
    if not is_deepseek_dsa(model.hf_config):
        raise HiSparseError(
            f"--enable-hisparse needs a sparse-attention (DSA) model such as DeepSeek-V3.2 or GLM-5; "
            f"{model.hf_config.architectures[0]} has no indexer."
        )
    resolved = config.resolve(
        index_topk=get_dsa_index_topk(model.hf_config),
        page_size=PAGE_SIZE,
        context_len=model.context_len,
        workspaces=1 if server_args.device == "cpu" else 2,
    )
    if resolved.host_memory_bytes is not None and server_args.max_total_tokens is None:
        # With --max-total-tokens the pool may be smaller; it is checked when its size is known.
        require_free_memory(resolved.host_memory_bytes, processes=processes_per_host(server_args))
    return resolved


def processes_per_host(server_args: Any) -> int:
    """Schedulers of the server on each host; each has a model runner and a host pool of its own. Data parallelism
    without data-parallel attention runs the whole model `dp_size` times."""
    replicas = 1 if server_args.enable_dp_attention else server_args.dp_size
    return max(1, server_args.tp_size * server_args.pp_size * replicas // server_args.nnodes)
