"""The parts of the demo: options, text, model and learning curves."""
