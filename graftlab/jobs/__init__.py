"""Jobs that no notebook launched: how they join a graft world, and who holds the session of it.

Internal: it may change without notice; docs/api says what is public.
"""
