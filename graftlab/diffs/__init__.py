"""How far two tensors are apart: the statistics of a pair, its maps and its samples."""
