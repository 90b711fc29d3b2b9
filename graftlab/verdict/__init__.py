"""Conclusions from rows: the order of taps, the first that diverges, and which computation is the cause.

Internal: it may change without notice; docs/api says what is public.
"""
