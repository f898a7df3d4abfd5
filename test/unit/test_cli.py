"""The command as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def hisparse(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hisparse.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_doctor_finds_everything() -> None:
    result = hisparse("doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    for word in ("Python", "torch", "sglang", "plug-in", "GPU", "pinned memory", "host memory", "NUMA nodes"):
        assert word in result.stdout
    assert "sglang.srt.server_args.ServerArgs.__post_init__" in result.stdout
    assert "FAIL" not in result.stdout


def test_doctor_sees_a_plug_in_that_is_not_selected() -> None:
    result = hisparse("doctor", SGLANG_PLUGINS="something_else")
    assert result.returncode == 1
    assert "FAIL plug-in" in result.stdout and "leaves out hisparse" in result.stdout


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--kv-cache-dtype", "fp8_e4m3"), "--kv-cache-dtype fp8_e4m3 does not work without a GPU"),
        (("--speculative-algorithm", "EAGLE"), "--speculative-algorithm does not work without a GPU"),
        (("--device", "cuda"), "--device cuda does not work without a GPU"),
    ],
)
def test_serve_refuses_what_a_cpu_cannot_do(flags: tuple[str, str], sentence: str) -> None:
    result = hisparse("serve", "--model-path", "somewhere", *flags)
    assert result.returncode == 2
    assert result.stderr.startswith("hisparse: error: " + sentence) and result.stderr.count("\n") == 1


@pytest.mark.parametrize(("package", "command"), [("psutil", "doctor"), ("psutil", "bench"), ("sglang", "serve")])
def test_a_missing_package_is_one_sentence(package: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    result = hisparse(command, PYTHONPATH=path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"hisparse: error: Python package {package} is not installed here; ")
    assert result.stderr.count("\n") == 1


def test_unknown_command_names_the_known_ones() -> None:
    result = hisparse("sreve")
    assert result.returncode == 2
    assert "serve" in result.stderr and "Traceback" not in result.stderr


def test_serve_refuses_a_selection_of_plug_ins_without_this_one() -> None:
    """SGLang's own HiSparse would answer the flag."""
    result = hisparse("serve", "--model-path", "somewhere", "--enable-hisparse", SGLANG_PLUGINS="other")
    assert result.returncode == 2
    assert result.stderr == "hisparse: error: SGLANG_PLUGINS=other leaves out hisparse; add it or unset the variable.\n"
