"""Which axes of a parameter make its matrices, found from a model's parameter tree."""
