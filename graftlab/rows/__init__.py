"""Rows: their columns, how they are written, stored and read, and the newest of each tap."""
