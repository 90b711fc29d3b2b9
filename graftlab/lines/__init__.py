"""From a tap that differs to the operation, its arguments and its line of source.

Internal: it may change without notice; docs/api says what is public.
"""
