"""The processing of one tap's tensor on a rank, from the plan's decision to the row.

Internal: it may change without notice; docs/api says what is public.
"""
