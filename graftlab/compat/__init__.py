"""Code that is written for other kits: the same calls, as taps.

Internal, but for what docs/attach.md shows of it: it may change without notice; docs/api says what is public.
"""
