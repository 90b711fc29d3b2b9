"""Faults whose truth is known, in a small model of their own: what a verdict is scored on, here and by its users.

Internal: it may change without notice; docs/api says what is public.
"""
