"""Where the keys, or the values, of one layer are kept: dense, or as packed codes.

A store takes [rows, kv_heads, n, head_dim] at some columns of some rows and gives back all columns
of those rows so far. What it gives is what kernels/kv_quant.py makes of the entries.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..kernels.kv_quant import KVCodes, KVFormat, dequantize_kv, quantize_kv
from .rope import Rope, RopeTable


class Store(Protocol):
    """rows: those that the next calls are about (None: all), and the column where each begins."""

    def place(self, row: int | None, start: int) -> None: ...

    def write(self, x: Tensor, begin: int, rope: Rope | None) -> None:
        """Put x [rows, heads, n, head_dim] at the columns from `begin` on. rope: of these tokens,
        for a store that keeps keys as before it."""
        ...

    def read(self, end: int) -> Tensor:
        """The columns up to `end`, from the first column of the rows in use on."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these (int64, ascending)."""
        ...

    @property
    def nbytes(self) -> int: ...


class _ByColumn:
    """What stores have in common whose tensors are [batch, heads, max_len, ...]."""

    def __init__(self, batch: int, max_len: int) -> None:
        self.batch, self.max_len = batch, max_len
        self.rows, self.start = slice(None), 0

    def place(self, row: int | None, start: int) -> None:
        self.rows = slice(None) if row is None else slice(row, row + 1)
        self.start = start

    def _zeros(self, like: Tensor) -> Tensor:
        """Room for entries that look like `like` [rows, heads, n, ...]. Zeros: a masked column must
        not hold NaN, which would survive a weight of zero."""
        return like.new_zeros(self.batch, like.shape[1], self.max_len, *like.shape[3:])


class DenseStore(_ByColumn):
    """In the model's dtype."""

    def __init__(self, batch: int, max_len: int) -> None:
        super().__init__(batch, max_len)
        self.entries: Tensor | None = None

    def write(self, x: Tensor, begin: int, rope: Rope | None) -> None:
        if self.entries is None:
            self.entries = self._zeros(x)
        self.entries[self.rows, :, begin : begin + x.shape[2]] = x

    def read(self, end: int) -> Tensor:
        assert self.entries is not None
        return self.entries[self.rows, :, self.start : end]

    def keep(self, rows: Tensor) -> None:
        self.batch = rows.numel()
        if self.entries is not None:
            self.entries = self.entries.index_select(0, rows)

    @property
    def nbytes(self) -> int:
        return 0 if self.entries is None else self.entries.nbytes


class TokenStore(_ByColumn):
    """Codes with scales for each token, or under a scale that is given (static)."""

    def __init__(
        self, batch: int, max_len: int, fmt: KVFormat, static_scale: Tensor | None
    ) -> None:
        super().__init__(batch, max_len)
        self.fmt, self.static_scale = fmt, static_scale
        self.entries: KVCodes | None = None

    def write(self, x: Tensor, begin: int, rope: Rope | None) -> None:
        self.head_dim, self.dtype = x.shape[3], x.dtype
        new = quantize_kv(x, self.fmt, self.static_scale)
        if self.entries is None:
            self.entries = new.each(self._zeros)
        for stored, part in zip(self.entries, new, strict=True):
            if stored is not None and part is not None:
                stored[self.rows, :, begin : begin + x.shape[2]] = part

    def read(self, end: int) -> Tensor:
        assert self.entries is not None
        entries = self.entries.each(lambda part: part[self.rows, :, self.start : end])
        return dequantize_kv(entries, self.fmt, self.head_dim, self.dtype, self.static_scale)

    def keep(self, rows: Tensor) -> None:
        self.batch = rows.numel()
        if self.entries is not None:
            self.entries = self.entries.each(lambda part: part.index_select(0, rows))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.entries or () if part is not None)


class TokenGroupStore:
    """Codes with a scale for each channel over a group of tokens.

    Groups begin at a row's first token, wherever its column is, so that a row's codes are the same
    in any batch. The tokens of a row's last group stay dense until it is full. table: for keys that
    are kept as before their rotary embedding.
    """

    def __init__(self, batch: int, fmt: KVFormat, table: RopeTable | None) -> None:
        self.fmt, self.table = fmt, table
        self._rows = [_RowOfGroups(fmt) for _ in range(batch)]
        self._starts = [0] * batch
        self._row: int | None = None

    def place(self, row: int | None, start: int) -> None:
        self._row = row
        if row is not None:
            self._starts[row] = start
            self._rows[row] = _RowOfGroups(self.fmt)

    def write(self, x: Tensor, begin: int, rope: Rope | None) -> None:
        rows = self._in_use()
        if self.table is not None and rope is not None:
            self.table.add(rope, [begin - self._starts[row] for row in rows])
            x = rope.turn_back(x).to(x.dtype)
        for new, row in zip(x.split(1), rows, strict=True):
            self._rows[row].append(new)

    def read(self, end: int) -> Tensor:
        rows = self._in_use()
        if len(rows) == 1:
            return self._read_row(rows[0])
        read = [self._read_row(row) for row in rows]
        out = read[0].new_zeros(len(rows), read[0].shape[1], end, read[0].shape[3])
        for i, (row, entries) in enumerate(zip(rows, read, strict=True)):
            out[i, :, self._starts[row] : end] = entries[0]
        return out

    def keep(self, rows: Tensor) -> None:
        kept = rows.tolist()
        self._rows = [self._rows[i] for i in kept]
        self._starts = [self._starts[i] for i in kept]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self._rows)

    def _in_use(self) -> list[int]:
        return list(range(len(self._rows))) if self._row is None else [self._row]

    def _read_row(self, row: int) -> Tensor:
        entries = self._rows[row].read()
        if self.table is None:
            return entries
        return self.table.first(entries.shape[2]).turn(entries).to(entries.dtype)


class _RowOfGroups:
    """One row's whole groups as codes and its newest tokens, fewer than a group, as they came."""

    def __init__(self, fmt: KVFormat) -> None:
        self.fmt = fmt
        self.codes: KVCodes | None = None
        self.newest: Tensor | None = None

    def append(self, x: Tensor) -> None:
        """x [1, heads, n, head_dim]."""
        x = x if self.newest is None else torch.cat([self.newest, x], dim=2)
        whole = x.shape[2] - x.shape[2] % self.fmt.group
        self.newest = x[:, :, whole:].clone()
        if whole:
            new = quantize_kv(x[:, :, :whole], self.fmt)
            self.codes = new if self.codes is None else self.codes.then(new)

    def read(self) -> Tensor:
        """[1, heads, all tokens so far, head_dim]."""
        assert self.newest is not None
        if self.codes is None:
            return self.newest
        head_dim, dtype = self.newest.shape[3], self.newest.dtype
        whole = dequantize_kv(self.codes, self.fmt, head_dim, dtype)
        return torch.cat([whole, self.newest], dim=2)

    @property
    def nbytes(self) -> int:
        parts = [self.newest, *(self.codes or ())]
        return sum(part.nbytes for part in parts if part is not None)
