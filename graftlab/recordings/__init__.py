"""Record the taps of one side to disk, and use a recording as that side.

Internal: it may change without notice; docs/api says what is public.
"""
