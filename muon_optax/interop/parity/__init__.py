"""Proof that nothing changes: a run of PyTorch's FSDP2, and its gradients through `muon_optax`.

`ranks` and what it imports run under torch alone, one process a rank; `replay` runs under JAX.
They share `case` and the files that the ranks write.
"""
