"""Requests to serve: public traces, and generators that stand in for those that are not public.

``traces`` reads and writes, ``statistics`` holds a workload against the paper's, ``arrivals``
changes when its requests come. ``python -m vertumnus_sim.workloads`` does all of it. The same
seed gives the same requests in every process.
"""
