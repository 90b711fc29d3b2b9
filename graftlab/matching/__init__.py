"""Matching by value: which tensor of one implementation is which of another, in which layout, whatever their names.

Internal: it may change without notice; docs/api says what is public.
"""
