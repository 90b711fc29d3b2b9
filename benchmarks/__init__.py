"""How fast graftlab is, beside the published protocol and the machine's own limits: ``python -m benchmarks``."""
