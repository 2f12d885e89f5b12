"""Certificates that run out, in time for a new one and not, and an authority that changes while everything runs.

Certificates come into use by files that are replaced, as cert-manager does it, and no process is told. HAProxy in front
of Redis has no such habit and is started again each time, which costs its clients a connection to Redis.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coordinator.hosting.haproxy_launcher import LOOK_EVERY_S
from outrider.security.certificate_authority import CertificateAuthority
from tests.e2e.chaos.authorities import trust
from tests.e2e.chaos.certificates import OPERATOR, some_time_ago
from tests.e2e.chaos.costs import Costs
from tests.e2e.chaos.fault import Fault, WorkerFault
from tests.e2e.chaos.fleet import Worker
from tests.e2e.chaos.links import Link

SEEN_S: Final = 2 * LOOK_EVERY_S + 2.0
"""Time until every process has read files that were replaced, in two looks, and all that it opens shows them."""
COORDINATOR, REDIS = "coordinator", "redis"


class _CertificateFault(Fault):
    """A fault of the certificates of all processes, or of a process that exists only once."""

    part = "certificates"

    @property
    def names(self) -> list[str]:
        """Names of all processes that have a certificate, except Redis."""
        return [COORDINATOR, *self.fleet.workers]

    def issue(self, names: Sequence[str], seconds: float | None = None) -> None:
        """Issues new certificates, valid for this number of seconds, or for a usual time if none is given."""
        valid_for = {} if seconds is None else {"valid_for": datetime.timedelta(seconds=seconds)}
        for name in names:
            self.fleet.certificates.issue(name, **valid_for)


class CertificatesRenewed(_CertificateFault):
    """Certificates of all processes that are valid for seconds, replaced shortly before they run out."""

    name, costs = "certificates renewed in time", Costs.NOTHING

    async def run(self, worker: Worker | None) -> None:
        seconds = self.rng.uniform(15.0, 25.0)
        self.describe(f"{len(self.names) + 1} of {seconds:.0f} s")
        self.issue([*self.names, REDIS], seconds)
        await self.fleet.redis.show_certificate()
        try:
            await asyncio.sleep(seconds - SEEN_S)
        finally:
            self.issue([*self.names, REDIS])
            await self.fleet.redis.show_certificate()
        await asyncio.sleep(SEEN_S)


async def _let_run_out(fault: Fault, name: str, links: Sequence[Link], late_s: float) -> None:
    """A certificate that has run out for so long before there is another; who comes then is shown the old one."""
    valid_s = SEEN_S + fault.rng.uniform(0.0, 2.0)
    certificates = fault.fleet.certificates
    certificates.issue(name, datetime.timedelta(seconds=valid_s))
    try:
        if name == REDIS:
            await fault.fleet.redis.show_certificate()
        await asyncio.sleep(valid_s + 0.5)
        for link in links:
            link.cut()
        await asyncio.sleep(late_s)
    finally:
        certificates.issue(name)
        if name == REDIS:
            await fault.fleet.redis.show_certificate()


class _WorkerCertificateRunsOut(WorkerFault):
    """The certificate of a worker runs out and connections to it break; a new one comes late."""

    async def hit(self, worker: Worker) -> None:
        late_s = self.rng.uniform(2.0, 8.0)
        self.describe(worker.name, late_s)
        await _let_run_out(self, worker.name, [worker.link], late_s)


class TargetCertificateRunsOut(_WorkerCertificateRunsOut):
    """The certificate of a target runs out and its connections break; a new one comes late. Others serve meanwhile."""

    name, part = "target certificate runs out", "target"


class DraftCertificateRunsOut(_WorkerCertificateRunsOut):
    """The certificate of a draft worker runs out and connections to it break; a new one comes late."""

    name, part = "draft certificate runs out", "draft"


class RedisCertificateRunsOut(_CertificateFault):
    """The certificate of Redis runs out and its connections break; a new one is late. The last snapshot serves on."""

    name, part, costs = "Redis certificate runs out", "redis", Costs.NOTHING

    async def run(self, worker: Worker | None) -> None:
        late_s = self.rng.uniform(2.0, 12.0)
        self.describe("", late_s)
        await _let_run_out(self, REDIS, [self.fleet.redis.link], late_s)


class CoordinatorCertificateRunsOut(_CertificateFault):
    """The certificate that both coordinators show runs out; a new one comes late.

    The balancer takes no coordinator for well meanwhile, and tells clients so (503); streams that run go on.
    """

    name, costs = "coordinator certificate runs out", Costs.CONNECTIONS

    async def run(self, worker: Worker | None) -> None:
        late_s = self.rng.uniform(1.0, 6.0)
        self.describe("", late_s)
        await _let_run_out(self, COORDINATOR, [], late_s)
        await asyncio.sleep(SEEN_S)


class AuthorityChanges(_CertificateFault):
    """Another authority: trusted beside the old one, then all certificates are its own, then it is trusted alone.

    Clients see nothing. The balancer's public certificate stays as it is.
    """

    name, costs = "certificate authority changes", Costs.NOTHING

    async def run(self, worker: Worker | None) -> None:
        certificates = self.fleet.certificates
        new = CertificateAuthority.make(now=some_time_ago())
        old, public = certificates.authority.certificate, self.fleet.public_authority.certificate
        ours: Path = certificates.authority_path.parent
        self.describe(f"for {len(self._everybody)} certificates")

        certificates.trust([old, new.certificate])
        trust([ours], [public, old, new.certificate])
        await self._reload()
        certificates.authority = new
        for name in self._everybody:
            certificates.issue(name)
        await self._reload()
        certificates.trust([new.certificate])
        trust([ours], [public, new.certificate])
        await self._reload()

    @property
    def _everybody(self) -> list[str]:
        """Those who have joined in the meantime as well."""
        return [*self.names, REDIS, OPERATOR]

    async def _reload(self) -> None:
        """Until everybody goes by the files as they are now."""
        self.fleet.certificates.refresh_contexts()
        await self.fleet.redis.show_certificate()
        async with self.fleet.balancer_lock:
            await asyncio.to_thread(self.fleet.balancer.reload)
        await asyncio.sleep(SEEN_S)


FAULTS_OF_CERTIFICATES: Final[tuple[type[Fault], ...]] = (
    CertificatesRenewed, TargetCertificateRunsOut, DraftCertificateRunsOut, RedisCertificateRunsOut,
    CoordinatorCertificateRunsOut, AuthorityChanges,
)  # fmt: skip
