"""Muon for JAX: orthogonalised momentum for weight matrices, AdamW for the rest."""
