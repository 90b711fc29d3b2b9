"""The ``%graft`` magics: they parse, and call the session.

Internal: it may change without notice; docs/api says what is public.
"""
