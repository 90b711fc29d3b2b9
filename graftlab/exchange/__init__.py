"""The mailbox that carries tensors between the two sides: what it promises (:mod:`.contract`), and what keeps it.

Internal: it may change without notice; docs/api says what is public.
"""
