"""Keys and certificate signing requests of a workload.

Source: istio/istio: security/pkg/pki/util/generate_csr.go, security/pkg/pki/util/san.go.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.errors import AgentError

MINIMUM_RSA_BITS = 2048


@dataclass(frozen=True)
class KeyOptions:
    """What kind of key to make.

    Args:
        rsa_bits: at least 2048.
        ecdsa: an elliptic-curve key instead.
        curve: ``P256`` or ``P384``.
        pkcs8: PKCS#8 instead of the key type's own PEM form.
    """

    rsa_bits: int = 2048
    ecdsa: bool = False
    curve: str = "P256"
    pkcs8: bool = False

    def __post_init__(self) -> None:
        if not self.ecdsa and self.rsa_bits < MINIMUM_RSA_BITS:
            raise AgentError(
                f"requested key size {self.rsa_bits} is smaller than the minimum of {MINIMUM_RSA_BITS} bits"
            )


def spiffe_id(trust_domain: str, namespace: str, service_account: str) -> str:
    """``spiffe://TRUST_DOMAIN/ns/NAMESPACE/sa/ACCOUNT``."""
    return f"spiffe://{trust_domain}/ns/{namespace}/sa/{service_account}"


def generate_csr(identity: str, options: KeyOptions) -> tuple[bytes, bytes]:
    """A fresh key and a request for `identity` signed with it, both PEM.

    The subject has one empty organization; the URI of the identity is the only, critical, alternative name.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.x509.oid import NameOID

    key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
    if options.ecdsa:
        key = ec.generate_private_key(ec.SECP384R1() if options.curve == "P384" else ec.SECP256R1())
    else:
        key = rsa.generate_private_key(public_exponent=65537, key_size=options.rsa_bits)
    # cryptography refuses an empty name component unless told not to look.
    organization = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "", _validate=False)
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([organization]))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)]), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8 if options.pkcs8 else serialization.PrivateFormat.TraditionalOpenSSL
    pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return pem, request.public_bytes(serialization.Encoding.PEM)
