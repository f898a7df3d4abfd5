from hisparse.cpu.absent import absent_names
from torchvision.transforms import InterpolationMode  # noqa: F401

__getattr__ = absent_names(__name__)
