"""Workloads and simulation of pools, without an engine.

Nothing here imports torch, sglang or the worker side; of the router only its vocabulary.
"""
