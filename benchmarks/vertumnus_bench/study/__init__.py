"""The simulation study: every policy on every workload and load, tuned, compared, drawn."""
