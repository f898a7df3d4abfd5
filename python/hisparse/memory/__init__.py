"""Where rows live: the host pool, the hot buffer and the prefill workspace."""

from hisparse.memory.host_pool import HostPool, free_memory_bytes, require_free_memory
from hisparse.memory.regions import HotBuffer

__all__ = ["HostPool", "HotBuffer", "free_memory_bytes", "require_free_memory"]
