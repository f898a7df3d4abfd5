"""Measurements of the machine at hand: the link to host memory, and swap-in over it."""
