"""The pieces of a step, one file each, as stages and as optax transformations."""
