"""Loads, their accounting and the measurements behind ``benchmarks/switch.py``."""
