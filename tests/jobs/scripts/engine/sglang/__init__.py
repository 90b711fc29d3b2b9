"""Stands for the package of that name."""
