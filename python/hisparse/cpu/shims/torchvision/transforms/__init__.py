"""The one thing that is used at import time: an enumeration that transformers builds a table from."""

import enum

from hisparse.cpu.absent import absent_names


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__getattr__ = absent_names(__name__)
