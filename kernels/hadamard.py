"""Orthogonal matrices that spread every coordinate over all others, applied as Kronecker factors.

A Hadamard matrix H of order n has entries +-1 and H H^T = n I, so each row of H / sqrt(n) has the
same weight 1 / sqrt(n) everywhere: no other orthogonal matrix flattens a single large coordinate
further. Orders that are powers of two come from Sylvester's doubling, others from Paley's
constructions over a prime field (Paley, "On orthogonal matrices", 1933):

    q = 3 mod 4:  H = I + [[0, 1], [-1, J]]                          order q + 1
    q = 1 mod 4:  H = C x [[1, 1], [1, -1]] + I x [[1, -1], [-1, -1]]  order 2 (q + 1)

with J[a, b] = chi(a - b), chi the quadratic character mod q, C = [[0, 1], [1, J]]. A Kronecker
product of Hadamard matrices is one, so 576 = 36 x 16 and 4096 = 64 x 64 cost n (36 + 16) and
n (64 + 64) multiplications a vector instead of n^2, and rounding stays that of a few sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_FACTOR = 64  # the largest Sylvester factor: a matrix product of this size is still efficient


@dataclass(frozen=True)
class Rotation:
    """Q = diag(signs) (F1 x F2 x ...), orthogonal [n, n].

    signs: float64 [n], +-1. factors: float64 square orthogonal matrices whose sizes multiply to n.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        return len(self.signs)

    def apply(self, x: Tensor) -> Tensor:
        """x Q over the last dimension of x [..., n], in x's dtype and on its device; a new tensor.

        A row vector x of coordinates in the old basis becomes its coordinates in the new one.
        """
        y = x * self.signs.to(x)
        inner = self.size
        for factor in self.factors:
            inner //= len(factor)
            if inner == 1:
                y = y.reshape(-1, len(factor)) @ factor.to(x)
            else:
                y = factor.T.to(x) @ y.reshape(-1, len(factor), inner)
        return y.reshape(x.shape)

    def matrix(self) -> Tensor:
        """Q, float64 [n, n]."""
        return self.apply(torch.eye(self.size, dtype=torch.float64))

    def __str__(self) -> str:
        """What it is made of: "Hadamard 36 x 16"."""
        parts: dict[str, list[str]] = {}
        for factor in self.factors:
            kind = "Hadamard" if _is_flat(factor) else "random"
            parts.setdefault(kind, []).append(str(len(factor)))
        return ", ".join(f"{kind} {' x '.join(sizes)}" for kind, sizes in parts.items())


def hadamard_rotation(n: int, seed: int) -> Rotation:
    """A Hadamard matrix of order n with the signs of its rows drawn by `seed`.

    Where no construction gives that order, the odd part of n is a random orthogonal factor.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (n,), generator=generator).double() * 2 - 1
    base = hadamard_base(n)
    if base is None:
        base = n // (n & -n)
        factors = [_random_orthogonal(base, generator)]
    else:
        factors = [] if base == 1 else [paley(base).double() / base**0.5]
    left = n // base
    while left > 1:
        size = min(left, MAX_FACTOR)
        factors.append(sylvester(size).double() / size**0.5)
        left //= size
    return Rotation(signs, tuple(factors))


def random_rotation(n: int, seed: int) -> Rotation:
    """An orthogonal matrix [n, n] drawn uniformly (Haar measure)."""
    generator = torch.Generator().manual_seed(seed)
    return Rotation(torch.ones(n, dtype=torch.float64), (_random_orthogonal(n, generator),))


def hadamard_base(n: int) -> int | None:
    """The smallest order b that Paley's constructions give (1: none needed) with n / b a power of
    two; None where there is none."""
    if n & (n - 1) == 0:
        return 1
    b = 4 * (n // (n & -n))
    while n % b == 0:
        if _is_prime(b - 1) or _paley_second(b):
            return b
        b *= 2
    return None


def sylvester(n: int) -> Tensor:
    """The Hadamard matrix of order n, a power of two; int8 [n, n]."""
    assert n > 0 and n & (n - 1) == 0, n
    h = torch.ones(1, 1, dtype=torch.int8)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def paley(n: int) -> Tensor:
    """A Hadamard matrix of order n = q + 1 or 2 (q + 1), q a fitting prime; int8 [n, n]."""
    if _is_prime(n - 1) and (n - 1) % 4 == 3:
        core = _bordered(n - 1, -1)
        return core + torch.eye(n, dtype=torch.int8)
    assert _paley_second(n), n
    core = _bordered(n // 2 - 1, 1)
    plus = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    minus = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    return torch.kron(core, plus) + torch.kron(torch.eye(n // 2, dtype=torch.int8), minus)


def _bordered(q: int, left: int) -> Tensor:
    """[[0, 1], [left, J]] over the prime field of q elements, int8 [q + 1, q + 1]."""
    chi = torch.full((q,), -1, dtype=torch.int8)
    chi[[a * a % q for a in range(1, q)]] = 1
    chi[0] = 0
    index = torch.arange(q)
    core = torch.ones(q + 1, q + 1, dtype=torch.int8)
    core[1:, 1:] = chi[(index[:, None] - index) % q]
    core[1:, 0] = left
    core[0, 0] = 0
    return core


def _paley_second(n: int) -> bool:
    q = n // 2 - 1
    return n % 4 == 0 and q % 4 == 1 and _is_prime(q)


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % d for d in range(2, int(q**0.5) + 1))


def _random_orthogonal(n: int, generator: torch.Generator) -> Tensor:
    """Q of a Gaussian matrix's QR with the signs that make it uniform, float64 [n, n]."""
    q, r = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


def _is_flat(factor: Tensor) -> bool:
    return bool(((factor.abs() - len(factor) ** -0.5).abs() < 1e-9).all())
