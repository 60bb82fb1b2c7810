"""Settings of who may reach a service: TLS and tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field

from legato.cluster.cli.service_forms import ReadFile
from legato.cluster.cli.setting_error import SettingError
from legato.cluster.cli.setting_forms import Switch
from legato.protos.tls_files import TlsFiles


class SecurityFlags(BaseModel):
    """Each is an option, a variable and a key of the file."""

    security_title: ClassVar[str] = "Access"

    tls_cert: Annotated[str | None, ReadFile()] = Field(
        None, description="The service's TLS certificate, PEM, with the chain behind it."
    )
    tls_key: Annotated[str | None, ReadFile()] = Field(
        None, description="Its key. Never leaves this machine."
    )
    tls_ca: Annotated[str | None, ReadFile()] = Field(
        None,
        description="Who signs the certificates that clients must show; routers and workers, too, "
        "speak TLS to each other then. `legato certs` makes a set.",
    )
    worker_tls_cert: Annotated[str | None, ReadFile()] = Field(
        None,
        description="The workers' certificate, at this path on their machines. Without it that of "
        "--tls-cert.",
    )
    worker_tls_key: Annotated[str | None, ReadFile()] = Field(None, description="Its key.")
    api_token_file: Annotated[str | None, ReadFile()] = Field(
        None,
        description="Clients must show one of the tokens in this file, one a line, alone or as "
        "`NAME ROLE: TOKEN`. It is read anew when it changes: add the new token, change the "
        "clients, take the old one out.",
    )
    allow_plain_token: Annotated[bool, Switch()] = Field(
        False, description="Take tokens from other machines without TLS, all the same."
    )

    def service_tls(self) -> TlsFiles | None:
        """Raises SettingError where one is given without the other."""
        return _files("tls", self.tls_cert, self.tls_key, self.tls_ca)

    def worker_tls(self) -> TlsFiles | None:
        """As `service_tls`."""
        return _files("worker_tls", self.worker_tls_cert, self.worker_tls_key, None)


def _files(prefix: str, cert: str | None, key: str | None, ca: str | None) -> TlsFiles | None:
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None:
        missing = "cert" if cert is None else "key"
        given = "cert" if cert is not None else "key" if key is not None else "ca"
        option = f"--{prefix.replace('_', '-')}"
        raise SettingError(
            f"{prefix}_{missing}", f"{option}-{missing} is missing where {option}-{given} is given"
        )
    return TlsFiles(cert, key, ca)
