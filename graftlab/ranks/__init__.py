"""Processes and the wire between them: the notebook's side, the rank's side, and what they say to each other.

Internal: it may change without notice; docs/api says what is public.
"""
