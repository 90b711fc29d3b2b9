"""Jobs: programs that another launcher started and that join a graft world, and the server of their session.

Internal: it may change without notice; docs/api says what is public.
"""
