"""Rows: their columns, how they are written, stored and read, and the newest of each tap.

Internal: it may change without notice; docs/api says what is public.
"""
