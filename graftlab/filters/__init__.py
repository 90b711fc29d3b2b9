"""Filter expressions over tags; plans, watches and registries share them.

Internal: it may change without notice; docs/api says what is public.
"""
