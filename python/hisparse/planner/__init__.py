"""Sizing without a machine: where every byte would go, how many requests would run, what the link allows."""
