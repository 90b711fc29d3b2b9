"""Carry tensors between the ranks of the two sides: the contract (:mod:`.contract`) and its implementation.

Internal: it may change without notice; docs/api says what is public.
"""
