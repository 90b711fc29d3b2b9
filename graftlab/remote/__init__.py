"""Ranks that a notebook launches on other machines: their processes, and the schedulers that place them.

Internal: it may change without notice; docs/api says what is public.
"""
