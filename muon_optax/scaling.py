"""How large an orthogonalised update is: one factor a matrix, from its fan-in and fan-out."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, get_args

import jax.typing

from muon_optax.checks import check_choice, check_number

__all__ = ["Scale", "Scaling", "resolve_scaling"]

Scale = Literal["shape_scaling", "match_rms_adamw", "spectral", "unit_rms_norm", "none"]

_FACTORS: dict[str, Callable[[int, int], float]] = {
    # Keller Jordan, https://kellerjordan.github.io/posts/muon/; optax's and torch's default.
    "shape_scaling": lambda fan_in, fan_out: math.sqrt(max(1.0, fan_out / fan_in)),
    # Moonlight, arXiv 2502.16982, with the 0.2 that matches AdamW's usual update RMS.
    "match_rms_adamw": lambda fan_in, fan_out: 0.2 * math.sqrt(max(fan_in, fan_out)),
    # Megatron-LM and AReaL; Dion calls sqrt(fan_out / fan_in) "spectral_norm", which is another
    # thing.
    "spectral": lambda fan_in, fan_out: math.sqrt(max(fan_in, fan_out)),
    # The operator norm between RMS norms, arXiv 2409.20325; what muP asks for.
    "unit_rms_norm": lambda fan_in, fan_out: math.sqrt(fan_out / fan_in),
    "none": lambda fan_in, fan_out: 1.0,
}


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The factor of a mode, times a multiplier that may be traced.

    Attributes:
      mode: a `Scale`.
      multiplier: `scale_factor`, or `consistent_rms`.
    """

    mode: Scale
    multiplier: jax.typing.ArrayLike

    @property
    def is_bare(self) -> bool:
        """Whether the multiplier is known to change nothing."""
        return isinstance(self.multiplier, int | float) and self.multiplier == 1

    def base(self, fan_in: int, fan_out: int) -> float:
        """The mode's static factor of one matrix; 1 for an empty one."""
        return _FACTORS[self.mode](fan_in, fan_out) if fan_in and fan_out else 1.0


def resolve_scaling(
    scale: Scale | None,
    scale_factor: jax.typing.ArrayLike,
    consistent_rms: jax.typing.ArrayLike | None,
) -> Scaling:
    """Merges the three scale options.

    Raises:
      TypeError: for a factor that isn't a number.
      ValueError: for an unknown mode, or both `scale` and `consistent_rms`.

    Example:
      >>> resolve_scaling("match_rms_adamw", 1.0, None).base(4, 16)
      0.8
    """
    if scale is not None:
        check_choice("scale", scale, get_args(Scale))
    check_number("scale_factor", scale_factor)
    if consistent_rms is None:
        return Scaling(scale or "shape_scaling", scale_factor)
    check_number("consistent_rms", consistent_rms)
    if scale is not None:
        raise ValueError(
            f"give scale or consistent_rms, not both: got scale={scale!r} and "
            f"consistent_rms={consistent_rms!r}"
        )
    return Scaling("spectral", consistent_rms * scale_factor)
