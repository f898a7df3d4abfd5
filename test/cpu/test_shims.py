"""The stand-ins: everything imports, nothing runs, and no other program sees them."""

import os
import subprocess
import sys

import pytest

from hisparse.cpu.environment import SHIMS, cpu_environment


def run(code: str) -> str:
    """Run a program as a server process would run; what it prints."""
    environment = {**os.environ, **cpu_environment()}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return result.stdout.strip()


def test_a_triton_kernel_can_be_defined_and_names_itself_when_launched():
    code = """
import triton, triton.language as tl
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

@triton.autotune(configs=[triton.Config({"B": 64}, num_warps=8)], key=["n"])
@triton.heuristics({"EVEN": lambda args: True})
@triton.jit
def add_kernel(x, n: tl.constexpr, BLOCK: tl.constexpr = tl.constexpr(4)):
    libdevice.exp(x)

@triton.jit(do_not_specialize=["n"])
def other(x): ...

assert triton.cdiv(65, 64) == 2 and [triton.next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
for launch in (lambda: add_kernel[(1,)](0), lambda: add_kernel(0), lambda: other[(1,)](0)):
    try:
        launch()
    except NotImplementedError as error:
        print(error)
"""
    lines = run(code).splitlines()
    assert [name in line for name, line in zip(("add_kernel", "add_kernel", "other"), lines, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    "call",
    [
        "import sgl_kernel; sgl_kernel.rmsnorm(1)",
        "from sgl_kernel.flash_mla import flash_mla_sparse_fwd as f; f(1)",
        "import torchvision.transforms.functional as F; F.resize(1)",
        "from torchvision.io import decode_jpeg; decode_jpeg(1)",
        "from IPython.display import HTML; HTML('x')",
        "import soundfile; soundfile.read('x')",
        "import triton.testing; triton.testing.do_bench(None)",
    ],
)
def test_calling_what_is_not_there_names_it(call):
    code = f"try:\n    {call}\nexcept NotImplementedError as error:\n    print(error)"
    name = call.partition("; ")[2].partition("(")[0].rpartition(".")[2]
    name = {"f": "flash_mla_sparse_fwd"}.get(name, name)
    assert f".{name} was called" in run(code)


def test_absent_names_serve_as_annotations_and_base_classes():
    assert (
        run("""
import sgl_kernel
class Child(sgl_kernel.Base): ...
def f(x: sgl_kernel.Tensor | None): ...
print(isinstance(1, sgl_kernel.Base), hasattr(sgl_kernel, "__wrapped__"))
""")
        == "False False"
    )


def test_only_server_processes_see_them():
    code = f"import sys; print([p for p in sys.path if p == {str(SHIMS)!r}])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
