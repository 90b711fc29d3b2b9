"""The ways to carry a batch through the model: as it is, or through captured graphs of several kinds."""
