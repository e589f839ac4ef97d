"""What a control plane keeps when it is started again: its root's key and certificate, and the key of its tokens.

istiod has the first two in the secret ``istio-ca-secret`` (istio/istio: security/pkg/pki/ca/ca.go), the API server the
last; the lab has a file below /run that only root may read.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from lab.discovery.ca import CertificateAuthority, new_root_key
from lab.discovery.tokens import TokenIssuer
from lab.errors import InputError

_PEM = serialization.Encoding.PEM
_END = b"-----END "


@dataclass(frozen=True, slots=True)
class Keys:
    """Everything that signs."""

    root_key: rsa.RSAPrivateKey
    token_key: ec.EllipticCurvePrivateKey
    root: x509.Certificate | None = None  # None: it is still to be made

    def authority(self, trust_domain: str) -> CertificateAuthority:
        return CertificateAuthority(trust_domain, self.root_key, self.root)

    def issuer(self) -> TokenIssuer:
        return TokenIssuer(self.token_key)


def fresh() -> Keys:
    """New keys; takes a tenth of a second, without the interpreter lock."""
    return Keys(new_root_key(), ec.generate_private_key(ec.SECP256R1()))


def load(path: str) -> Keys:
    """The keys of a file, or new ones if there is none, or no path. Raises InputError if it cannot be read."""
    if not path:
        return fresh()
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return fresh()
    except OSError as e:
        raise InputError("the control plane's keys cannot be read", path, str(e.strerror)) from None
    try:
        root_key, certificate, token_key = _parts(data)
        found = serialization.load_pem_private_key(root_key, None)
        token = serialization.load_pem_private_key(token_key, None)
        root = x509.load_pem_x509_certificate(certificate)
    except ValueError as e:
        raise InputError("the control plane's keys cannot be read", path, str(e), "Remove the file") from None
    if not isinstance(found, rsa.RSAPrivateKey) or not isinstance(token, ec.EllipticCurvePrivateKey):
        raise InputError("the control plane's keys cannot be read", path, "they are of other kinds", "Remove the file")
    return Keys(found, token, root)


def save(path: str, keys: Keys, authority: CertificateAuthority) -> None:
    """Writes them, for root alone, whole or not at all."""
    private = [
        key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        for key in (keys.root_key, keys.token_key)
    ]
    descriptor, temporary = tempfile.mkstemp(dir=Path(path).parent, prefix=".keys-")  # mode 0600
    with os.fdopen(descriptor, "wb") as file:
        file.write(private[0] + authority.root_pem.encode() + private[1])
    os.replace(temporary, path)


def _parts(data: bytes) -> list[bytes]:
    """The blocks of a PEM file; ValueError if they are not three."""
    parts, block = [], b""
    for line in data.splitlines(keepends=True):
        block += line
        if line.startswith(_END):
            parts.append(block)
            block = b""
    if len(parts) != 3:
        raise ValueError(f"{len(parts)} PEM blocks instead of 3")
    return parts
