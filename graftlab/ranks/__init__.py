"""Ranks as processes: the notebook's side, the rank's side, and the messages between them.

Internal: it may change without notice; docs/api says what is public.
"""
