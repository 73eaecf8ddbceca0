"""Runs a plan on the devices: rounds of chunks, the buffers they read and write, barriers."""
