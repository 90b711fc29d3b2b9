"""Runners of a batch: eager, or through captured graphs of several kinds.

Internal: it may change without notice; docs/api says what is public.
"""
