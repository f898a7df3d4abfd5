"""Stand-in for sglang-kernel, whose wheel needs libcuda to be imported."""

from hisparse.cpu.absent import stand_in

__version__ = "0.0.0+cpu"
__getattr__ = stand_in(__name__)
