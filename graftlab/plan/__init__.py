"""The plan in force: filters, transform and names, as one immutable value.

Internal: it may change without notice; docs/api says what is public.
"""
