"""How a model's call uses each of its parameters, read from its jaxpr."""

from muon_optax.readers.usage.summary import Role, Usage, read_usage

__all__ = ["Role", "Usage", "read_usage"]
