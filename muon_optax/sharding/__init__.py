"""How leaves are sharded and matrices brought together: the only package that knows a mesh."""
