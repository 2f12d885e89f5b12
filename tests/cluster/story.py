"""Everything that `make cluster` tries, in order. It runs inside of the namespaces that `isolation` makes."""

from __future__ import annotations

import argparse
import asyncio
import compileall
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from command_line.checkout import ROOT
from demo.corpus import held_out_prompts
from k8s.helm.chart import merged, objects_of
from tests.cluster import pairs
from tests.cluster.api_server import rendered
from tests.cluster.container import FILES
from tests.cluster.installation import Installation, tails
from tests.cluster.kuberay.pods import CLUSTER as RAY_CLUSTER
from tests.cluster.network import CommandError, reachable
from tests.cluster.renewal import check_renewal
from tests.cluster.traffic import KINDS, Access, Tally, asking, checked
from tests.e2e.chaos.cgroups import Place as GroupPlace
from tests.k8s.pods import NAME
from tests.k8s.policy_rules import Party, can_reach

HOST: Final = "outrider.example.com"
GRPC_HOST: Final = "grpc.outrider.example.com"
VALUES: Final[dict[str, Any]] = {
    "gateway": {"enabled": True, "className": "cluster", "hostname": HOST, "grpcHostname": GRPC_HOST},
    "priorityClass": {"create": True},
    "coordinator": {"replicas": {"min": 2}},
}
RAY_VALUES: Final[dict[str, Any]] = {"coordinator": {"hosting": "ray"}, "tls": {"enabled": True}}
"""With certificates by cert-manager; otherwise the chart's own Job makes them."""
CHANGES: Final[dict[str, Any]] = {
    "target": {"maxNumSeqs": 24},
    "draft": {"maxNumSeqs": 24},
    "coordinator": {"settings": {"seed_requests": True}},
    "redis": {"maxMemory": "512mb"},
}
"""Values of the upgrade: every deployment gets new pods."""
PORTS: Final = (6379, 8000, 9000, 9100, 50051, 50052)
RAY_PORTS: Final = (*PORTS, 8080, 8265, 8404, 9190, 10001, 10002, 52365)
ROLLED_OUT_S: Final = 420.0
ANSWERED_S: Final = 120.0
DIAL_S: Final = 2.0
LONG_TOKENS: Final = 900
"""Tokens of the long streams, one of which runs at every moment: nearly all that the demo's models can take."""
LOG_LINES: Final = 12
PACKAGES: Final = ("outrider", "protos", "coordinator", "command_line", "draft_worker", "target_worker")


class Story:
    """One run. Prints lines with the seconds since its beginning."""

    def __init__(
        self, installation: Callable[..., Installation], group_place: GroupPlace | None, changes: Mapping[str, Any]
    ) -> None:
        """changes: values beside `VALUES`."""
        self._began_s = time.monotonic()
        self.values = merged(VALUES, changes)
        self._is_on_ray = self.values["coordinator"].get("hosting") == "ray"
        self.installation = installation(self.say, group_place)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_s:6.1f} s  {text}", flush=True)

    async def install(self) -> Access:
        """Renders and applies the chart, and waits until everything is available."""
        objects = await self._rendered(self.values, is_upgrade=False)
        self._test_pod = next(each for each in objects if each["kind"] == "Pod")
        objects = [each for each in objects if each["kind"] != "Pod"]
        if self._is_on_ray:
            # A start of Ray that takes 30 s fails, and two processors are too few for all starts at once.
            self.installation.release([each for each in objects if each["kind"] != "RayService"])
            await self.until_rolled_out()
        self.installation.release(objects)
        # KubeRay makes its service when the application runs.
        await self.until(
            lambda: ", ".join(self.installation.routes_without_service()), "services of all routes", ROLLED_OUT_S
        )
        await self.installation.gateway.start(self.installation.objects)
        await self.until_rolled_out()
        return Access(
            HOST,
            GRPC_HOST,
            self.installation.addresses["gateway"],
            self.installation.gateway.authority,
            self.installation.secrets["outrider-first-api-key"]["key"].decode(),
            "demo",
        )

    async def check_requests(self, access: Access) -> None:
        found = await checked(access)
        self.say(f"through the gateway: {found}")
        assert found["http_status"] == 200, found
        assert found["num_http_events"] > 1, "the completion was not streamed"
        assert found["http_text"] == found["grpc_text"] == found["http_text_without_speculation"] != "", found
        assert (found["http_without_key"], found["grpc_without_key"]) == (401, "UNAUTHENTICATED"), found
        assert found["metrics_from_outside"] == 404, found

    async def check_policies(self) -> None:
        """Dials every pod and the gateway from every pod and outsider; each connection has to be as policies say."""
        pods = {pod.identity.name: pod for pod in self.installation.pods}
        outsiders = self.installation.outsiders
        parties = {name: Party(pod.identity.labels) for name, pod in pods.items()} | outsiders
        namespaces = {name: pod.identity.name for name, pod in pods.items()} | {name: name for name in outsiders}
        ports = RAY_PORTS if self._is_on_ray else PORTS
        addresses = {name: pod.identity.address for name, pod in pods.items()} | self.installation.addresses
        hops = [*((name, port) for name in pods for port in ports), ("gateway", 443)]

        async def dial(source: str) -> list[bool]:
            return await reachable(namespaces[source], [(addresses[name], port) for name, port in hops], DIAL_S)

        wrong, opened = [], []
        for source, found in zip(parties, await asyncio.gather(*map(dial, parties)), strict=True):
            for (name, port), is_open in zip(hops, found, strict=True):
                if name != source:  # whose own address is on its loopback
                    opened.append(is_open)
                    if is_open is not can_reach(self.installation.policies, parties[source], parties[name], port):
                        wrong.append(f"{source} {'reaches' if is_open else 'cannot reach'} port {port} of {name}")
        self.say(f"policies: {sum(opened)} of {len(opened)} connections open, {len(opened) - sum(opened)} shut")
        assert not wrong, wrong
        assert 0 < sum(opened) < len(opened)

    async def run_helm_test(self) -> None:
        pod = await self.installation.run_pod(self._test_pod)
        await self.until(lambda: "" if pod.has_ended else f"{pod} runs", "the test pod has ended", ANSWERED_S)
        self.say(f"helm test: {pod.statuses}, {pod.log.read_text().strip()!r}")
        assert pod.statuses == [0], pod.log.read_text()

    async def upgrade(self, tally: Tally) -> None:
        """Changes values so that every deployment gets new pods. On Ray, Serve replaces the replicas in their pods."""
        before = {pod.identity.name for pod in self.installation.pods if RAY_CLUSTER not in pod.identity.labels}
        keys = dict(self.installation.secrets["outrider-redis"])
        await self.release(merged(self.values, CHANGES))
        assert self.installation.secrets["outrider-redis"] == keys, "the upgrade made new passwords"
        assert before.isdisjoint(pod.identity.name for pod in self.installation.pods), "a pod was not replaced"
        await tally.more(3, ANSWERED_S)

    async def release(self, values: dict[str, Any]) -> None:
        """Upgrades to these values, and waits until everything is rolled out."""
        objects = await self._rendered(values, is_upgrade=True)
        self.installation.release([each for each in objects if each["kind"] != "Pod"])
        await self.until_rolled_out()

    async def kill_each(self, tally: Tally) -> None:
        """Kills a pod of each kind at once; requests are answered again, and a draft worker costs none."""
        for name in self.installation.owners:
            num_failed, num_answers = len(tally.failures), tally.num_answers
            (pod, *_) = self.installation.of(name)
            self.say(f"{pod}: killed")
            pod.kill()
            await self.until(lambda pod=pod: "" if pod.num_restarts else "not yet", f"{pod} restarts", ANSWERED_S)  # type: ignore[misc]
            await self.until_rolled_out()
            await tally.more(3, ANSWERED_S)
            failed = tally.failures[num_failed:]
            self.say(f"{name}: {tally.num_answers - num_answers} answers meanwhile, {len(failed)} failed")
            for failure in failed[:3]:
                self.say(f"  {failure}")
            assert not failed or pod.identity.labels[NAME] not in ("draft", "redis"), failed

    async def until_rolled_out(self) -> None:
        await self.until(self.installation.what_is_missing, "everything is rolled out", ROLLED_OUT_S)

    async def until(self, missing: Callable[[], str], what: str, timeout_s: float) -> None:
        """Waits until nothing is missing. Raises CommandError, with the ends of all logs."""
        deadline = time.monotonic() + timeout_s
        while reason := missing():
            if time.monotonic() > deadline:
                raise CommandError(f"not within {timeout_s:g} s: {what}; {reason}")
            await asyncio.sleep(0.1)

    async def _rendered(self, values: dict[str, Any], *, is_upgrade: bool) -> list[dict[str, Any]]:
        return objects_of(await rendered(values, lambda: self.installation.store, is_upgrade=is_upgrade))


async def tell(given: argparse.Namespace, group_place: GroupPlace | None) -> None:
    """The whole story. Raises AssertionError, CommandError, or a group of these."""
    for name in PACKAGES:  # as the images' builds do
        compileall.compile_dir(ROOT / name, quiet=2)
    story = Story(Installation, group_place, pairs.VALUES if given.pairs else RAY_VALUES if given.ray else {})
    async with story.installation:
        if given.pairs:
            pairs.put_models(story.installation.add_claim(pairs.CLAIM))
        access = await story.install()
        story.say("everything is available")
        await story.check_requests(access)
        await story.check_policies()
        if not given.ray and not given.pairs:
            await check_renewal(story)
            await story.check_requests(access)
        if not given.short:
            prompts = [(prompt, 60 if number else LONG_TOKENS) for number, prompt in enumerate(held_out_prompts(6))]
            async with asking(access, prompts, given.clients) as tally:
                await tally.more(3, ANSWERED_S)
                if given.pairs:
                    await pairs.come_and_go(story, access, tally)
                else:
                    await story.run_helm_test()
                    await _timed(story, "upgrade", tally, story.upgrade)
                assert not tally.failures, tally.failures[:20]
                if not given.pairs:
                    await _timed(story, "kills", tally, story.kill_each)
            counted = ", ".join(f"{tally.num_right[kind]} by {kind}" for kind in KINDS)
            story.say(f"{tally.num_answers} answers ({counted} right), {len(tally.failures)} failed")
        await story.installation.delete_all()
        story.say("everything has ended")


async def _timed(story: Story, name: str, tally: Tally, work: Callable[[Tally], Awaitable[None]]) -> None:
    num_answers, num_failed, began_s = tally.num_answers, len(tally.failures), time.monotonic()
    await work(tally)
    answers = f"{tally.num_answers - num_answers} answers meanwhile, {len(tally.failures) - num_failed} failed"
    story.say(f"{name}: {time.monotonic() - began_s:.0f} s, {answers}")


def main(given: argparse.Namespace, group_place: GroupPlace | None) -> int:
    """Runs the story; returns the exit status."""
    FILES.mkdir()
    (FILES / "logs").mkdir()
    try:
        asyncio.run(tell(given, group_place))
    except BaseExceptionGroup as group:
        _fail(group)
        return 1
    except (AssertionError, CommandError) as error:
        _fail(error)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if given.logs is not None:
            shutil.copytree(FILES / "logs", given.logs, dirs_exist_ok=True)
    return 0


def _fail(error: BaseException) -> None:
    print(tails(LOG_LINES), file=sys.stderr)
    errors = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
    for each in errors:
        print(f"cluster: {type(each).__name__}: {each}", file=sys.stderr)


if __name__ == "__main__":
    from tests.cluster.isolation import parser, place_of

    arguments = parser().parse_args()
    sys.exit(main(arguments, place_of(arguments)))
