"""A private certificate authority and a server certificate of it, as files."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """Paths of PEM files: the authority's certificate, and the server's certificate and key."""

    authority: str
    certfile: str
    keyfile: str


def certificate(folder: Path, *hosts: str) -> Certificate:
    """Make an authority and a certificate of it for `hosts`, addresses or names, in an empty folder."""
    folder.mkdir(parents=True)
    made = Certificate(*(str(folder / name) for name in ("authority.pem", "server.pem", "server.key")))
    root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    root = _builder(root_name, root_name, root_key.public_key())
    root = root.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    server_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test server")])
    names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    server = _builder(server_name, root_name, key.public_key()).add_extension(names, critical=False)
    for path, signed in ((made.authority, root), (made.certfile, server)):
        pem = signed.sign(root_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        Path(path).write_bytes(pem)
    Path(made.keyfile).write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made


def _builder(subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public_key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=1))


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
