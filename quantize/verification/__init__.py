"""`quantize verify`: whether a checkpoint is whole, and what each reader does with it if not."""

from __future__ import annotations

from .examine import VerifyReport, verify

__all__ = ["VerifyReport", "verify"]
