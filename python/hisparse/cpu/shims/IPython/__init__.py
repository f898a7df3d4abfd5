"""Stand-in for IPython: sglang/utils.py imports two of its names for notebooks. Has nothing else, so that code which
asks whether it runs in a notebook is told no."""
