"""Who may ask, and how often: API keys compared in constant time, requests a minute per key or address."""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from forerun.server.errors import ApiError

MOST_CALLERS = 10_000  # whose last requests are remembered


@dataclass(slots=True)
class _Bucket:
    """Requests that a caller may still make now; it fills up steadily."""

    left: float
    at: float


class Gate:
    """Lets callers in by key and within their rate."""

    def __init__(
        self, keys: Sequence[str], per_minute: int | None, now: Callable[[], float] = monotonic
    ) -> None:
        self._keys, self._per_minute, self._now = [key.encode() for key in keys], per_minute, now
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def check(self, authorization: str | None, address: str) -> str:
        """The caller's name for limits and caches; raises what turns a caller away."""
        caller = f"key {self._index(authorization)}" if self._keys else f"address {address}"
        self._count(caller)
        return caller

    def _index(self, authorization: str | None) -> int:
        scheme, _, given = (authorization or "").partition(" ")
        key = given.strip().encode()
        # every key is compared, so that the time taken does not tell which one matched
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            said = "no API key was given" if not key else "this API key is not known here"
            message = f"{said}; send it as `Authorization: Bearer KEY`"
            raise ApiError(
                401, message, "authentication_error", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return matches.index(True)

    def _count(self, caller: str) -> None:
        if self._per_minute is None:
            return
        now, rate = self._now(), self._per_minute / 60.0
        bucket = self._buckets.pop(caller, _Bucket(float(self._per_minute), now))
        bucket.left = min(float(self._per_minute), bucket.left + (now - bucket.at) * rate)
        bucket.at = now
        self._buckets[caller] = bucket
        while len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        if bucket.left < 1.0:
            wait = max(1, round((1.0 - bucket.left) / rate))
            message = f"more than {self._per_minute} requests a minute; try again in {wait} s"
            raise ApiError(
                429,
                message,
                "rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(wait)},
            )
        bucket.left -= 1.0
