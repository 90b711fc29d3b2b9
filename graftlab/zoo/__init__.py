"""Faults whose truth is known, in a small model of their own: what a verdict is scored on, here and by its users."""
