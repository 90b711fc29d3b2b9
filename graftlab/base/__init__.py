"""The basics that every other room may import, and that import none of them: names, places, identities, serialization.

Internal: it may change without notice; docs/api says what is public.
"""
