"""Matching by value: which tensor of one implementation is which of the other, and in which layout.

Internal: it may change without notice; docs/api says what is public.
"""
