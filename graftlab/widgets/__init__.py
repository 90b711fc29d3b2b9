"""The widgets: editors and a dashboard over a live session.

Internal: it may change without notice; docs/api says what is public.
"""
