"""What every other room may use and which uses none of them: names, places, identities, and how things travel.

Internal: it may change without notice; docs/api says what is public.
"""
