"""Stand-in for soundfile, which SGLang's audio endpoints import."""

from hisparse.cpu.absent import absent_names

__getattr__ = absent_names(__name__)
