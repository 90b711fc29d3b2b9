"""The notebook's side of a session: runs, what ranks send, questions to them, and what is kept on disk.

Internal: it may change without notice; docs/api says what is public.
"""
