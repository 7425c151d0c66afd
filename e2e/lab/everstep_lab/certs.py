"""A lab's keys and certificates, created at each `up`: a CA and the certificates that it signs."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID = datetime.timedelta(days=30)
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


class Authority:
    """A CA that writes certificates to one folder. Its own certificate is `ca.crt` there."""

    def __init__(self, folder: Path, now: datetime.datetime) -> None:
        self._folder, self._now = folder, now
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("everstep-lab-ca")
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = folder / "ca.crt"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, stem: str, common_name: str, hosts: Sequence[str] = ()) -> tuple[Path, Path]:
        """Write `<stem>.crt` and `<stem>.key` for a server if it has `hosts`, else for a client."""
        key = ec.generate_private_key(ec.SECP256R1())
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = (
            self._builder(_name(common_name), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        )
        if hosts:
            names = [_general_name(host) for host in hosts]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        crt, secret = self._folder / f"{stem}.crt", self._folder / f"{stem}.key"
        crt.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(secret, key)
        return crt, secret

    def _builder(
        self, subject: x509.Name, public: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        # Valid from one hour earlier, because the clock may be set back between two processes.
        begins = self._now - datetime.timedelta(hours=1)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(self._now + _VALID)
        )


def write_signing_key(path: Path) -> None:
    """Write the RSA key with which the API server signs ServiceAccount tokens."""
    _write_key(path, rsa.generate_private_key(public_exponent=65537, key_size=2048))


def _write_key(path: Path, key: Key) -> None:
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=not sign,
        data_encipherment=False, key_agreement=False, key_cert_sign=sign, crl_sign=sign,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
