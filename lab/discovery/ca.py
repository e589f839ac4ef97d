"""The mesh's certificate authority: a self-signed root that signs workload certificates.

Sources: istio/istio: security/pkg/pki/ca/ca.go, security/pkg/server/ca/server.go. The SANs of a leaf are the caller's
identities, whatever its CSR asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ROOT_LIFETIME = timedelta(days=3650)
DEFAULT_LIFETIME = timedelta(hours=24)
MAX_LIFETIME = timedelta(days=90)
CLOCK_SKEW = timedelta(minutes=2)


class CAError(ValueError):
    """A certificate request that is not signed; the text goes to the caller."""


_PEM = serialization.Encoding.PEM


def new_root_key() -> rsa.RSAPrivateKey:
    """A root's key, as istiod's self-signed CA has it. Takes a tenth of a second, without the interpreter lock."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


class CertificateAuthority:
    """A root key and certificate in memory. ``root_pem`` is what peers are to trust."""

    def __init__(
        self,
        trust_domain: str = "cluster.local",
        key: rsa.RSAPrivateKey | None = None,
        root: x509.Certificate | None = None,
    ) -> None:
        """With the ``root`` certificate of an earlier time, which must be of ``key``, or with a new one."""
        self.trust_domain = trust_domain
        self._key = key or new_root_key()
        self._root = root or self._self_signed()
        self.root_pem = self._root.public_bytes(_PEM).decode()

    def _self_signed(self) -> x509.Certificate:
        name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, self.trust_domain)])
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + ROOT_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def sign(self, csr_pem: str, identities: Sequence[str], seconds: int = 0) -> list[str]:
        """[leaf, root] in PEM for a CSR; ``identities`` become its URI SANs.

        ``seconds`` <= 0 gives 24 h; more than 90 days is refused. Raises CAError.
        """
        if not identities:
            raise CAError("no identity: the caller is not authenticated")
        lifetime = timedelta(seconds=seconds) if seconds > 0 else DEFAULT_LIFETIME
        if lifetime > MAX_LIFETIME:
            raise CAError(f"requested TTL {lifetime} is greater than the maximum {MAX_LIFETIME}")
        try:
            csr = x509.load_pem_x509_csr(csr_pem.encode())
            valid = csr.is_signature_valid
        except (ValueError, InvalidSignature, UnsupportedAlgorithm) as e:
            raise CAError(f"cannot read the CSR: {e}") from None
        if not valid:
            raise CAError("the CSR's signature does not match its key")
        return [self._leaf(csr.public_key(), identities, lifetime), self.root_pem]

    def _leaf(self, public_key: object, identities: Sequence[str], lifetime: timedelta, dns: Sequence[str] = ()) -> str:
        if not isinstance(public_key, rsa.RSAPublicKey | ec.EllipticCurvePublicKey):
            raise CAError("only RSA and ECDSA keys are signed")
        now = datetime.now(UTC)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(i) for i in identities]
        names += [x509.DNSName(d) for d in dns]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._root.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(min(now + lifetime, self._root.not_valid_after_utc))
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(_PEM).decode()

    def issue_server(self, dns: Sequence[str], identity: str = "") -> tuple[str, str]:
        """(key PEM, chain PEM) of a server certificate for DNS names, e.g. the control plane's own."""
        key = ec.generate_private_key(ec.SECP256R1())
        leaf = self._leaf(key.public_key(), [identity] if identity else [], MAX_LIFETIME, dns)
        key_pem = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()
        return key_pem, leaf + self.root_pem


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_encipherment=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def spiffe_id(trust_domain: str, namespace: str, account: str) -> str:
    return f"spiffe://{trust_domain}/ns/{namespace}/sa/{account}"


def parse_spiffe_id(identity: str) -> tuple[str, str, str] | None:
    """(trust domain, namespace, service account) of ``spiffe://TD/ns/NS/sa/SA``, None if it is something else."""
    parts = identity.removeprefix("spiffe://").split("/")
    if not identity.startswith("spiffe://") or len(parts) != 5 or parts[1] != "ns" or parts[3] != "sa":
        return None
    return parts[0], parts[2], parts[4]
