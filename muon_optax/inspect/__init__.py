"""An optimizer's work, made visible before and during a run: plans, reports, statistics."""
