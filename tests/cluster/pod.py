"""A kubelet's part: one pod from its start to its end, with its volumes, probes, restarts and its graceful end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.cluster.container import FILES, Container, Place
from tests.cluster.images import image_of
from tests.cluster.network import command
from tests.cluster.pod_plan import ContainerPlan, Contents, Identity, NotThere, PodPlan, Volume, plan_pod, plan_volumes
from tests.cluster.probes import verdicts
from tests.e2e.chaos.cgroups import Group
from tests.e2e.chaos.cgroups import Place as GroupPlace
from tests.k8s.pods import Object

NOT_THERE_S: Final = 0.5
"""After which a pod that lacks a secret looks again."""
SYNC_S: Final = 1.0
"""Between two looks for secrets and config maps that have changed."""
BACKOFF_S: Final = (0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)
"""Waits before the first and the following restarts of a container, as kubelets have them."""

Say = Callable[[str], None]


class Pod:
    """A pod on the node. `run` is its life; `end` asks for its end."""

    def __init__(
        self,
        identity: Identity,
        spec: Object,
        owner: str,
        revision: str,
        say: Say,
        changed: Callable[[], None],
        group_place: GroupPlace | None,
    ) -> None:
        """changed: called when the pod becomes ready or unready, or has ended. group_place: None: no memory limits."""
        self.identity, self.spec, self.owner, self.revision = identity, spec, owner, revision
        self.statuses: list[int] = []  # of containers that ended and are not restarted
        self.is_ending = False
        self.has_ended = False
        self.ready_since_s: float | None = None
        self.log = FILES / "logs" / f"{identity.name}.log"
        self._say, self._changed, self._group_place = say, changed, group_place
        self._containers: list[_Running] = []
        self._initial: list[_Running] = []  # the one that runs before them
        self._ending = asyncio.Event()
        self._plan: PodPlan | None = None

    def __str__(self) -> str:
        return self.identity.name

    @property
    def is_ready(self) -> bool:
        """Whether services send it requests."""
        return self.ready_since_s is not None and not self.is_ending

    @property
    def num_restarts(self) -> int:
        return sum(each.num_restarts for each in self._running)

    @property
    def _running(self) -> list[_Running]:
        return [*self._initial, *self._containers]

    def is_available(self, min_ready_s: float) -> bool:
        return self.is_ready and self.ready_since_s is not None and time.monotonic() - self.ready_since_s >= min_ready_s

    async def run(self, contents: Callable[[], Contents]) -> None:
        """Returns when only its network is left of the pod. Raises ValueError for a pod that is not understood here."""
        try:
            plan = await self._planned(contents)
            if plan is None:
                return
            with self._groups(plan) as groups:
                volumes = await self._make_volumes(plan)
                try:
                    hosts = FILES / "hosts"
                    places = [Place(self.identity.name, plan.shared_group, volumes, hosts, group) for group in groups]
                    async with asyncio.TaskGroup() as tasks:
                        syncing = tasks.create_task(self._sync_volumes(plan, volumes, contents))
                        await self._run_containers(plan, places)
                        syncing.cancel()
                finally:
                    keep_ray_logs(volumes, self.log.with_suffix(""))
                    for volume in plan.volumes:
                        if volume.claim is None:
                            await command("umount", str(volumes[volume.name]))
        finally:
            self.ready_since_s, self.has_ended = None, True
            self._changed()

    async def _run_containers(self, plan: PodPlan, places: Sequence[Place]) -> None:
        for container, place in zip(plan.init_containers, places, strict=False):
            self._initial = [_Running(self, container, place)]
            began_s = time.monotonic()
            status = await self._initial[0].keep("Never" if plan.restarts == "Never" else "OnFailure", self._ending)
            if self._ending.is_set():
                return
            if status:
                self.statuses.append(status)
                return
            self.note(f"{container.name} has ended after {time.monotonic() - began_s:.0f} s")
        self._initial = []
        pairs = zip(plan.containers, places[len(plan.init_containers) :], strict=True)
        self._containers = [_Running(self, container, place) for container, place in pairs]
        async with asyncio.TaskGroup() as tasks:
            ends = [tasks.create_task(each.keep(plan.restarts, self._ending)) for each in self._containers]
        self.statuses += [end.result() for end in ends if not self._ending.is_set()]

    async def end(self) -> None:
        """Ends it as a deletion does: after its grace its processes are killed."""
        if self.is_ending:
            return
        self.is_ending = True
        self._ending.set()
        self._changed()
        began_s = time.monotonic()
        if self._plan is not None:
            await asyncio.gather(*(each.stop(self._plan.grace_s) for each in self._running))
        self.note(f"ended after {time.monotonic() - began_s:.0f} s")

    def kill(self) -> None:
        """Kills the first process of each container, without any notice."""
        for each in self._running:
            each.kill()

    def abandon(self) -> None:
        """Kills it for good, without its grace."""
        self.is_ending = True
        self._ending.set()
        self.kill()

    def note(self, text: str) -> None:
        self._say(f"{self.identity.name}: {text}")

    def look(self) -> None:
        """Takes note of the containers' readiness."""
        is_ready = bool(self._containers) and all(each.is_ready for each in self._containers)
        if is_ready is not (self.ready_since_s is not None):
            self.ready_since_s = time.monotonic() if is_ready else None
            if not self.is_ending:
                self.note("ready" if is_ready else "not ready")
            self._changed()

    async def _planned(self, contents: Callable[[], Contents]) -> PodPlan | None:
        """The plan, once everything that it needs is there; None if the pod has to end before."""
        while not self.is_ending:
            try:
                self._plan = plan_pod(self.spec, self.identity, contents(), image_of)
                return self._plan
            except NotThere:
                await asyncio.sleep(NOT_THERE_S)
        return None

    async def _make_volumes(self, plan: PodPlan) -> Mapping[str, Path]:
        volumes = {}
        for volume in plan.volumes:
            if volume.claim is not None:
                volumes[volume.name] = volume.claim
                continue
            folder = FILES / "volumes" / self.identity.name / volume.name
            folder.mkdir(parents=True)
            options = f"mode=2777,gid={plan.shared_group}"
            if volume.size_bytes is not None:
                options += f",size={volume.size_bytes}"
            await command("mount", "-t", "tmpfs", "-o", options, volume.name, str(folder))
            if volume.files is not None:
                write_files(folder, volume, plan.shared_group)
            volumes[volume.name] = folder
        return volumes

    async def _sync_volumes(self, plan: PodPlan, volumes: Mapping[str, Path], contents: Callable[[], Contents]) -> None:
        """Rewrites secrets and config maps that have changed. Kubelets do so as well, within a minute or two."""
        written = {volume.name: volume for volume in plan.volumes}
        while True:
            await asyncio.sleep(SYNC_S)
            with suppress(NotThere):
                for volume in plan_volumes(self.spec, contents()):
                    if volume.files is not None and volume != written[volume.name]:
                        write_files(volumes[volume.name], volume, plan.shared_group)
                        written[volume.name] = volume

    @contextmanager
    def _groups(self, plan: PodPlan) -> Iterator[list[Path | None]]:
        """A control group with its limit of memory for each container; None where none can be made."""
        made: list[tuple[Group, ContainerPlan]] = []
        found: list[Path | None] = []
        try:
            for container in (*plan.init_containers, *plan.containers):
                if self._group_place is None or container.memory_bytes is None:
                    found.append(None)
                    continue
                folder = self._group_place.folder / f"{self.identity.name}-{container.name}"
                group = Group(folder, self._group_place.is_version_2)
                made.append((group, container))
                group.limit_memory(container.memory_bytes)
                found.append(folder)
            yield found
        finally:
            for group, container in made:
                if (peak := group.peak_bytes()) is not None and container.memory_bytes is not None:
                    limit = f"{peak >> 20} of {container.memory_bytes >> 20} MiB"
                    self.note(f"{container.name} had at most {limit}, with the file cache")
                if num_killed := group.num_killed():
                    self.note(f"{num_killed} processes killed because the limit of memory was reached")
                group.remove()


def write_files(folder: Path, volume: Volume, group: int) -> None:
    """Writes the files of a secret or config map as a kubelet does: links to files in a hidden folder.

    New files take the place of all earlier ones at once.
    """
    files = volume.files or {}
    data, link = folder / f"..{time.monotonic_ns()}", folder / "..data"
    data.mkdir()
    for name, (content, mode) in files.items():
        (data / name).write_bytes(content)
        os.chown(data / name, 0, group)
        (data / name).chmod(mode | 0o440)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    earlier = link.resolve() if link.is_symlink() else None
    (folder / "..new").symlink_to(data.name)
    (folder / "..new").replace(link)
    if earlier is not None:
        shutil.rmtree(earlier)
        for path in folder.iterdir():
            if not path.name.startswith("..") and path.name not in files:
                path.unlink()


class _Running:
    """A container of a pod, which is started again when it ends."""

    def __init__(self, pod: Pod, plan: ContainerPlan, place: Place) -> None:
        self._pod, self._plan, self._place = pod, plan, place
        self._container: Container | None = None
        self._has_started = self._is_ready = False
        self.num_restarts = 0

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    async def keep(self, restarts: str, ending: asyncio.Event) -> int:
        """Runs it until the pod ends, or until it has ended if it is not to be restarted; returns its last status."""
        status = 0
        while not ending.is_set():
            self._container = await Container.start(self._plan, self._place, self._pod.log)
            if ending.is_set():  # while it was started
                self.kill()
            watching = asyncio.create_task(self._watch())
            try:
                status = await self._container.wait()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            self._is_ready = False
            self._pod.look()
            if ending.is_set() or restarts == "Never" or (restarts == "OnFailure" and not status):
                break
            delay_s = BACKOFF_S[min(self.num_restarts, len(BACKOFF_S) - 1)]
            self.num_restarts += 1
            self._pod.note(f"ended with {status}, starts again{f' in {delay_s:g} s' if delay_s else ''}")
            try:
                async with asyncio.timeout(delay_s):
                    await ending.wait()
            except TimeoutError:
                pass
        return status

    async def stop(self, grace_s: float) -> None:
        """Gives it its time before SIGTERM, and kills it after its grace."""
        container = self._container
        if container is None:
            return
        try:
            async with asyncio.timeout(grace_s):
                # A container that ends by itself meanwhile is not waited for.
                stopping = asyncio.create_task(container.wait())
                await asyncio.wait((stopping,), timeout=self._plan.pre_stop_s)
                container.signal(signal.SIGTERM)
                await stopping
        except TimeoutError:
            self._pod.note(f"killed after {grace_s:g} s")
            container.signal(signal.SIGKILL)
            await container.wait()

    def kill(self) -> None:
        if self._container is not None:
            self._container.signal(signal.SIGKILL)

    async def _watch(self) -> None:
        """Probes the container until it is cancelled."""
        address, probes = self._pod.identity.address, self._plan.probes
        self._has_started = "startup" not in probes
        if not self._has_started:
            await self._until_started()
        tasks = []
        if "liveness" in probes:
            tasks.append(verdicts(probes["liveness"], address, self._execute, self._judge_liveness))
        if "readiness" in probes:
            tasks.append(verdicts(probes["readiness"], address, self._execute, self._judge_readiness))
        else:
            self._judge_readiness(True)
        await asyncio.gather(*tasks)

    async def _until_started(self) -> None:
        started = asyncio.Event()

        def judge(is_started: bool) -> None:
            if is_started:
                started.set()
            else:
                self._pod.note("killed: its startup probe failed too often")
                self.kill()

        probing = asyncio.create_task(
            verdicts(self._plan.probes["startup"], self._pod.identity.address, self._execute, judge)
        )
        try:
            await started.wait()
        finally:
            probing.cancel()

    async def _execute(self, words: Sequence[str]) -> bool:
        return self._container is not None and await self._container.execute(words)

    def _judge_liveness(self, is_alive: bool) -> None:
        if not is_alive:
            self._pod.note("killed: its liveness probe failed too often")
            self.kill()

    def _judge_readiness(self, is_ready: bool) -> None:
        self._is_ready = is_ready
        self._pod.look()


def keep_ray_logs(volumes: Mapping[str, Path], folder: Path) -> None:
    """Copies what Ray's processes have written in a pod, and not to its output."""
    for volume in volumes.values():
        for session in volume.glob("ray/session_2*/logs"):
            shutil.copytree(session, folder / session.parent.name, ignore=shutil.ignore_patterns("*.sock"))


def remove_files(name: str) -> None:
    """Removes the folders of a pod's volumes, which nothing is mounted at any more."""
    shutil.rmtree(FILES / "volumes" / name, ignore_errors=True)
