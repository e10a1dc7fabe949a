"""Keys that two ranks share and random bits that nobody can guess; the one home of the package ``cryptography``."""

from __future__ import annotations

import torch

from xffl.errors import RoundError
from xffl.extras import optional_import

__all__ = ["KEY_BYTES", "KeyPair", "Keystream", "derive_key"]

KEY_BYTES = 32
"""Bytes of every key: X25519, HMAC-SHA256 and AES-256 all take as many."""
NEED = ("privacy", "privacy and secure sums need cryptography")
"""The extra, and what is said where the package is missing."""


class Keystream:
    """Endless bits of AES-256 in counter mode (NIST SP 800-38A), the counter from 0.

    Who does not know the key cannot tell them from fair coins, nor the next from those before. Several GB/s on one core
    with the processor's AES instructions. Local; two streams of one key are equal.

    :param key: :data:`KEY_BYTES` bytes.
    """

    def __init__(self, key: bytes) -> None:
        with optional_import(*NEED):
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def fill(self, out: torch.Tensor) -> None:
        """Overwrite a tensor with the next bits.

        :param out: Flat int64 values in one run of CPU memory.
        """
        assert out.device.type == "cpu" and out.is_contiguous(), "the bits are written where the tensor lies"
        if out.numel():
            window = out.zero_().numpy().data.cast("B")
            self._encryptor.update_into(window, window)  # zeros become the keystream itself


class KeyPair:
    """An X25519 key pair (RFC 7748), fresh from the operating system's randomness.

    The private half stays in this object: it has no way out, and pickling or copying the object raises.
    """

    def __init__(self) -> None:
        with optional_import(*NEED):
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def agree_secret(self, peer: bytes, context: object) -> bytes:
        """Return the key that only the two holders of these pairs can compute; local, the same at both ends.

        HKDF-SHA256 (RFC 5869) of the X25519 secret, bound to both public keys and to ``context``.

        :param peer: The other's public key.
        :param context: What the key is for: numbers, texts and tuples of them, the same at both ends.
        :return: :data:`KEY_BYTES` bytes.
        :raises RoundError: if the other's public key is none.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(peer))
        except ValueError as error:
            raise RoundError(
                f"{peer.hex()!r} is no public key of X25519 ({error}); make the aggregator on all ranks anew"
            ) from error
        info = repr(("xffl pair", *sorted((self.public, peer)), context)).encode()
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(shared)

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a private key stays in the process that made it; make another pair instead of a copy")


def derive_key(secret: bytes, context: object) -> bytes:
    """Return a key for one purpose; local. Those of different contexts tell nothing about each other.

    :param secret: :data:`KEY_BYTES` bytes that were drawn or agreed.
    :param context: The purpose: numbers, texts and tuples of them, whose ``repr`` tells any two apart.
    :return: :data:`KEY_BYTES` bytes.
    """
    with optional_import(*NEED):
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
    return HKDFExpand(SHA256(), KEY_BYTES, info=repr(context).encode()).derive(secret)
