"""The ways to carry a batch through the model: as it is, or through captured graphs of several kinds.

Internal: it may change without notice; docs/api says what is public.
"""
