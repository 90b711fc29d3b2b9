"""Taps of one side on disk: written while it runs, and usable as that side.

Internal: it may change without notice; docs/api says what is public.
"""
