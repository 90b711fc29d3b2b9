"""What rows say together: in which order taps ran, and which of them diverged first.

Internal: it may change without notice; docs/api says what is public.
"""
