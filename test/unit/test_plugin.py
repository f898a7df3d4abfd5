"""The plug-in: what it refuses and how it says so, and whether it fits the SGLang that is installed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hisparse.config import HiSparseConfig, HiSparseError, ResolvedConfig
from hisparse.cpu.environment import cpu_environment
from hisparse.plugin import gate, server_args
from hisparse.plugin.hooks import HOOKS, active_coordinator
from hisparse.plugin.server_args import BACKEND_FOR_DTYPE, UNSUPPORTED, active_config

DEFAULTS: dict[str, Any] = {
    "enable_hisparse": True,
    "hisparse_config": None,
    "speculative_algorithm": None,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "max_running_requests": None,
    "context_length": None,
    "decode_log_interval": 40,
    "mem_fraction_static": None,
    "chunked_prefill_size": None,
    "max_total_tokens": None,
    "dcp_size": 1,
    "attn_cp_size": 1,
    "enable_prefill_cp": False,
    "pp_size": 1,
    "disaggregation_mode": "null",
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "prefill_only_disable_kv_cache": False,
    "page_size": None,
    "attention_backend": None,
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "kv_cache_dtype": "auto",
    "dsa_prefill_backend": None,
    "dsa_decode_backend": None,
    "disable_prefill_cuda_graph": False,
    "tp_size": 1,
    "dp_size": 1,
    "enable_dp_attention": False,
    "nnodes": 1,
}
RESOLVED = ResolvedConfig(2048, 4096, 64, 163_904, None, None)


def arguments(**changes: Any) -> Any:
    assert set(changes) <= set(DEFAULTS)
    return SimpleNamespace(**DEFAULTS | changes)


def one_sentence(message: str) -> str:
    assert message.endswith(".") and "\n" not in message
    assert ". " not in message, message
    return message


def refused(**changes: Any) -> str:
    with pytest.raises(HiSparseError) as error:
        server_args.refuse_unsupported(arguments(**changes))
    return one_sentence(str(error.value))


# ---- features that do not run with it

REFUSED = {
    "--speculative-algorithm": {"speculative_algorithm": "EAGLE"},
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True},
    "--enable-lmcache": {"enable_lmcache": True},
    "--enable-flexkv": {"enable_flexkv": True},
    "--dcp-size": {"dcp_size": 2},
    "--attn-cp-size": {"attn_cp_size": 2},
    "--enable-prefill-cp": {"enable_prefill_cp": True},
    "--pp-size": {"pp_size": 2},
    "--disaggregation-mode": {"disaggregation_mode": "decode"},
    "--enable-two-batch-overlap": {"enable_two_batch_overlap": True},
    "--enable-pdmux": {"enable_pdmux": True},
    "--prefill-only-disable-kv-cache": {"prefill_only_disable_kv_cache": True},
}


def test_the_table_is_tested_whole() -> None:
    assert [feature.option for feature in UNSUPPORTED] == list(REFUSED)


@pytest.mark.parametrize("option", REFUSED)
def test_unsupported_feature(option: str) -> None:
    message = refused(**REFUSED[option])
    assert message.startswith(f"--enable-hisparse does not run with {option} yet: ")


def test_prefill_side_of_disaggregation_is_refused_too() -> None:
    assert "--disaggregation-mode" in refused(disaggregation_mode="prefill")


def test_defaults_are_not_refused() -> None:
    server_args.refuse_unsupported(arguments())


def test_request_limit() -> None:
    server_args.refuse_unsupported(arguments(max_running_requests=1))
    assert "--max-running-requests 0 " in refused(max_running_requests=0)


def test_request_limit_of_attention_groups() -> None:
    server_args.refuse_unsupported(arguments(max_running_requests=4, dp_size=4, enable_dp_attention=True))
    server_args.refuse_unsupported(arguments(max_running_requests=3, dp_size=4))  # replicas have three each
    message = refused(max_running_requests=3, dp_size=4, enable_dp_attention=True)
    assert message.startswith("--max-running-requests 3 does not fit --enable-hisparse with --dp-size 4: ")
    assert "at least 4" in message


def test_chunk_size() -> None:
    for size in (-1, 64, 8192):
        server_args.refuse_unsupported(arguments(chunked_prefill_size=size))
    for size in (63, 0, -5):
        message = refused(chunked_prefill_size=size)
        assert message.startswith(f"--chunked-prefill-size {size} ") and "a multiple of 64, or -1 " in message


@pytest.mark.parametrize(
    ("name", "bad", "legal"),
    [
        ("context_length", 0, "at least 1"),
        ("decode_log_interval", 0, "at least 1"),
        ("mem_fraction_static", 2.0, "between 0 and 1"),
        ("mem_fraction_static", 0.0, "between 0 and 1"),
    ],
)
def test_numbers_out_of_range(name: str, bad: float, legal: str) -> None:
    message = refused(**{name: bad})
    assert message.startswith(f"--{name.replace('_', '-')} {bad} does not fit --enable-hisparse") and legal in message


def test_chunk_size_of_attention_groups() -> None:
    """SGLang divides it by their number."""
    server_args.refuse_unsupported(arguments(chunked_prefill_size=256, dp_size=4, enable_dp_attention=True))
    server_args.refuse_unsupported(arguments(chunked_prefill_size=64, dp_size=4))
    message = refused(chunked_prefill_size=320, dp_size=4, enable_dp_attention=True)
    assert message.startswith("--chunked-prefill-size 320 does not fit") and "a multiple of 256" in message


@pytest.mark.parametrize(
    ("sizes", "processes"),
    [
        ({}, 1),
        ({"tp_size": 8}, 8),
        ({"tp_size": 16, "nnodes": 2}, 8),
        ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8),
        ({"tp_size": 16, "dp_size": 4, "enable_dp_attention": True, "nnodes": 2}, 8),
        ({"tp_size": 2, "dp_size": 4}, 8),
    ],
    ids=str,
)
def test_processes_that_share_the_memory_of_a_host(sizes: dict[str, Any], processes: int) -> None:
    assert server_args.processes_per_host(arguments(**sizes)) == processes


def test_feature_named_by_an_older_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang folds deprecated options into the present ones while it resolves its arguments."""
    given = arguments(enable_hisparse=True, hisparse_config=None)

    def fold() -> None:
        given.enable_prefill_cp = True

    with pytest.raises(HiSparseError, match="--enable-prefill-cp"):
        server_args.resolve_server_args(fold, given)


def test_page_size() -> None:
    server_args.refuse_unsupported(arguments(page_size=64))
    assert refused(page_size=1) == "--page-size 1 does not fit --enable-hisparse: it must be 64."


@pytest.mark.parametrize("which", ("attention_backend", "prefill_attention_backend", "decode_attention_backend"))
def test_attention_backend(which: str) -> None:
    for legal in ("dsa", "nsa"):
        server_args.refuse_unsupported(arguments(**{which: legal}))
    option = "--" + which.replace("_", "-")
    message = refused(**{which: "fa3"})
    assert message == f"{option} fa3 does not fit --enable-hisparse: it must be dsa, or not given."


@pytest.mark.parametrize("dtype", ("fp8_e5m2", "fp4_e2m1", "float16"))
def test_row_formats_that_do_not_exist(dtype: str) -> None:
    message = refused(kv_cache_dtype=dtype)
    assert message.startswith(f"--kv-cache-dtype {dtype} does not fit")
    assert "auto, bfloat16, fp8_e4m3" in message


@pytest.mark.parametrize(
    ("given", "dtype", "backend"),
    (
        ("auto", "bfloat16", "flashmla_sparse"),
        ("bf16", "bfloat16", "flashmla_sparse"),
        ("bfloat16", "bfloat16", "flashmla_sparse"),
        ("fp8_e4m3", "fp8_e4m3", "flashmla_kv"),
    ),
)
def test_the_backend_follows_the_row_format(given: str, dtype: str, backend: str) -> None:
    chosen = arguments(kv_cache_dtype=given)
    server_args.refuse_unsupported(chosen)
    server_args.set_defaults(chosen)
    assert (chosen.kv_cache_dtype, chosen.dsa_prefill_backend, chosen.dsa_decode_backend) == (dtype, backend, backend)
    assert chosen.disable_prefill_cuda_graph is True


@pytest.mark.parametrize("which", ("dsa_prefill_backend", "dsa_decode_backend"))
@pytest.mark.parametrize("dtype", BACKEND_FOR_DTYPE)
def test_a_backend_that_cannot_read_the_row_format(which: str, dtype: str) -> None:
    right = BACKEND_FOR_DTYPE[dtype]
    server_args.refuse_unsupported(arguments(kv_cache_dtype=dtype, **{which: right}))
    for wrong in ({*BACKEND_FOR_DTYPE.values(), "fa3", "tilelang"}) - {right}:
        message = refused(kv_cache_dtype=dtype, **{which: wrong})
        assert message.startswith(f"--{which.replace('_', '-')} {wrong} does not fit")
        assert f"--kv-cache-dtype {dtype}" in message and f"it must be {right}" in message


# ---- taking the flag


def test_sglang_never_sees_the_flag(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    noted = dataclasses.replace(RESOLVED, notes=("a note for the log.",))
    monkeypatch.setattr(server_args, "check_against_model", lambda args, config: noted)
    given = arguments(hisparse_config='{"device_buffer_size": 4096}')
    seen: list[tuple[bool, str]] = []
    server_args.resolve_server_args(lambda: seen.append((given.enable_hisparse, given.dsa_decode_backend)), given)
    assert seen == [(False, "flashmla_sparse")]
    assert active_config(given) is noted
    assert "a note for the log." in caplog.text


def test_without_the_flag_nothing_changes() -> None:
    given = arguments(enable_hisparse=False, pp_size=2, hisparse_config="not even JSON")
    before, calls = dict(vars(given)), []
    server_args.resolve_server_args(lambda: calls.append(1), given)
    assert vars(given) == before
    assert calls == [1]
    assert active_config(given) is None


@pytest.mark.parametrize("changes", ({"hisparse_config": "{"}, {"pp_size": 2}), ids=str)
def test_refusals_come_before_sglang_does_anything(changes: dict[str, Any]) -> None:
    def original() -> None:
        raise AssertionError("SGLang went ahead")

    with pytest.raises(HiSparseError):
        server_args.resolve_server_args(original, arguments(**changes))


def test_a_foreign_coordinator_is_not_ours() -> None:
    assert active_coordinator(SimpleNamespace()) is None
    assert active_coordinator(SimpleNamespace(hisparse_coordinator=object())) is None


# ---- the version gate


@pytest.mark.parametrize("version", ("0.5.16", "0.5.18", "0.5.170", "0.6.0"))
def test_another_version_is_one_sentence(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    (problem,) = gate.problems()
    assert one_sentence(problem) == (
        f"SGLang {version} is installed but this version of HiSparse supports sglang==0.5.17 only."
    )


def test_no_sglang_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    (problem,) = gate.problems()
    assert "SGLang is not installed" in one_sentence(problem)


def test_a_server_with_the_flag_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launch_server", "--model-path", "m", "--enable-hisparse"])
    with pytest.raises(SystemExit) as stopped:
        gate.refuse(["SGLang has no hook."])
    assert stopped.value.code == "HiSparse cannot run: SGLang has no hook."


@pytest.mark.parametrize(
    ("target", "found"),
    (("json.dumps", True), ("json.gone", False), ("no_such_module.f", False), ("json.JSONDecoder.decode", True)),
)
def test_target_exists(target: str, found: bool) -> None:
    assert gate.target_exists(target) is found


def test_the_launcher_is_told_past_the_controller_of_data_parallelism() -> None:
    def process(title: str, parent: Any) -> Any:
        return SimpleNamespace(title=title, parent=lambda: parent, cmdline=lambda: [title, "-m", "x"])

    first = process("/usr/bin/python3", process("bash", None))
    controller = process("sglang::data_parallel_controller", first)
    assert gate.launcher(process("sglang::scheduler_TP0", first)) is first
    assert gate.launcher(process("sglang::scheduler_DP1_TP1", controller)) is first


def test_our_errors_are_printed_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: others.append(kind))
    gate.report_errors_in_one_sentence()
    sys.excepthook(HiSparseError, HiSparseError("no room."), None)
    sys.excepthook(KeyError, KeyError("x"), None)
    assert capsys.readouterr().err == "hisparse: error: no room.\n"
    assert others == [KeyError]


# ---- in the real SGLang


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    script = Path(__file__).with_name("plugin_probe.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **cpu_environment(), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_ranks_agree_on_the_size_of_their_pools(probe: dict[str, Any]) -> None:
    """Free memory is the least that any of them saw; groups divide requests, processes divide the memory."""
    found = probe["sizing"]
    assert found["one process"] == {"tokens": 1024, "requests": 4, "override": None}
    assert found["another rank saw half"] == {"tokens": 448, "requests": 4, "override": None}
    assert found["two ranks"] == {"tokens": 448, "requests": 4, "override": None}
    assert found["two groups"] == {"tokens": 448, "requests": 2, "override": None}
    assert found["two groups, no limit"]["override"] == 2 * found["two groups, no limit"]["requests"]
    assert found["host_memory_gib of two ranks"].startswith("HiSparseError: the host pool needs ")
    assert "(2 processes with " in found["host_memory_gib of two ranks"]
    assert found["the same under --max-total-tokens"]["tokens"] >= 128


def test_every_hook_target_exists(probe: dict[str, Any]) -> None:
    assert probe["registration"]["problems"] == []
    assert set(probe["targets"]) > {row.target for row in HOOKS}, "the hooks of the CPU operators are checked too"
    for target, found in probe["targets"].items():
        assert found["exists"] and found["callable"], target
        assert found["kind"] == "replace" or not found["is class"], f"SGLang wraps no class: {target}"


def test_no_target_has_two_rows() -> None:
    assert len({row.target for row in HOOKS}) == len(HOOKS)
    assert all(row.why for row in HOOKS)


def test_targets_have_the_parameters_we_use(probe: dict[str, Any]) -> None:
    by_name = {target.rsplit(".", 1)[1]: names for target, names in probe["parameters"].items()}
    assert by_name["__post_init__"] == ["self"]
    assert len(by_name["create_memory_pool_configurator"]) == 1
    assert set(by_name["_build_full_attention_backend_from_str"]) == {
        "backend_str",
        "model_runner",
        "init_new_workspace",
    }
    for method in ("_build_dsa_kv_pool", "maybe_init_hisparse_coordinator", "on_idle", "get_internal_state"):
        assert by_name[method][0] == "self"


def test_refused_options_are_options_of_sglang(probe: dict[str, Any]) -> None:
    found = probe["server arguments"]
    assert found["unknown options"] == []
    assert found["missing fields"] == []
    assert found["defaults"] == "None", "SGLang's own defaults are refused"


def test_models(probe: dict[str, Any]) -> None:
    found = probe["models"]
    for name, architecture in (("dense", "LlamaForCausalLM"), ("DeepSeek-V3", "DeepseekV3ForCausalLM")):
        kind, message = found[name].split(": ", 1)
        assert kind == "HiSparseError"
        assert f"{architecture} has no indexer" in one_sentence(message)
    expected = HiSparseConfig().resolve(index_topk=2048, page_size=64, context_len=163_840)
    assert found["DeepSeek-V3.2"] == repr(expected)
    assert "device_buffer_size=100 must be a multiple of the page size 64" in found["buffer"]
    assert "the host pool needs 100000000.00 GiB" in found["memory"]


def test_registration(probe: dict[str, Any]) -> None:
    registered = probe["registration"]["normal"]
    assert all(row.kind in registered[row.target] for row in HOOKS)
    assert set(registered) == set(probe["targets"]), "a CPU server registers the operators as well"


def test_another_version_stops_servers_with_the_flag_only(probe: dict[str, Any]) -> None:
    found = probe["registration"]
    assert found["another version"] == "None"
    assert found["another version registers"] == {"sglang.srt.server_args.ServerArgs.__post_init__": ["before"]}
    assert found["without the flag"] == "None"
    sentence = (
        "HiSparse cannot run: SGLang 0.5.18 is installed but this version of HiSparse supports sglang==0.5.17 only."
    )
    assert found["with the flag"] == f"HiSparseError: {sentence}"
    assert found["on the command line"] == f"SystemExit: {sentence}"


def test_a_missing_target_is_one_sentence(probe: dict[str, Any]) -> None:
    (problem,) = probe["registration"]["missing target"]
    assert one_sentence(problem) == (
        "SGLang 0.5.17 has no sglang.srt.managers.scheduler.Scheduler.no_such_method (testing the gate)."
    )


def test_hooks_do_nothing_without_the_flag(probe: dict[str, Any]) -> None:
    assert probe["without the flag"] == {row.target: True for row in HOOKS}


def test_the_indexer_hook_begins_swap_in(probe: dict[str, Any]) -> None:
    found = probe["early swap-in"]
    assert found["begun"] == [["regions", "lens", "selected", 5]], "in decode alone"
    assert found["results"] == ["selected"] * 2


def test_a_process_that_owns_later_layers(probe: dict[str, Any]) -> None:
    """FIELD F9. Layer ids are global outside, local inside: each layer's row is where that layer reads."""
    found = probe["later layers"]
    assert found["places"] == {str(layer): [float(layer)] * 2 for layer in range(30, 34)}
    assert found["index keys"]
    assert "layer 34 is not one of 30..33" in found["layer 34"]
