"""What to set before SGLang starts on a machine without a GPU: environment variables and server flags, each with its
reason.

Imports neither SGLang nor torch, since the variables must be there before either is imported.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SHIMS = Path(__file__).parent / "shims"
"""Folder of the import-time stand-ins. First on PYTHONPATH, and nowhere else, so that only the server's processes see
them.
"""


class Setting(NamedTuple):
    """A variable or flag, the value it gets, and why."""

    name: str
    value: str
    why: str


class Flag(NamedTuple):
    """A server flag that is added if the user has given neither it, nor an alias, nor ``unless``.

    ``legal`` are the user's values that work, empty for any.
    """

    name: str
    value: str
    why: str
    aliases: tuple[str, ...] = ()
    legal: tuple[str, ...] = ()
    unless: str = ""


VARIABLES = (
    Setting("SGLANG_USE_CPU_ENGINE", "1", "selects SGLang's CPU code paths"),
    Setting("TORCHDYNAMO_DISABLE", "1", "torch.compile would look for Triton"),
    Setting("OMP_WAIT_POLICY", "PASSIVE", "threads that spin while they wait make a busy machine many times slower"),
    Setting("SGLANG_DSA_FUSE_TOPK", "0", "the fused top-k is a CUDA kernel"),
)

FLAGS = (
    Flag("--device", "cpu", "no GPU is visible", legal=("cpu",)),
    Flag("--attention-backend", "dsa", "the CPU default, intel_amx, has no sparse attention", legal=("dsa", "nsa")),
    Flag("--kv-cache-dtype", "bfloat16", "the fp8 row kernels are CUDA", legal=("bfloat16", "bf16")),
    Flag("--dsa-topk-backend", "torch", "the others are CUDA kernels", legal=("torch",)),
    Flag(
        "--dsa-prefill-backend",
        "flashmla_sparse",
        "the back end whose call is replaced by torch operators",
        ("--nsa-prefill-backend",),
        ("flashmla_sparse",),
    ),
    Flag(
        "--dsa-decode-backend",
        "flashmla_sparse",
        "the back end whose call is replaced by torch operators",
        ("--nsa-decode-backend",),
        ("flashmla_sparse",),
    ),
    Flag("--mem-fraction-static", "0.3", "the pools share main memory with everything else"),
    Flag(
        "--max-total-tokens",
        "131072",
        "SGLang fills the pools with zeros at start-up, which takes 3 s a GB",
        unless="--enable-hisparse",  # which sizes the pools itself
    ),
    Flag("--max-running-requests", "64", "SGLang's default of 2,048 sizes tables that a CPU never fills"),
)

REFUSED = (
    Setting("--speculative-algorithm", "", "speculative decoding needs forward modes that only the CUDA indexer has"),
    Setting("--enable-torch-compile", "", "torch.compile is off, because it would look for Triton"),
    Setting("--quantization", "", "the quantised linear layers are CUDA kernels"),
)
"""Flags that cannot work, with the reason."""

TP_SIZE = ("--tp-size", "--tensor-parallel-size", "--tp")
PARALLEL_SIZES = "1 2 4"
DP_SIZE = ("--dp-size", "--data-parallel-size", "--dp")

LEGAL = (
    Setting("--dtype", "auto bfloat16", "rows and weights are bfloat16"),
    Setting("--page-size", "64", "the indexer's key buffer has pages of 64 tokens"),
    *(Setting(name, PARALLEL_SIZES, "the sizes that were tried") for name in (*TP_SIZE, *DP_SIZE)),
)
"""Flags that are not added but must have one of these values (separated by spaces) if given."""


def cpu_environment() -> dict[str, str]:
    """The variables to add to ``os.environ`` before SGLang's launcher is started; its child processes inherit them.

    PYTHONPATH gets the shims in front of what is there already.
    """
    variables = {setting.name: setting.value for setting in VARIABLES}
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(SHIMS)]
    variables["PYTHONPATH"] = os.pathsep.join([str(SHIMS), *rest])
    return variables


def cpu_server_args(given: list[str]) -> list[str]:
    """The SGLang flags to add to the user's.

    Args:
        given: the user's arguments to SGLang's launcher, as in ``sys.argv[1:]``; both ``--flag value`` and
            ``--flag=value``.

    Returns:
        arguments to add, without those the user has given.

    Raises:
        ValueError: one of the user's flags cannot work without a GPU; the message names the flag, its value and the
            legal values.
    """
    return [word for flag in _added(given) for word in (flag.name, flag.value)]


def explain(given: list[str]) -> Iterator[str]:
    """One line for each variable and flag that :func:`cpu_environment` and :func:`cpu_server_args` set, with its
    reason.
    """
    for setting in VARIABLES:
        yield f"{setting.name}={setting.value}: {setting.why}"
    yield f"PYTHONPATH starts with {SHIMS}: stand-ins for packages that SGLang imports and does not use here"
    for flag in _added(given):
        yield f"{flag.name} {flag.value}: {flag.why}"


def _added(given: list[str]) -> list[Flag]:
    values = _parse(given)
    for name, _, why in REFUSED:
        if name in values:
            raise ValueError(f"{name} does not work without a GPU: {why}; leave it out")
    for name, legal, why in LEGAL:
        _check(values, name, tuple(legal.split()), why)
    _check_groups(values)
    _check_binding(values)
    added = []
    for flag in FLAGS:
        names = (flag.name, *flag.aliases)
        for name in names:
            _check(values, name, flag.legal, flag.why)
        if not any(name in values for name in (*names, flag.unless)):
            added.append(flag)
    return added


def _check(values: dict[str, str], name: str, legal: tuple[str, ...], why: str) -> None:
    if legal and name in values and values[name] not in legal:
        raise ValueError(f"{name} {values[name]} does not work without a GPU ({why}); legal: {', '.join(legal)}")


def _check_binding(values: dict[str, str]) -> None:
    """SGLang stops at an assertion if a rank has no cores in its variable."""
    ranks = int(next((values[name] for name in TP_SIZE if name in values), "1"))
    given = os.environ.get("SGLANG_CPU_OMP_THREADS_BIND", "all")
    if ranks > 1 and given != "all" and given.count("|") + 1 != ranks:
        raise ValueError(
            f"SGLANG_CPU_OMP_THREADS_BIND={given} does not work with --tp-size {ranks}; legal: the cores of each rank, "
            f"separated by |, for example 0|1 for two, or leave it unset"
        )


def _check_groups(values: dict[str, str]) -> None:
    """Data-parallel attention shares the ranks of tensor parallelism out to its groups."""
    if "--enable-dp-attention" not in values:
        return
    tp, dp = (next((values[name] for name in names if name in values), "1") for names in (TP_SIZE, DP_SIZE))
    legal = [size for size in PARALLEL_SIZES.split() if int(tp) % int(size) == 0]
    if dp not in legal:
        raise ValueError(
            f"--dp-size {dp} does not work with --enable-dp-attention and --tp-size {tp} (each attention group has the "
            f"same number of ranks); legal: {', '.join(legal)}"
        )


def _parse(arguments: list[str]) -> dict[str, str]:
    """Flag -> value, the last one if repeated as argparse does; a flag without a value maps to ""."""
    values: dict[str, str] = {}
    for i, word in enumerate(arguments):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        following = arguments[i + 1] if i + 1 < len(arguments) and not arguments[i + 1].startswith("--") else ""
        values[name] = value if equals else following
    return values
