"""Known faults in a small model, on which verdicts are scored.

Internal: it may change without notice; docs/api says what is public.
"""
