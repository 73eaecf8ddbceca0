"""Decides, before anything runs, how the matrices of all leaves are handled on a mesh."""
