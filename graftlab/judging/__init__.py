"""The runs that a verdict, a match or a check makes, and how each follows from the ones before.

Internal: it may change without notice; docs/api says what is public.
"""
