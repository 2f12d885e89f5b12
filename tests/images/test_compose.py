"""The compose file: valid to the letter of what it uses, closed but for the coordinator, and its small scripts work."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, Final

import grpc
import jsonschema
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from coordinator.__main__ import parse as parse_coordinator
from draft_worker.__main__ import parse_arguments as parse_draft
from outrider.errors import ConfigurationError
from outrider.worker.worker_options import worker_options
from target_worker.__main__ import parse_arguments as parse_target

FOLDER = Path(__file__).parents[2] / "k8s" / "images"
REDIS_USERS = FOLDER.parent / "redis_users.sh"
SPECIFIED = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))

TEXT: Final = {"type": "string"}
TEXTS: Final = {"type": "array", "items": TEXT, "minItems": 1}
TIME: Final = {"type": "string", "pattern": r"^\d+(s|m|h)$"}
SIZE: Final = {"type": "string", "pattern": r"^\d+(m|g)$"}
TRUE: Final = {"const": True}


def closed(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def named(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": dict(schema)}


# Of https://github.com/compose-spec/compose-spec what our file uses; everything else is refused.
SERVICE: Final = closed(
    {
        "image": TEXT,
        "build": closed({"context": TEXT, "dockerfile": TEXT, "args": named(TEXT)}, "context", "dockerfile"),
        "init": TRUE,
        "restart": {"enum": ["unless-stopped"]},
        "read_only": TRUE,
        "cap_drop": {"const": ["ALL"]},
        "security_opt": {"const": ["no-new-privileges:true"]},
        "user": {"type": "string", "pattern": r"^[1-9]\d*:[1-9]\d*$"},
        "command": TEXTS,
        "networks": TEXTS,
        "ports": TEXTS,
        "secrets": TEXTS,
        "tmpfs": TEXTS,
        "volumes": {
            "type": "array",
            "items": closed(
                {"type": {"const": "bind"}, "source": TEXT, "target": TEXT, "read_only": TRUE},
                *("type", "source", "target", "read_only"),
            ),
        },
        "healthcheck": closed(
            {
                "test": TEXTS,
                "interval": TIME,
                "timeout": TIME,
                "start_period": TIME,
                "start_interval": TIME,
                "retries": {"type": "integer", "minimum": 1},
            },
            *("test", "interval", "timeout", "retries"),
        ),
        "depends_on": named(closed({"condition": {"const": "service_healthy"}}, "condition")),
        "mem_limit": SIZE,
        "shm_size": SIZE,
        "stop_grace_period": TIME,
    },
    *(
        "image",
        "init",
        "restart",
        "read_only",
        "cap_drop",
        "security_opt",
        "networks",
        "tmpfs",
        "healthcheck",
    ),
    *("mem_limit", "command"),
)
SCHEMA: Final = closed(
    {
        "name": TEXT,
        "services": named(SERVICE),
        "networks": named(closed({"internal": {"type": "boolean"}})),
        "secrets": named(closed({"file": TEXT}, "file")),
    },
    *("name", "services", "networks", "secrets"),
)


def mistakes(compose: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about the mistakes in a compose file: by the schema, and what a schema cannot express."""
    known = {name: value for name, value in compose.items() if not name.startswith("x-")}
    for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(known):
        yield f"{error.json_path}: {error.message}"
    for name, service in compose["services"].items():
        if "ports" in service and name != "coordinator":
            yield f"{name} is open to others"
        if "build" not in service and not re.search(r"@sha256:[0-9a-f]{64}$", service["image"]):
            yield f"{name}: {service['image']} may become another one"
        for kind in ("networks", "secrets"):
            for used in service.get(kind, ()):
                if used not in compose[kind]:
                    yield f"{name}: there is nothing of {kind} called {used}"
        for other in service.get("depends_on", {}):
            if "healthcheck" not in compose["services"].get(other, {}):
                yield f"{name} waits for the health of {other}, which has none"
        for word in service.get("command", ()):
            if re.search(r"passw|://[^/]*@", word):
                yield f"{name}: a secret stands in its command"
    if [name for name in compose["networks"] if not compose["networks"][name].get("internal")] != ["outside"]:
        yield "workers and Redis must have a network without a way out"
    for name, service in compose["services"].items():
        if "outside" in service["networks"] and name != "coordinator":
            yield f"{name} has a way out"


def test_the_file_is_valid_and_closed() -> None:
    assert list(mistakes(SPECIFIED)) == []


def publish_redis(services: dict[str, Any]) -> None:
    services["redis"]["ports"] = ["6379:6379"]


def misspell(services: dict[str, Any]) -> None:
    services["target"]["readonly"] = True


def be_writable(services: dict[str, Any]) -> None:
    services["draft"]["read_only"] = False


def float_redis(services: dict[str, Any]) -> None:
    services["redis"]["image"] = "redis:7.4-alpine"


def forget_a_secret(services: dict[str, Any]) -> None:
    services["target"]["secrets"] = ["redis-password"]


def let_a_worker_out(services: dict[str, Any]) -> None:
    services["draft"]["networks"] = ["inside", "outside"]


def write_a_password_down(services: dict[str, Any]) -> None:
    services["coordinator"]["command"].append("--redis-url=redis://:secret@redis:6379/0")


@pytest.mark.parametrize(
    "mistake",
    [
        publish_redis,
        misspell,
        be_writable,
        float_redis,
        forget_a_secret,
        let_a_worker_out,
        write_a_password_down,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_is_found(mistake: Callable[[dict[str, Any]], None]) -> None:
    spoilt = copy.deepcopy(SPECIFIED)
    mistake(spoilt["services"])
    assert list(mistakes(spoilt))


PARSERS: Final = {"target": parse_target, "draft": parse_draft}


def started(name: str, service: Mapping[str, Any], secrets: Path) -> Any:
    """The options that a process parses from its command: `WorkerOptions`, or the coordinator's settings. Raises the
    error that the process would end with, and AssertionError for a file that is not among its secrets."""
    role, *words = service["command"]
    for word in words:
        _, _, file = word.partition("=/run/secrets/")
        assert not file or file in service["secrets"], word
    words = [word.replace("/run/secrets", str(secrets)) for word in words]
    if name == "coordinator":
        assert role == "coordinator"
        settings, _ = parse_coordinator(words)
        return settings
    assert role == f"{name}_worker"
    return worker_options(PARSERS[name](words))


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    for part in ("coordinator", *PARSERS):
        (tmp_path / f"url-{part}").write_text(f"redis://{part}:a$b`c'd@redis:6379/0\n")
    return tmp_path


@pytest.mark.parametrize("name", PARSERS)
def test_workers_start_with_their_flags_and_are_announced_by_their_names(name: str, secrets: Path) -> None:
    service = SPECIFIED["services"][name]
    given = started(name, service, secrets)
    assert given.redis_url == f"redis://{name}:a$b`c'd@redis:6379/0"
    assert (given.announce, given.host) == (f"{name}:{given.port}", "0.0.0.0")
    assert given.drain_grace_s < int(service["stop_grace_period"].removesuffix("s"))
    assert f'"127.0.0.1:{given.port}"' in service["healthcheck"]["test"][-1]


def test_the_coordinator_starts_and_asks_for_keys(secrets: Path) -> None:
    given = started("coordinator", SPECIFIED["services"]["coordinator"], secrets)
    assert given.redis_url == "redis://coordinator:a$b`c'd@redis:6379/0"
    assert given.api_keys_file == str(secrets / "keys.toml")


@pytest.mark.parametrize(
    ("name", "flag", "refusal"),
    [
        ("target", "--insecure", ConfigurationError),
        ("draft", "--insecure", ConfigurationError),
        ("coordinator", "--api-keys=/run/secrets/keys.toml", SystemExit),
        ("coordinator", "--redis-url-file=/run/secrets/url-coordinator", SystemExit),
    ],
)
def test_a_command_that_would_not_start_is_found(
    name: str, flag: str, refusal: type[BaseException], secrets: Path
) -> None:
    spoilt = copy.deepcopy(SPECIFIED["services"][name])
    spoilt["command"].remove(flag)
    with pytest.raises(refusal):
        started(name, spoilt, secrets)


def test_a_secret_that_a_service_is_not_given_is_found(secrets: Path) -> None:
    spoilt = copy.deepcopy(SPECIFIED["services"]["coordinator"])
    spoilt["secrets"].remove("keys.toml")
    with pytest.raises(AssertionError, match="keys"):
        started("coordinator", spoilt, secrets)


def test_all_secrets_are_made_as_the_head_of_the_file_says() -> None:
    head = (FOLDER / "compose.yaml").read_text(encoding="utf-8").partition("\nname:")[0]
    made = {"keys.toml", *re.findall(r"users\.conf|url-[a-z]+", REDIS_USERS.read_text())}
    assert "redis_users.sh secrets " in head
    assert " secrets/keys.toml" in head
    assert {secret["file"].removeprefix("./secrets/") for secret in SPECIFIED["secrets"].values()} <= made


def test_images_are_built_by_dockerfiles_that_are_there() -> None:
    for service in SPECIFIED["services"].values():
        if build := service.get("build"):
            assert (FOLDER / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.parametrize(
    ("status", "is_healthy"),
    [
        (health_pb2.HealthCheckResponse.SERVING, True),
        (health_pb2.HealthCheckResponse.NOT_SERVING, False),
        (None, False),
    ],
)
def test_a_worker_s_health_is_what_grpc_says(status: Any, is_healthy: bool) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    port = server.add_insecure_port("127.0.0.1:0")
    if status is not None:
        servicer.set("", status)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.start()
    code = SPECIFIED["services"]["target"]["healthcheck"]["test"][-1].replace("50051", str(port))
    try:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=30)
    finally:
        server.stop(None).wait()
    assert (result.returncode == 0) is is_healthy
