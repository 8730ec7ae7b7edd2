"""API keys: which clients may send requests, in which lane, and at which rates.

Only digests of keys are kept, and comparing takes the same time however near a guess is. What a client sends is hashed
with a secret of this process (BLAKE2b with a key) and the digest looked up in a table. The lookup may end early, at a
digest that differs in its first byte say; but a client that could measure this would learn about a digest that it can
neither compute nor choose, as the secret never leaves the process, and nothing about the key. It costs the same for one
key and for ten thousand, which comparing all of them in constant time would not.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, TypeAlias

from starlette.types import Scope

from bei.config.settings import ServeConfig
from bei.errors import ConfigError, ForbiddenError, RateLimitedError, UnauthorizedError, UnknownApiKeyError
from bei.server.auth.priority import Urgency
from bei.server.auth.rate_limit import Bucket
from bei.server.scope import SCOPE_API_KEY
from bei.utils.threads import off_loop

if TYPE_CHECKING:
    from bei.server.auth.key_file import KeySpec

log = logging.getLogger(__name__)

# Headers that carry a key: the first is sent by OpenAI's, Baseten's and TEI's clients, the second by gateways, the
# third by Azure's clients.
_AUTHORIZATION = b"authorization"
_HEADERS = frozenset((_AUTHORIZATION, b"x-api-key", b"api-key"))
_SCHEMES = (b"bearer", b"api-key")

# Most key names that become labels of metrics, from the start and over all reloads. Requests with other names are
# counted under ``_OTHERS``.
_MOST_LABELS = 100
_OTHERS = "others"

_SHORT = 16  # characters; the log warns of shorter keys, which can be guessed


# Makes a bucket from the name of a key, the thing that it counts ("requests" or "tokens"), and the rate a second.
NewBucket: TypeAlias = Callable[[str, str, float], Bucket]


def own_bucket(name: str, what: str, rate: float) -> Bucket:
    """Of this process alone."""
    return Bucket(rate)


def flow_of(name: str) -> int:
    """The number of a flow that has a name, the same in all processes, and none of a connection over HTTP."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


class Key:
    """The rights of the requests that carry an API key of this name: a lane, and rates of requests and tokens.

    ``label``: the name in metrics. ``flow``: a number made of the name, the same in all processes. Not thread-safe:
    used on the event loop.
    """

    def __init__(self, spec: KeySpec, label: str, new_bucket: NewBucket = own_bucket) -> None:
        self.name = spec.name
        self.label = label
        self.flow = flow_of(spec.name)
        self._lane = spec.lane
        self._may_raise_lane = spec.may_raise_lane
        requests, tokens = spec.requests_per_second, spec.tokens_per_second
        self._requests = None if requests is None else new_bucket(spec.name, "requests", requests)
        self._tokens = None if tokens is None else new_bucket(spec.name, "tokens", tokens)

    def urgency(self, asked: Urgency) -> Urgency:
        """``asked``, with the key's lane if it names none. Raises ForbiddenError if the key may not use that lane."""
        if self._lane is None or asked.lane == self._lane:
            return asked
        if asked.lane is None:
            return asked._replace(lane=self._lane)
        if asked.lane == "interactive" and not self._may_raise_lane:
            raise ForbiddenError(
                f"The API key {self.name} is for the lane bulk alone: leave {asked.lane_param} out.", asked.lane_param
            )
        return asked

    def take_request(self) -> None:
        """Count one request. Raises RateLimitedError if the key's rate allows none now."""
        _take(self._requests, 1.0, self.name, "requests")

    def take_tokens(self, num_tokens: int) -> None:
        """Count ``num_tokens`` of inputs, as admission counts them. Raises RateLimitedError if none is allowed now."""
        _take(self._tokens, float(num_tokens), self.name, "tokens")

    def go_on_from(self, other: Key) -> None:
        """Take over the levels of ``other``, the key of this name before a reload: a reload refills no bucket."""
        for mine, its in ((self._requests, other._requests), (self._tokens, other._tokens)):
            if mine is not None and its is not None:
                mine.go_on_from(its)


def _take(bucket: Bucket | None, amount: float, name: str, what: str) -> None:
    if bucket is None:
        return
    wait_s = bucket.ask(amount)
    if wait_s > 0:
        message = f"The API key {name} may send {bucket.rate:g} {what} a second: retry in {max(wait_s, 0.001):.3f} s."
        raise RateLimitedError(message, wait_s)


class Keyring:
    """The API keys of a server. ``read`` reads them from their sources. Raises the ConfigError that ``read`` raises.

    ``new_bucket`` makes the buckets of the keys; with several front ends, buckets that these share.
    """

    def __init__(self, read: Callable[[], Seq[KeySpec]], new_bucket: NewBucket = own_bucket) -> None:
        self._read = read
        self._new_bucket = new_bucket
        self._secret = os.urandom(32)
        self._labels: set[str] = set()
        self._by_digest: dict[bytes, Key] = {}
        self._by_name: dict[str, Key] = {}
        self._install(read())

    def check(self, scope: Scope) -> None:
        """Find the key of a request, put it into the scope, and count the request against the key's rate.

        Raises UnauthorizedError, RateLimitedError.
        """
        key = self._key_of(scope["headers"])
        scope[SCOPE_API_KEY] = key
        key.take_request()

    def named(self, name: str) -> Key | None:
        """The key of this name, as it is now; None: there is none any more."""
        return self._by_name.get(name)

    def _key_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Key:
        """The key that the headers carry. One valid key is enough: proxies and clients may each add a header.

        Raises UnauthorizedError.
        """
        found: Key | None = None
        is_given = False
        for name, value in headers:
            if name in _HEADERS:
                is_given = True
                found = self._by_digest.get(self._digest(_sent(name, value)), found)
        if found is None:
            raise UnknownApiKeyError(_UNKNOWN) if is_given else UnauthorizedError(_MISSING)
        return found

    def _digest(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, key=self._secret, digest_size=32).digest()

    async def reload(self) -> None:
        """Read all keys again. If that fails, the old ones stay and the error is logged."""
        try:
            self._install(await off_loop(self._read))
        except ConfigError as error:
            log.error("the API keys stay as they were, the new ones cannot be read: %s", error)

    def _install(self, specs: Seq[KeySpec]) -> None:
        """Use the keys of ``specs`` from the next request on. Requests in progress keep their ``Key``."""
        before = self._by_name
        by_digest = {}
        for spec in specs:
            key = Key(spec, self._label(spec.name), self._new_bucket)
            if spec.name in before:
                key.go_on_from(before[spec.name])
            by_digest.update(dict.fromkeys((self._digest(secret.encode()) for secret in spec.secrets), key))
            if any(len(secret) < _SHORT for secret in spec.secrets):
                log.warning("the API key %s has fewer than %d characters and might be guessed", spec.name, _SHORT)
        self._by_digest = by_digest
        self._by_name = {key.name: key for key in by_digest.values()}
        log.info("API keys: %d of %d names", len(by_digest), len(specs))

    def _label(self, name: str) -> str:
        if name in self._labels or len(self._labels) < _MOST_LABELS:
            self._labels.add(name)
            return name
        return _OTHERS


def _sent(name: bytes, value: bytes) -> bytes:
    """The key in the header ``name``: the text after ``Bearer`` or ``Api-Key``, or the whole value."""
    value = value.strip()
    if name == _AUTHORIZATION:
        scheme, _, rest = value.partition(b" ")
        if rest and scheme.lower() in _SCHEMES:
            return rest.strip()
    return value


_MISSING = "This server asks for an API key: send it as the header 'Authorization: Bearer KEY'."
_UNKNOWN = "The API key is none of this server's: ask its operator for one, or check how yours is sent."


def keyring_of(config: ServeConfig, new_bucket: NewBucket = own_bucket) -> Keyring | None:
    """The keys that ``config`` names; None: it names none. Raises ConfigError."""
    if not config.asks_for_keys:
        return None
    from bei.server.auth.key_file import key_specs  # most servers have no use for YAML

    file, entries = config.api_keys_file, config.api_keys or ()
    return Keyring(lambda: key_specs(file, entries), new_bucket)
