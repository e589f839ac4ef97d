"""TLS contexts of the echo app: a self-signed certificate made at start, or files."""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from collections.abc import Iterable, Sequence

from lab.apps.ports import EchoConfig
from lab.apps.report import TLSObject
from lab.errors import InputError


def self_signed(hosts: Iterable[str]) -> bytes:
    """PEM of a fresh P-256 key and its certificate, valid a day before and ten years after now.

    Each host is a DNS name (a leading ``*.`` allowed) or an IP address and becomes a subject alternative name.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    names = list(dict.fromkeys(hosts)) or ["localhost"]
    key = ec.generate_private_key(ec.SECP256R1())
    # A common name has at most 64 characters; clients read the alternative names anyway.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([_general_name(n) for n in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


def _general_name(host: str):  # type: ignore[no-untyped-def]
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def server_context(config: EchoConfig, pem: bytes, alpn: Sequence[str] = ()) -> ssl.SSLContext:
    """The context of a TLS port; its connections are ``TLSObject``, so that the asked name is known.

    Args:
        config: names the certificate, key and client CA files, if any.
        pem: key and certificate, used without files.
        alpn: protocols that the port speaks, best first.

    Raises:
        InputError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = TLSObject
    context.sni_callback = _remember_name
    if alpn:
        context.set_alpn_protocols(list(alpn))
    try:
        if config.certificate:
            context.load_cert_chain(config.certificate, config.key or None)
        else:
            _load(context, pem)
        if config.client_ca:
            context.load_verify_locations(config.client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL
    except (OSError, ssl.SSLError) as e:
        where = ", ".join(f for f in (config.certificate, config.key, config.client_ca) if f)
        raise InputError("cannot use the TLS files", where, str(e)) from e
    return context


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    # The ssl module reads files only; memory needs no writable directory.
    fd = os.memfd_create("echo-certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _remember_name(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _context: ssl.SSLContext) -> None:
    if isinstance(connection, TLSObject):
        connection.sni = name
