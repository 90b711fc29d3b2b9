"""The calls that users put into model code, and the objects that receive what those calls show.

Internal: it may change without notice; docs/api says what is public.
"""
