"""Idempotency keys of creates: the same key gives the same kernel, however often and however soon it is sent again.

After https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/. A create that failed gives its key back.
"""

from collections.abc import Awaitable, Callable

import anyio

from gateway.errors import IdempotencyConflict


class _Create:
    def __init__(self, fingerprint: str | None) -> None:
        self.fingerprint = fingerprint
        self.kernel_id: str | None = None
        self.over = anyio.Event()


class Creates:
    """By key: the creates that are under way or have made a kernel."""

    def __init__(self) -> None:
        self._by_key: dict[str, _Create] = {}

    def remember(self, key: str | None, fingerprint: str | None, kernel_id: str) -> None:
        """A create of an earlier gateway."""
        if key is not None:
            self._by_key[key] = made = _Create(fingerprint)
            made.kernel_id = kernel_id
            made.over.set()

    def forget(self, key: str) -> None:
        """What is made under this key from now on is another."""
        self._by_key.pop(key, None)

    def keep_only(self, known: Callable[[str], bool]) -> None:
        """Forgets the keys whose kernels nobody knows any more."""
        for key, made in [*self._by_key.items()]:
            if made.kernel_id is not None and not known(made.kernel_id):
                del self._by_key[key]

    async def once(self, key: str, fingerprint: str | None, make: Callable[[], Awaitable[str]]) -> tuple[str, bool]:
        """The id of the kernel that `make` makes, or has made before under this key, and then True; raises `IdempotencyConflict`."""
        while found := self._by_key.get(key):
            if found.fingerprint != fingerprint:
                raise IdempotencyConflict(
                    "This Idempotency-Key was used for a create with another body. Use a new key for a new kernel."
                )
            await found.over.wait()
            if found.kernel_id is not None:
                return found.kernel_id, True
        self._by_key[key] = begun = _Create(fingerprint)
        try:
            begun.kernel_id = await make()
        finally:
            if begun.kernel_id is None:
                del self._by_key[key]
            begun.over.set()
        return begun.kernel_id, False
