"""Comparisons from one command: start both sides, match, judge, report.

Internal: it may change without notice; docs/api says what is public.
"""
