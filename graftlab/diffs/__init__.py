"""How far two tensors are apart: the statistics of a pair, its maps and its samples.

Internal: it may change without notice; docs/api says what is public.
"""
