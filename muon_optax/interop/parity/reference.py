"""Muon in torch, written out for every system: gather, orthogonalise, shard again.

Independent of the library: it shares no code and no table with the recipes that it judges.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["CONVENTIONS", "Conventions", "Reference", "is_hidden_matrix"]

Shape = tuple[int, ...]
Rows = tuple[tuple[float, float, float], ...]

_JORDAN: Rows = ((3.4445, -4.7750, 2.0315),) * 5
_QUINTIC: Rows = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_POLAR_EXPRESS: Rows = (
    (8.156555, -22.483293, 15.878770),
    (4.042930, -2.808917, 0.500018),
    (3.891668, -2.772484, 0.506065),
    (3.285754, -2.368129, 0.464490),
    (2.346541, -1.709783, 0.423236),
)


def is_hidden_matrix(name: str, shape: Shape) -> bool:
    """A matrix that is neither the embedding nor the head."""
    return len(shape) == 2 and "embed" not in name and "lm_head" not in name


def _is_xtuners(name: str, shape: Shape) -> bool:
    is_named = "embed_tokens" in name or "lm_head" in name
    return len(shape) == 2 and min(shape) > 1 and not is_named


def _is_matrix(name: str, shape: Shape) -> bool:
    del name
    return len(shape) == 2


def _original(out: int, fan_in: int) -> float:
    return math.sqrt(max(1.0, out / fan_in))


def _match_rms_adamw(out: int, fan_in: int) -> float:
    return 0.2 * math.sqrt(max(out, fan_in))


def _spectral(out: int, fan_in: int) -> float:
    return math.sqrt(max(out, fan_in))


@dataclasses.dataclass(frozen=True)
class Conventions:
    """One system's, with weights stored [out, in].

    Attributes:
      scale: of a matrix, from its fan-out and fan-in.
      rows: Newton-Schulz coefficients.
      norm: the Frobenius norm is multiplied by this.
      sums: whether momentum is a sum of gradients, not an average.
      nesterov: whether Muon looks a step ahead.
      corrected: whether momentum is bias-corrected, at t + 1 under Nesterov, and AdamW looks ahead
        with Muon: optax's ways.
      betas: AdamW's.
      eps: AdamW's.
      muon: which parameters get Muon.
    """

    scale: Callable[[int, int], float] = _original
    rows: Rows = _JORDAN
    norm: float = 1.0
    sums: bool = False
    nesterov: bool = True
    corrected: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    muon: Callable[[str, Shape], bool] = is_hidden_matrix


_MOONLIGHT = Conventions(_match_rms_adamw, sums=True, betas=(0.9, 0.95))
CONVENTIONS = {
    "torch_muon": Conventions(),
    "keller_jordan": Conventions(betas=(0.9, 0.95), eps=1e-10),
    "moonlight": _MOONLIGHT,
    "llama_factory": _MOONLIGHT,
    "xtuner": dataclasses.replace(_MOONLIGHT, rows=_QUINTIC, muon=_is_xtuners),
    "areal": Conventions(lambda *s: 0.2 * _spectral(*s), betas=(0.9, 0.95), eps=1e-10),
    "megatron": Conventions(_spectral, _QUINTIC, nesterov=False),
    "transformer_engine": Conventions(_spectral, _QUINTIC),
    "dion": Conventions(
        lambda out, fan_in: math.sqrt(out / fan_in),
        _POLAR_EXPRESS,
        1.02,
        sums=True,
        nesterov=False,
        betas=(0.9, 0.95),
    ),
    "optax_muon": Conventions(corrected=True, muon=_is_matrix),
}


class Reference:
    """An optimizer of DTensors: elementwise work on shards, Newton-Schulz on whole matrices."""

    beta = 0.95

    def __init__(
        self,
        named: Iterable[tuple[str, torch.nn.Parameter]],
        conventions: Conventions,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        self.conventions = conventions
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.step_count = 0
        self.parameters = dict(named)
        self.momentum: dict[str, Any] = {n: torch.zeros_like(p) for n, p in self.parameters.items()}
        self.second = {
            n: torch.zeros_like(p) for n, p in self.parameters.items() if not self.gets_muon(n)
        }

    def gets_muon(self, name: str) -> bool:
        """Whether a parameter gets Muon rather than AdamW."""
        return self.conventions.muon(name, tuple(self.parameters[name].shape))

    @torch.no_grad()
    def step(self) -> None:
        """Takes one step on the parameters' gradients."""
        self.step_count += 1
        for name, p in self.parameters.items():
            own, grad = _own(p), _own(p.grad)
            direction = (
                self._muon(name, p, grad) if self.gets_muon(name) else self._adamw(name, grad)
            )
            own.mul_(1 - self.learning_rate * self.weight_decay)
            own.add_(direction, alpha=-self.learning_rate)

    def _muon(self, name: str, p: Any, grad: torch.Tensor) -> torch.Tensor:
        whole = _gathered(self._mix(grad, _own(self.momentum[name])), p)
        # An embedding looks a row up: its weight is [in, out], unlike a Linear's.
        out, fan_in = whole.shape[::-1] if "embed" in name else whole.shape
        direction = self.conventions.scale(out, fan_in) * self._orthogonalized(whole)
        if not isinstance(p, DTensor):
            return direction
        return _own(distribute_tensor(direction, p.device_mesh, p.placements, src_data_rank=None))

    def _mix(self, grad: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ways, beta, t = self.conventions, self.beta, self.step_count
        gain = 1.0 if ways.sums else 1 - beta
        buffer.mul_(beta).add_(grad, alpha=gain)
        if ways.corrected:
            ahead = beta * buffer / (1 - beta ** (t + 1))
            return ahead + (1 - beta) * grad / (1 - beta**t)
        return gain * grad + beta * buffer if ways.nesterov else buffer

    def _orthogonalized(self, x: torch.Tensor) -> torch.Tensor:
        x = x / (self.conventions.norm * x.norm())
        for a, b, c in self.conventions.rows:
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x

    def _adamw(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        (b1, b2), t = self.conventions.betas, self.step_count
        m, v = _own(self.momentum[name]), _own(self.second[name])
        m.mul_(b1).add_(grad, alpha=1 - b1)
        v.mul_(b2).add_(grad * grad, alpha=1 - b2)
        first = m / (1 - b1**t)
        if self.conventions.corrected:
            first = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * grad / (1 - b1**t)
        return first / ((v / (1 - b2**t)).sqrt() + self.conventions.eps)


def _own(x: Any) -> torch.Tensor:
    """This rank's shard, as a view: elementwise work on it does without DTensor's dispatch."""
    return x.to_local() if isinstance(x, DTensor) else x


def _gathered(own: torch.Tensor, like: Any) -> torch.Tensor:
    """The whole tensor of shards that are sharded as a parameter is."""
    if not isinstance(like, DTensor):
        return own
    whole = DTensor.from_local(
        own, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return whole.full_tensor()
