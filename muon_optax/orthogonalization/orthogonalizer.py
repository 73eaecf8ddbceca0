"""The front door: which iteration runs on which matrix, in which dtype."""

import dataclasses
import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from muon_optax._internal.checks import check_choice
from muon_optax._internal.dtypes import wide_dtype
from muon_optax._internal.leaf_types import kind_of
from muon_optax.orthogonalization import iterate
from muon_optax.orthogonalization.coefficients import Preconditioning, Schedule
from muon_optax.orthogonalization.hermitian import hermitian_flops
from muon_optax.orthogonalization.normalize import Map, identity, near_one
from muon_optax.orthogonalization.resolve import Coefficients, resolve_schedule

__all__ = ["Method", "NewtonSchulz", "PrecisionName", "newton_schulz"]

Method = Literal["auto", "standard", "gram"]
PrecisionName = Literal["default", "high", "highest", "bfloat16", "tensorfloat32", "float32"]
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_FULL_PRECISION = ("highest", "float32")


def newton_schulz(
    x: jax.Array,
    ns_coeffs: Coefficients = "jordan",
    ns_steps: int | None = None,
    *,
    method: Method = "auto",
    preconditioning: Preconditioning | None = None,
    dtype: DTypeLike | None = None,
    precision: PrecisionName | None = None,
) -> jax.Array:
    """Replaces each matrix by (nearly) its polar factor UVᴴ.

    The result does not depend on the scale of `x`: it is bit for bit the same for ``x * 2**k``, and
    exactly zero for zero. A non-finite entry spoils its own matrix only.

    Args:
      x: (..., m, n), float16, bfloat16, float32, float64, complex64 or complex128.
      ns_coeffs: a schedule's name, a triple that every step uses, or one triple for each step.
      ns_steps: the number of steps; None means the schedule's own length, five for a triple.
      method: 'standard', 'gram', or 'auto': the one with fewer operations where matmuls of
        float32 are exact, which the Gram method needs, else 'standard'.
      preconditioning: the norm to divide by, 'frobenius', 'spectral', 'schatten' (the Schatten-4
        norm), 'schatten8', or 'aol', which changes the polar factor itself. None means the
        schedule's own.
      dtype: the dtype of the matmuls, 'bfloat16', 'float16', 'float32' or 'float64'; None means
        `x`'s. Sums are float32 at least. Complex input is computed in a complex dtype of at least
        that precision.
      precision: of the matmuls, as in `jax.lax.dot_general`. The Gram method's matmuls of
        float32 are always 'highest'.

    Returns:
      An array of the shape and dtype of `x`. No singular value is above ``schedule.maximum`` by
      more than 5% in half precision (or with matmuls that round float32 to bfloat16), or 0.5%.

    Raises:
      TypeError: `x` is none of these dtypes, or an option has a wrong type.
      ValueError: `x` has fewer than two dimensions, or an option has a value that isn't allowed.

    Example:
      >>> x = jnp.array([[3.0, 0.0, 0.0], [0.0, 0.0, -0.2]])
      >>> print(newton_schulz(x, "polar_express", 8).round(3))
      [[ 1.  0.  0.]
       [ 0.  0. -1.]]
    """
    schedule = resolve_schedule(ns_coeffs, ns_steps, preconditioning)
    return NewtonSchulz(schedule, method, dtype, precision)(x)


@dataclasses.dataclass(frozen=True)
class NewtonSchulz:
    """`newton_schulz` with its options checked and fixed: a hashable function of `x` alone.

    Attributes:
      schedule: from `resolve_schedule`.
      method: 'auto', 'standard' or 'gram'.
      dtype: the dtype of the matmuls, None for that of the input.
      precision: of the matmuls, as in `jax.lax.dot_general`.

    Example:
      >>> orthogonalizer = NewtonSchulz(resolve_schedule("polar_express", 8))
      >>> print(orthogonalizer(jnp.array([[3.0, 4.0]])).round(3))
      [[0.6 0.8]]
    """

    schedule: Schedule
    method: Method = "auto"
    dtype: DTypeLike | None = None
    precision: PrecisionName | None = None

    def __post_init__(self):
        if not isinstance(self.schedule, Schedule):
            raise TypeError(f"schedule={self.schedule!r}; it must come from resolve_schedule.")
        check_choice("method", self.method, get_args(Method))
        if isinstance(self.precision, lax.Precision):
            object.__setattr__(self, "precision", self.precision.name.lower())
        if self.precision is not None:
            check_choice("precision", self.precision, get_args(PrecisionName))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _checked_dtype(self.dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., m, n) -> the same shape and dtype, see `newton_schulz`."""
        _check_matrices(x)
        return _orthogonalize(self, x) if x.size else x

    def rounds(self, dtype: DTypeLike) -> bool | None:
        """Whether matmuls of `dtype` round their inputs to fewer bits than float32 has.

        None: they do on GPUs and TPUs, where JAX's default precision is TF32 or bfloat16, and don't
        on CPU.

        Example:
          >>> orthogonalizer = NewtonSchulz(resolve_schedule("jordan"))
          >>> [orthogonalizer.rounds(dtype) for dtype in ("bfloat16", "float32", "float64")]
          [True, None, False]
        """
        if jnp.dtype(dtype).itemsize < 4:
            return True
        if jnp.finfo(dtype).bits > 32:
            return False
        default = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        precision = self.precision or default
        return None if precision is None else precision not in _FULL_PRECISION

    def on_slices(
        self,
        x: jax.Array,
        collectives: iterate.GramCollectives,
        *,
        axis: Literal[-1, -2] = -1,
        method: Literal["standard", "gram"] = "gram",
    ) -> jax.Array:
        """The iteration on matrices of which each device holds a slice of the long axis.

        Only Gram matrices, their results, and a scalar or a row of scales for each matrix are
        communicated; the slices stay where they are.

        Args:
          x: (L, m, n_local), or (L, n_local, m) for ``axis=-2``.
          collectives: the sums over devices, and who owns which matrix.
          axis: the axis that is sliced.
          method: 'gram' sums a Gram matrix in each of its passes, 'standard' in each step. The
            latter needs every sum on every device that has a slice.

        Returns:
          This device's slices of the results, like `x`.

        Example:
          >>> def local(x):
          ...     total = lambda x: jax.lax.psum(x, "devices")
          ...     collectives = iterate.GramCollectives(lambda x: jax.lax.pmax(x, "devices"), total)
          ...     iteration = NewtonSchulz(resolve_schedule("polar_express", 8))
          ...     return iteration.on_slices(x, collectives)
          >>> slices = jnp.array([3.0, -4.0]).reshape(2, 1, 1, 1)
          >>> print(jax.vmap(local, axis_name="devices")(slices).ravel().round(3))
          [ 0.6 -0.8]
        """
        _check_matrices(x)
        if not x.size:
            return x
        y = _normalized(x, self.matmul_dtype(x.dtype), collectives.maximum)
        if method == "gram":
            return self._gram(y, axis, collectives).astype(x.dtype)
        y = lax.optimization_barrier(y)  # as for whole matrices, see `_orthogonalize`
        return self._standard(y, axis, collectives.reduce).astype(x.dtype)

    def chosen_method(self, m: int, n: int, dtype: DTypeLike) -> Literal["standard", "gram"]:
        """The method for m×n matrices of `dtype`.

        For 'auto', it is the one with fewer operations, but 'standard' where float32 matmuls round
        what they take in, as they do by default on the accelerators of this process: the Gram
        method must not, and its matmuls take several times as long there. In half precision only
        its small matmuls are float32, which counts in `gram_has_fewer_flops`.

        Example:
          >>> orthogonalizer = NewtonSchulz(resolve_schedule("jordan"))
          >>> [orthogonalizer.chosen_method(m, 256, "float32") for m in (64, 256)]
          ['gram', 'standard']
        """
        if self.method != "auto":
            return self.method
        matmuls = self.matmul_dtype(jnp.dtype(dtype))
        is_half = matmuls.itemsize < 4
        rounds = self.rounds(matmuls)
        if not is_half and (rounds or (rounds is None and jax.default_backend() != "cpu")):
            return "standard"
        return "gram" if self.gram_has_fewer_flops(m, n, is_half=is_half) else "standard"

    def gram_has_fewer_flops(self, m: int, n: int, *, is_half: bool) -> bool:
        """Whether the Gram method takes fewer operations, symmetric matmuls counted as half.

        In half precision its small matmuls are float32 and count twice, as they take twice as long
        at least.

        Example:
          >>> orthogonalizer = NewtonSchulz(resolve_schedule("jordan"))
          >>> [orthogonalizer.gram_has_fewer_flops(64, n, is_half=False) for n in (256, 64)]
          [True, False]
        """
        m, n = sorted((m, n))
        steps, passes = len(self.schedule.rows), self.schedule.passes
        small, large = hermitian_flops(m, m), hermitian_flops(m, n) + 2 * m * m * n
        second_part = 2 * m * m * n if is_half else 0  # of Q, see `gram_flops`
        standard = steps * (large + small)
        weight = 2 if is_half else 1
        gram = passes * (large + second_part) + (4 * steps - 3 * passes) * small * weight
        return gram < standard

    def matmul_dtype(self, own: Any) -> Any:
        """The dtype of the matmuls for input of dtype `own`.

        Example:
          >>> NewtonSchulz(resolve_schedule("fast"), dtype="bfloat16").matmul_dtype("float32")
          dtype(bfloat16)
        """
        dtype = jnp.dtype(own if self.dtype is None else self.dtype)
        is_complex = jnp.issubdtype(own, jnp.complexfloating)
        return wide_dtype(dtype, jnp.complex64) if is_complex else dtype

    def sent_gram_dtype(self, method: Literal["standard", "gram"], own: DTypeLike) -> jnp.dtype:
        """The dtype in which devices send each other the Gram matrices of their slices.

        They are computed in float32 at least. The standard method with half-precision matmuls sends
        them in float16, whose eleven bits are more than bfloat16 keeps of the square and the
        factor. `benchmarks/adversarial.py` finds no input on which a singular value grows more for
        it; with bfloat16's eight bits one grows to 1.35 times its bound. The Gram method sends them
        as they are, since there rounding errors add up, and so are they sent where AOL divides each
        row by its norm, as those of small rows would be lost beside large ones.

        Args:
          method: the method, as of `chosen_method`.
          own: the dtype of the matrices.

        Example:
          >>> NewtonSchulz(resolve_schedule("jordan")).sent_gram_dtype("standard", "bfloat16")
          dtype('float16')
        """
        matmuls = self.matmul_dtype(jnp.dtype(own))
        is_of_rows = self.schedule.preconditioning == "aol"
        if method == "standard" and matmuls.itemsize < 4 and not is_of_rows:
            return jnp.dtype(jnp.float16)
        return wide_dtype(matmuls)

    def flops(self, m: int, n: int, dtype: DTypeLike = "float32") -> int:
        """FLOPs for one m×n matrix of `dtype`, all matmuls counted as dense.

        A multiply-add is 2. Standard: T(4m²n + 2m³) for m <= n and T steps; Gram: see `gram_flops`.

        Example:
          >>> NewtonSchulz(resolve_schedule("jordan"), method="standard").flops(10, 20)
          50000
        """
        if self.chosen_method(m, n, dtype) == "gram":
            is_half = self.matmul_dtype(jnp.dtype(dtype)).itemsize < 4
            return sum(self.gram_flops(m, n, is_half=is_half))
        m, n = sorted((m, n))
        return len(self.schedule.rows) * (4 * m**2 * n + 2 * m**3)

    def gram_flops(self, m: int, n: int, *, is_half: bool) -> tuple[int, int]:
        """FLOPs of the Gram method: of the matmuls with X, and of the small ones.

        For m <= n, T steps and r restarts: 4(r + 1)m²n, or 6(r + 1)m²n in half precision, where Q
        is multiplied in two parts; and (8T − 6(r + 1))m³.

        Example:
          >>> NewtonSchulz(resolve_schedule("jordan")).gram_flops(10, 20, is_half=False)
          (16000, 28000)
        """
        m, n = sorted((m, n))
        passes = self.schedule.passes
        matmuls = (6 if is_half else 4) * passes * m**2 * n
        return matmuls, (8 * len(self.schedule.rows) - 6 * passes) * m**3

    def _standard(self, x: jax.Array, axis: Literal[-1, -2], reduce: Map = identity) -> jax.Array:
        schedule, precision = self.schedule, self.precision
        rounds = self.rounds(x.dtype)
        if rounds:
            schedule = schedule.with_safety()
        elif rounds is None and not schedule.withstands_rounding:
            precision = "highest"
        return iterate.standard(x, schedule, axis=axis, precision=precision, reduce=reduce)

    def _gram(
        self,
        x: jax.Array,
        axis: Literal[-1, -2],
        collectives: iterate.GramCollectives = iterate.ALONE,
    ) -> jax.Array:
        is_half = x.dtype.itemsize < 4
        schedule = self.schedule.with_safety() if is_half else self.schedule
        return iterate.gram(x, schedule, axis=axis, collectives=collectives)

    def _iterated(self, x: jax.Array, axis: Literal[-1, -2]) -> jax.Array:
        m, n = x.shape[-2:]
        if self.chosen_method(m, n, x.dtype) == "standard":
            return self._standard(x, axis)
        return self._gram(x, axis)


@functools.partial(jax.jit, static_argnums=0)
def _orthogonalize(config: NewtonSchulz, x: jax.Array) -> jax.Array:
    m, n = x.shape[-2:]
    y = _normalized(x, config.matmul_dtype(x.dtype))
    if m > n and y.dtype.itemsize < 4:
        # In half precision XLA's sums over columns take twice the time on CPU. The barriers keep it
        # from moving the transposition into the matmuls again.
        y = config._iterated(lax.optimization_barrier(y.mT), -1)
        y = lax.optimization_barrier(y).mT
    else:
        # Else `x` would be kept, and scaled again for each of the matmuls with it.
        y = config._iterated(lax.optimization_barrier(y), -1 if m <= n else -2)
    return y.astype(x.dtype)


def _normalized(x: jax.Array, dtype: Any, maximum: Map = identity) -> jax.Array:
    """`x` in the dtype of the matmuls, its largest entry near 1."""
    return near_one(x.astype(wide_dtype(x.dtype, dtype)), maximum).astype(dtype)


def _check_matrices(x: jax.Array) -> None:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"x must be an array, got {kind_of(x)}")
    if x.dtype.name not in (*_DTYPES, "complex64", "complex128"):
        raise TypeError(f"x has dtype {x.dtype}; allowed are {_DTYPES}, complex64 and complex128.")
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; it must have at least two dimensions.")


def _checked_dtype(dtype: Any) -> Any:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}; allowed are {_DTYPES}.")
    if jax.dtypes.canonicalize_dtype(name).name != name:
        raise ValueError(f"dtype={dtype!r} needs jax_enable_x64.")
    return jnp.dtype(name)
