"""environment.py: what is set, what is left to the user, and what is refused."""

import os
import subprocess
import sys

import pytest

from hisparse.cpu.environment import FLAGS, SHIMS, cpu_environment, cpu_server_args, explain


def pairs(words):
    return dict(zip(words[::2], words[1::2], strict=True))


def test_everything_is_added_to_nothing():
    added = pairs(cpu_server_args(["--model-path", "m"]))
    assert added == {flag.name: flag.value for flag in FLAGS}
    assert added["--device"] == "cpu" and added["--kv-cache-dtype"] == "bfloat16"


@pytest.mark.parametrize("given", [["--max-total-tokens", "512"], ["--max-total-tokens=512"], ["--enable-hisparse"]])
def test_the_users_flag_stands(given):
    added = pairs(cpu_server_args(given))
    assert "--max-total-tokens" not in added
    assert len(added) == len(FLAGS) - 1


def test_an_alias_counts():
    assert "--dsa-prefill-backend" not in pairs(cpu_server_args(["--nsa-prefill-backend", "flashmla_sparse"]))


@pytest.mark.parametrize(
    "given",
    [
        ["--device", "cuda"],
        ["--attention-backend=fa3"],
        ["--kv-cache-dtype", "fp8_e4m3"],
        ["--dsa-topk-backend", "sgl-kernel"],
        ["--dsa-decode-backend", "flashmla_kv"],
        ["--nsa-prefill-backend", "tilelang"],
        ["--dtype", "float32"],
        ["--page-size", "1"],
        ["--tp-size", "3"],
        ["--tp=0"],
        ["--tensor-parallel-size", "8"],
        ["--dp-size", "3"],
        ["--data-parallel-size=two"],
        ["--device", "cpu", "--device", "cuda"],
    ],
)
def test_a_value_that_cannot_work_is_named_with_the_legal_ones(given):
    name, value = given if len(given) == 2 else given[-2:] if len(given) > 1 else given[0].split("=")
    with pytest.raises(ValueError) as error:
        cpu_server_args(["--model-path", "m", *given])
    message = str(error.value)
    assert message.startswith(f"{name} {value} does not work without a GPU") and "legal: " in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "given", [["--speculative-algorithm", "EAGLE"], ["--enable-torch-compile"], ["--quantization=fp8"]]
)
def test_a_flag_that_cannot_work_is_refused(given):
    with pytest.raises(
        ValueError, match=f"^{given[0].partition('=')[0]} does not work without a GPU: .*; leave it out$"
    ):
        cpu_server_args(given)


@pytest.mark.parametrize("name", ["--tp-size", "--tp", "--tensor-parallel-size"])
@pytest.mark.parametrize(("tp", "dp"), [("1", "1"), ("2", "2"), ("4", "1"), ("4", "2"), ("4", "4")])
def test_ranks_and_attention_groups(name, tp, dp):
    for groups in ("--dp-size", "--dp", "--data-parallel-size"):
        cpu_server_args([name, tp, groups, dp, "--enable-dp-attention"])


@pytest.mark.parametrize(
    ("given", "legal"), [("--dp-size 2", "1"), ("--tp-size 2 --dp-size 4", "1, 2"), ("--tp=1 --dp=4", "1")]
)
def test_attention_groups_that_do_not_divide_the_ranks(given, legal):
    cpu_server_args(given.split())  # replicas of the whole model
    with pytest.raises(ValueError) as error:
        cpu_server_args([*given.split(), "--enable-dp-attention"])
    message = str(error.value)
    assert message.startswith("--dp-size ") and "--tp-size" in message and message.endswith(f"; legal: {legal}")


def test_a_thread_binding_names_the_cores_of_each_rank(monkeypatch):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    cpu_server_args(["--tp-size", "2"])
    cpu_server_args([])
    for bad in ("0", "0|1|2"):
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", bad)
        with pytest.raises(ValueError) as error:
            cpu_server_args(["--tp-size", "2"])
        assert str(error.value).startswith(f"SGLANG_CPU_OMP_THREADS_BIND={bad} does not work with --tp-size 2; legal: ")


def test_legal_values_pass():
    given = [
        "--device",
        "cpu",
        "--attention-backend",
        "nsa",
        "--kv-cache-dtype",
        "bf16",
        "--dtype",
        "auto",
        "--page-size=64",
    ]
    assert not {"--device", "--attention-backend", "--kv-cache-dtype"} & set(cpu_server_args(given))


def test_pythonpath_starts_with_the_shims_and_keeps_the_rest(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/a", str(SHIMS), "/b"]))
    assert cpu_environment()["PYTHONPATH"].split(os.pathsep) == [str(SHIMS), "/a", "/b"]
    monkeypatch.delenv("PYTHONPATH")
    assert cpu_environment()["PYTHONPATH"] == str(SHIMS)


def test_every_setting_is_explained_in_one_line():
    lines = list(explain(["--device", "cpu"]))
    assert len(lines) == len(cpu_environment()) + len(FLAGS) - 1
    assert all(": " in line and "\n" not in line for line in lines)


def test_imports_neither_torch_nor_sglang():
    code = "import sys, hisparse.cpu.environment; print([m for m in ('torch', 'sglang') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
