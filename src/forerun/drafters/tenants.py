"""Tenants: whose request a sequence is, so that what drafters learn from it never reaches another's."""

from __future__ import annotations

from forerun.types import Seq


def tenant_of(seq: Seq) -> str | None:
    """Requests of one salt may learn from each other; None = from no other and for no other."""
    return seq.cache_salt
