"""Scale-invariant normalisation, so that a schedule meets singular values in (0, 1]."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from muon_optax.orthogonalization.coefficients import Preconditioning, Schedule

__all__ = ["Map", "identity", "inverse_power_of_two", "near_one", "precondition", "scaled"]

Map = Callable[[jax.Array], jax.Array]


def identity(x: jax.Array) -> jax.Array:
    """The result of a collective where there is one device: its argument."""
    return x


def near_one(x: jax.Array, maximum: Map = identity) -> jax.Array:
    """Multiplies each matrix by the power of two that brings its largest entry near 1.

    This rounds nothing, and afterwards squares of entries that matter neither over- nor underflow.
    Where a device flushes subnormal numbers, as XLA on CPU does, those of `x` count as zeros.

    Args:
      x: (..., m, n), not empty; float32, float64 or complex.
      maximum: takes the maximum of a (..., 1, 1) array over the devices that hold parts of `x`.

    Returns:
      An array like `x`. Zeros and non-finite entries stay as they are.

    Example:
      >>> print(near_one(jnp.array([[0.0, 3.0]]) * 2.0**100))
      [[0.  1.5]]
    """
    size = maximum(jnp.max(jnp.abs(x), (-2, -1), keepdims=True))
    # The result of the iteration does not depend on this factor, so neither does its derivative.
    return scaled(x, lax.stop_gradient(inverse_power_of_two(size)))


def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x` times a real factor; written out for complex `x` under strict dtype promotion."""
    return x * factor.astype(x.dtype)


def precondition(
    gram: jax.Array, schedule: Schedule, square: Map
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scale that divides X by a norm, and A and A² of the scaled X for the first step.

    All norms come from A = XXᴴ, which that step forms anyway, so they cost no pass over X:

    - 'frobenius': ‖X‖_F = (tr A)^(1/2).
    - 'spectral': the largest singular value, by an eigenvalue decomposition (slow).
    - 'schatten': the Schatten-4 norm ‖A‖_F^(1/2), as in optax.
    - 'schatten8': the Schatten-8 norm ‖A²‖_F^(1/4), the closest to the largest singular value.
    - 'aol': each row i by (Σ_j |A_ij|)^(1/2), from arXiv 2208.03160. This changes the polar factor
      itself: by .004 to .07 on ordinary spectra, by .18 where row norms spread over 1e3.

    Args:
      gram: (..., m, m), float32, float64 or complex.
      schedule: its `preconditioning` is one of the above; the norm is multiplied by its
        `norm_factor`.
      square: maps a Hermitian matrix to its square.

    Returns:
      The Gram matrix of ``scale * X``, its square, and the scale, (..., 1, 1) or (..., m, 1) for
      'aol'. Where the norm is 0 it is taken as 1.

    Example:
      >>> from muon_optax.orthogonalization import resolve_schedule
      >>> gram = jnp.diag(jnp.array([1.0, 3.0]))
      >>> gram, _, scale = precondition(gram, resolve_schedule("jordan"), lambda a: a @ a)
      >>> print(gram.diagonal(), scale)
      [0.25 0.75] [[0.5]]
    """
    trace = _nonzero(jnp.trace(gram, axis1=-2, axis2=-1).real[..., None, None])
    gram, scale = scaled(gram, 1 / trace), 1 / jnp.sqrt(trace)
    if schedule.preconditioning == "aol":
        rows = schedule.norm_factor * jnp.sqrt(_nonzero(jnp.abs(gram).sum(-1, keepdims=True)))
        gram = scaled(gram, 1 / (rows * rows.mT))
        return gram, square(gram), scale / rows
    gram2 = square(gram)
    norm2 = _squared_norm(gram, gram2, schedule.preconditioning) * schedule.norm_factor**2
    return scaled(gram, 1 / norm2), scaled(gram2, 1 / norm2**2), scale / jnp.sqrt(norm2)


def _squared_norm(gram: jax.Array, gram2: jax.Array, kind: Preconditioning) -> jax.Array:
    """The square of X's norm, for XXᴴ of trace 1 and its square."""
    match kind:
        case "schatten":
            return _frobenius(gram)
        case "schatten8":
            return jnp.sqrt(_frobenius(gram2))
        case "spectral":
            values = lax.platform_dependent(gram, cpu=_eigenvalues, default=jnp.linalg.eigvalsh)
            return _nonzero(values[..., -1:, None])
    return jnp.ones((), gram.real.dtype)


def _eigenvalues(x: jax.Array) -> jax.Array:
    """One matrix after the other: for batches, several CPU devices can wait for each other forever.

    jaxlib shares a batch among the threads that run the devices.
    """
    values = lax.map(jnp.linalg.eigvalsh, x.reshape(-1, *x.shape[-2:]))
    return values.reshape(x.shape[:-1])


def _frobenius(x: jax.Array) -> jax.Array:
    squares = (x * x.conj()).real.sum((-2, -1), keepdims=True)
    return jnp.sqrt(_nonzero(squares))


def _nonzero(x: jax.Array) -> jax.Array:
    # Replacing the zero before a root or a division keeps derivatives finite there.
    return jnp.where(x == 0, 1, x)


def inverse_power_of_two(size: jax.Array) -> jax.Array:
    """2^−e for 2^e <= size < 2^(e+1), from the bits: frexp fails under vmap on an Explicit mesh."""
    info = jnp.finfo(size.dtype)
    integer = jnp.dtype(f"int{info.bits}")
    bits = lax.bitcast_convert_type(size, integer)
    # Not below 1, the field of the smallest normal number: a subnormal factor would become zero.
    inverse = jnp.maximum(2 * (info.maxexp - 1) - (bits >> info.nmant), 1)
    factor = lax.bitcast_convert_type(inverse << info.nmant, size.dtype)
    return jnp.where(bits == 0, 1, factor)
