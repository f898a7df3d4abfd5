"""``tl``: only what runs while a module with kernels is imported."""

from hisparse.cpu.absent import absent_names

__getattr__ = absent_names(__name__)


class constexpr:
    """An annotation, or a wrapped compile-time constant."""

    def __init__(self, value=None):
        self.value = value
