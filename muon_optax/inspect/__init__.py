"""What an optimizer does, to be read before and during a run: plans, reports, statistics."""
