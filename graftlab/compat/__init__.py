"""The calls of other debugging kits, as taps.

Internal, except for what docs/attach.md shows: it may change without notice; docs/api says what is public.
"""
