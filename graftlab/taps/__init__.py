"""What people put into model code, and who is given what it shows.

Internal: it may change without notice; docs/api says what is public.
"""
