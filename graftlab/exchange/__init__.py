"""The mailbox that carries tensors between the two sides: one promise (:mod:`.base`), one module an implementation.

Internal: it may change without notice; docs/api says what is public.
"""
