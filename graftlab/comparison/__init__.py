"""Comparisons from one command: start both sides, match, judge, report."""
