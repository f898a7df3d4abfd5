"""Is there an NVIDIA GPU? Asked before torch is imported, since the answer decides what it is imported in."""

import ctypes


def cuda_devices() -> int:
    """Number of usable NVIDIA GPUs; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
