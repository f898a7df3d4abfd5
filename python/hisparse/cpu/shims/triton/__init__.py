"""Stand-in for Triton: kernels can be defined, tuned and decorated, and say their name when somebody launches one.

SGLang has a stub of its own for machines without Triton; its kernels turn into plain functions, and a launch fails with
"'function' object is not subscriptable".
"""

from hisparse.cpu.absent import stand_in

__version__ = "3.0.0"
__getattr__ = stand_in(__name__)


class Kernel:
    """What ``@triton.jit`` makes of a function."""

    def __init__(self, fn):
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", repr(fn))
        self.__module__ = getattr(fn, "__module__", __name__)
        self.__doc__ = getattr(fn, "__doc__", None)

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"Triton kernel {self.__module__}.{self.__name__} was called without a GPU")

    def __getitem__(self, grid):
        return self


def _decorator(fn=None, **options):
    """``@jit`` as well as ``@jit(...)``."""
    if fn is None:
        return _decorator
    return fn if isinstance(fn, Kernel) else Kernel(fn)


jit = _decorator


def autotune(*args, **options):
    return _decorator


def heuristics(*args, **options):
    return _decorator


class Config:
    """A point of an autotuner's search space; kept, never used."""

    def __init__(self, kwargs=None, num_warps=4, num_stages=2, **options):
        self.kwargs = kwargs or {}
        self.num_warps = num_warps
        self.num_stages = num_stages


def cdiv(a, b):
    return -(-a // b)


def next_power_of_2(n):
    return 1 << max(0, n - 1).bit_length()
