"""Looks at the plug-in inside the real SGLang, in a process of its own, and prints what it found as one line of JSON.

Run by test_plugin.py in the environment of a CPU server, since importing SGLang takes seconds and needs the shims.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import inspect
import json
import pkgutil
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hisparse.plugin
from hisparse.config import HiSparseConfig, HiSparseError, ResolvedConfig
from hisparse.hook_row import HookRow
from hisparse.plugin import gate, hooks
from hisparse.plugin import server_args as ours


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        return repr(function(*args, **kwargs))
    except (HiSparseError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


def targets() -> dict[str, Any]:
    return {
        row.target: {
            "exists": gate.target_exists(row.target),
            "callable": callable(pkgutil.resolve_name(row.target)),
            "is class": isinstance(pkgutil.resolve_name(row.target), type),
            "kind": row.kind,
        }
        for row in gate.hooks()
    }


def parameters() -> dict[str, list[str]]:
    """Of each hook target, the names that our functions rely on."""
    return {row.target: list(inspect.signature(pkgutil.resolve_name(row.target)).parameters) for row in hooks.HOOKS}


def server_arguments() -> dict[str, Any]:
    from sglang.srt.server_args import ServerArgs

    defaults = {
        field.name: field.default
        for field in dataclasses.fields(ServerArgs)
        if field.default is not dataclasses.MISSING
    }
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    return {
        "unknown options": [row.option for row in ours.UNSUPPORTED if row.option not in options],
        "defaults": outcome(ours.refuse_unsupported, SimpleNamespace(**defaults)),
        "missing fields": [name for name in OUR_FIELDS if name not in defaults],
    }


OUR_FIELDS = (
    "enable_hisparse",
    "hisparse_config",
    "kv_cache_dtype",
    "dsa_prefill_backend",
    "dsa_decode_backend",
    "disable_prefill_cuda_graph",
    "tp_size",
    "pp_size",
    "dp_size",
    "enable_dp_attention",
    "nnodes",
)


def models() -> dict[str, str]:
    """`check_against_model` with SGLang's own notion of a sparse-attention model."""

    def check(architecture: str, given: str = "{}", **hf_config: Any) -> str:
        model = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=[architecture], **hf_config), context_len=163_840
        )
        server_args = SimpleNamespace(
            get_model_config=lambda: model, tp_size=1, dp_size=1, pp_size=1, nnodes=1, enable_dp_attention=False,
            max_total_tokens=None, device="cuda",
        )  # fmt: skip
        return outcome(ours.check_against_model, server_args, HiSparseConfig.from_json(given))

    return {
        "dense": check("LlamaForCausalLM"),
        "DeepSeek-V3": check("DeepseekV3ForCausalLM"),
        "DeepSeek-V3.2": check("DeepseekV32ForCausalLM", index_topk=2048),
        "buffer": check("DeepseekV32ForCausalLM", '{"device_buffer_size": 100}', index_topk=2048),
        "memory": check("DeepseekV32ForCausalLM", '{"host_memory_gib": 100000000}', index_topk=2048),
    }


def sizing() -> dict[str, Any]:
    """`HiSparsePoolConfigurator` of one rank: 2 layers, rows of 384 B, a free memory of twice 1,088 tokens' rows."""
    import torch

    from hisparse.plugin import sizing as module

    row_bytes, layers, page = 384, 2, 64
    free = 2 * (1024 + page) * layers * row_bytes
    module.row_bytes, module.index_key_bytes = lambda owner: row_bytes, lambda model_config: 132
    module.free_memory_bytes = lambda: free

    def sized(
        *, tp: int = 1, groups: int = 1, requests: int | None = 4, others: float = 1.0, config: str = "{}",
        max_total_tokens: int | None = None,
    ) -> Any:  # fmt: skip
        overrides: dict[str, int] = {}
        seen: dict[str, int] = {}
        schedule = SimpleNamespace(max_running_requests=requests, max_total_tokens=max_total_tokens)
        module.get_schedule = lambda: schedule
        module.get_context = lambda: SimpleNamespace(override=lambda _, **given: overrides.update(given))
        module.get_world_group = lambda: SimpleNamespace(world_size=2 if others != 1 else 1, cpu_group=None)
        torch.distributed.all_reduce = lambda mine, op, group: mine.clamp_(max=int(others * free))
        real = module.plan_budget

        def plan_budget(*args: Any, **kwargs: Any) -> Any:
            budget = real(*args, **kwargs)
            seen["requests"] = budget.regions - 1
            return budget

        module.plan_budget = plan_budget
        arguments = SimpleNamespace(
            tp_size=tp, pp_size=1, dp_size=groups, enable_dp_attention=groups > 1, nnodes=1,
            hisparse_active=HiSparseConfig.from_json(config).resolve(index_topk=64, page_size=page, context_len=200),
        )  # fmt: skip
        owner = SimpleNamespace(
            server_args=arguments, layer_info=SimpleNamespace(num_effective_layers=layers), model_config=None,
            ps=SimpleNamespace(attn_dp_size=groups),
        )  # fmt: skip
        try:
            found = module.HiSparsePoolConfigurator(owner).calculate_pool_sizes(2**28, page)
        except HiSparseError as error:
            return f"HiSparseError: {error}"
        finally:
            module.plan_budget = real
        override = overrides.get("max_running_requests")
        return {"tokens": found.max_total_num_tokens, "override": override, **seen}

    gib = json.dumps({"host_memory_gib": 1.5 * free / 2 / 2**30})
    return {
        "one process": sized(),
        "another rank saw half": sized(others=0.5),
        "two ranks": sized(tp=2),
        "two groups": sized(tp=2, groups=2),
        "two groups, no limit": sized(tp=2, groups=2, requests=None),
        "host_memory_gib of two ranks": sized(tp=2, config=gib),
        "the same under --max-total-tokens": sized(tp=2, config=gib, max_total_tokens=128),
    }


def registered() -> dict[str, list[str]]:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return {target: [kind.value for kind, _, _ in rows] for target, rows in HookRegistry._hooks.items() if rows}


def registration() -> dict[str, Any]:
    """What `register` leaves behind in SGLang's registry: normally, and with another SGLang installed."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    found: dict[str, Any] = {"problems": gate.problems()}
    hisparse.plugin.register()
    found["normal"] = registered()
    HookRegistry.reset()
    real_version, real_hooks = importlib.metadata.version, hooks.HOOKS
    importlib.metadata.version = lambda name: "0.5.18" if name == "sglang" else real_version(name)
    try:
        found["another version"] = outcome(hisparse.plugin.register)
        found["another version registers"] = registered()
        (_, guard, _) = HookRegistry._hooks["sglang.srt.server_args.ServerArgs.__post_init__"][0]
        found["without the flag"] = outcome(guard, SimpleNamespace(enable_hisparse=False))
        found["with the flag"] = outcome(guard, SimpleNamespace(enable_hisparse=True))
        HookRegistry.reset()
        sys.argv.append("--enable-hisparse")
        found["on the command line"] = outcome(hisparse.plugin.register)
        sys.argv.pop()
    finally:
        importlib.metadata.version = real_version
    gone = HookRow("sglang.srt.managers.scheduler.Scheduler.no_such_method", "after", print, "testing the gate")
    hooks.HOOKS = (*real_hooks, gone)
    found["missing target"] = gate.problems()
    hooks.HOOKS = real_hooks
    return found


def without_the_flag() -> dict[str, bool]:
    """Every hook of HiSparse hands over to the original, or leaves its result alone, on a server without the flag."""
    plain = SimpleNamespace(enable_hisparse=False)
    runner = SimpleNamespace(server_args=plain, hisparse_coordinator=None)
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
    decode_batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))
    batch = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=object))
    keywords = {"backend_str": "dsa", "model_runner": runner, "init_new_workspace": False}
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "_resolve_server_args": ((plain,), {}),
        "_create_pool_configurator": ((SimpleNamespace(server_args=plain),), {}),
        "_build_kv_pool": ((SimpleNamespace(server_args=plain), 1), {"x": 2}),
        "_init_coordinator": ((runner,), {}),
        "_build_attention_backend": ((), keywords),
        "_start_swap_in": ((None, 1, 2, 3, decode_batch, 0), {}),
        "_after_forward": ((runner, SimpleNamespace()), {}),
        "_count_retractions": ((batch, plain), {}),
        "_report_decode": ((SimpleNamespace(scheduler=scheduler), True), {"running_batch": batch}),
        "_extend_decode_line": ((SimpleNamespace(),), {}),
        "_check_when_idle": ((scheduler,), {}),
        "_poison_freed_pages": ((SimpleNamespace(get_kvcache=lambda: None), 1, 2), {}),
        "_forget_warm_up": ((runner,), {}),
        "_report_state": ((scheduler, 1), {}),
    }
    from sglang.srt.model_executor import forward_context

    forward_context.set_forward_context(forward_context.ForwardContext(attn_backend=runner))
    untouched = {}
    for row in hooks.HOOKS:
        args, kwargs = arguments[row.function.__name__]
        calls: list[Any] = []

        def original(*given: Any, calls: list[Any] = calls, **named: Any) -> str:
            calls.append((given, named))
            return "original's"

        if row.kind == "around":
            result = row.function(original, *args, **kwargs)
            hands_over = calls == [(args, kwargs)]
            untouched[row.target] = hands_over and result in ("original's", None)
        elif row.kind == "after":
            state = SimpleNamespace(internal_state={})
            untouched[row.target] = row.function(state, *args, **kwargs) in (None, state) and state.internal_state == {}
        else:
            untouched[row.target] = row.function(*args, **kwargs) is None
    return untouched


def early_swap_in() -> dict[str, Any]:
    """What the indexer's hook begins, in a decode step and in another one. The batch does not know the coordinator."""
    from sglang.srt.model_executor import forward_context

    from hisparse.coordinator import HiSparseCoordinator

    begun: list[Any] = []
    coordinator = object.__new__(HiSparseCoordinator)
    coordinator.start_swap_in = lambda *given: begun.append(given)  # type: ignore[method-assign]
    backend = SimpleNamespace(hisparse_coordinator=coordinator)
    results = []
    with forward_context.forward_context(forward_context.ForwardContext(attn_backend=backend)):
        for decode in (True, False):
            batch = SimpleNamespace(
                req_pool_indices="regions",
                seq_lens="lens",
                forward_mode=SimpleNamespace(is_decode=lambda decode=decode: decode),
            )
            results.append(
                hooks._start_swap_in("selected", None, x=1, q_lora=2, positions=3, forward_batch=batch, layer_id=5)
            )
    return {"results": results, "begun": begun}


def later_layers() -> dict[str, Any]:
    """Pool and coordinator of a process that owns layers 30 to 33."""
    import torch

    from hisparse.coordinator import HiSparseCoordinator
    from hisparse.memory import HotBuffer
    from hisparse.plugin.kv_pool import HiSparseNSATokenToKVPool

    pool = HiSparseNSATokenToKVPool(
        size=256, page_size=64, kv_lora_rank=128, dtype=torch.bfloat16, qk_rope_head_dim=64, layer_num=4, device="cpu",
        index_head_dim=128, enable_memory_saver=False, kv_cache_dim=192, start_layer=30, end_layer=33,
    )  # fmt: skip
    row_bytes = pool.row_format.row_bytes
    pool.hot_buffer = HotBuffer.allocate(
        layers=4, regions=3, device_buffer_size=64, page_size=64, row_bytes=row_bytes, device="cpu"
    )
    coordinator = HiSparseCoordinator(
        config=ResolvedConfig(64, 64, 64, 256, None, None),
        row_format=pool.row_format,
        host_pool=pool.host_pool,
        hot_buffer=pool.hot_buffer,
        workspace=torch.zeros((256, row_bytes), dtype=torch.uint8),
        req_to_token=torch.zeros((3, 256), dtype=torch.int32),
        start_layer=pool.start_layer,
        max_batch=3,
    )
    coordinator.num_real_reqs.fill_(1)
    places = {}
    for layer_id in range(30, 34):
        coordinator.store_decode(
            layer_id,
            k_nope=torch.full((1, 1, 128), float(layer_id)).bfloat16(),
            k_rope=torch.zeros((1, 1, 64)).bfloat16(),
            slots=torch.tensor([70]),
            req_pool_indices=torch.tensor([2]),
            seq_lens=torch.tensor([5]),
        )
        tail_row = pool.hot_buffer.region_rows(2).start + 64 + 4
        rows = pool.get_key_buffer(layer_id)[tail_row], pool.kv_buffer[layer_id - 30][70]
        places[str(layer_id)] = [float(row.flatten()[0]) for row in rows]
    index_keys = pool.get_index_k_with_scale_buffer(30).data_ptr() == pool.index_k_with_scale_buffer[0].data_ptr()
    try:
        coordinator.store_decode(34, k_nope=None, k_rope=None, slots=None, req_pool_indices=None, seq_lens=None)
    except AssertionError as error:
        return {"places": places, "index keys": index_keys, "layer 34": str(error)}
    return {"places": places, "index keys": index_keys, "layer 34": "accepted"}


if __name__ == "__main__":
    results = {
        "targets": targets(),
        "parameters": parameters(),
        "server arguments": server_arguments(),
        "models": models(),
        "sizing": sizing(),
        "registration": registration(),
        "without the flag": without_the_flag(),
        "early swap-in": early_swap_in(),
        "later layers": later_layers(),
    }
    print("\n" + json.dumps(results))
