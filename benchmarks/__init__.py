"""graftlab's speed, compared with the published protocol and the machine's limits: ``python -m benchmarks``."""
