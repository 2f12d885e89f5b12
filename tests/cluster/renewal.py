"""The chart's daily job renews a certificate that is past half of its days, and its process loads the new one."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cryptography import x509

from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role

if TYPE_CHECKING:
    from tests.cluster.story import Story

SECRET: Final = "outrider-target-tls"
RENEWED_S: Final = 60.0
LOOK_S: Final = 0.5
_PORT: Final = 50051


async def check_renewal(story: Story) -> None:
    """Raises AssertionError, CommandError."""
    installation = story.installation
    secrets = installation.store.secrets
    (target,) = installation.of("outrider-demo-target")
    before = {name: files for name, files in secrets.items() if name != SECRET}
    secrets[SECRET] = _older(secrets["outrider-ca"])
    await story.until(lambda: "" if target.is_ready else "not ready", "the target is ready", RENEWED_S)
    await _until_shown(target.identity.address, secrets)
    cron = next(each for each in installation.objects if each["kind"] == "CronJob")
    pod = await installation.create("", "renewal", cron["spec"]["jobTemplate"]["spec"]["template"], "")
    await story.until(lambda: "" if pod.has_ended else f"{pod} runs", "the job has ended", RENEWED_S)
    said = pod.log.read_text().strip()
    assert (pod.statuses, said) == ([0], "new certificates: target"), said
    assert {name: files for name, files in secrets.items() if name != SECRET} == before
    await _until_shown(target.identity.address, secrets)
    assert target.num_restarts == 0
    story.say("the target shows the certificate that the daily job has renewed")


def _older(authority: Mapping[str, bytes]) -> dict[str, bytes]:
    """A certificate of the target that has a third of its days left."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in authority.items():
            (folder / file).write_bytes(content)
        began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=20)
        own = folder / "target"
        CertificateAuthority.open(folder).issue(own, Role.TARGET, valid_for=datetime.timedelta(days=30), now=began)
        return {path.name: path.read_bytes() for path in own.iterdir()}


async def _until_shown(address: str, secrets: Mapping[str, Mapping[str, bytes]]) -> None:
    """Waits until the target shows new connections the certificate of its secret, and no other."""
    expected = x509.load_pem_x509_certificate(secrets[SECRET]["tls.crt"])
    async with asyncio.timeout(RENEWED_S):
        while await _shown(address, secrets["outrider-operator-tls"]) != expected:  # noqa: ASYNC110 - another process
            await asyncio.sleep(LOOK_S)


async def _shown(address: str, own: Mapping[str, bytes]) -> x509.Certificate:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=own["ca.crt"].decode())
    with tempfile.TemporaryDirectory() as name:
        for file in ("tls.crt", "tls.key"):
            Path(name, file).write_bytes(own[file])
        context.load_cert_chain(Path(name, "tls.crt"), Path(name, "tls.key"))
    _, writer = await asyncio.open_connection(address, _PORT, ssl=context, server_hostname=Role.TARGET.value)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(der)
    finally:
        writer.close()
