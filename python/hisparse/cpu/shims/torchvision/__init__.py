"""Stand-in for torchvision, which SGLang and transformers import for image models."""

from hisparse.cpu.absent import stand_in

__version__ = "0.0.0+cpu"
__getattr__ = stand_in(__name__)
