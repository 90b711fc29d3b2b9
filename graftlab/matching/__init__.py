"""Matching by value: which tensor of one implementation is which of another, in which layout, whatever their names."""
