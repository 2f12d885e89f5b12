"""gRPC from Python with stubs that are generated here, as a client in another repository does."""

import os
import subprocess
import sys
from pathlib import Path

import grpc
from checks import check, equal, finish
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

protos = Path(os.environ["OUTRIDER_PROTOS"])
stubs = Path("stubs").resolve()
stubs.mkdir()
files = [path.relative_to(protos.parent).as_posix() for path in sorted(protos.rglob("*.proto"))]
arguments = [f"-I{protos.parent}", f"--python_out={stubs}", f"--grpc_python_out={stubs}", *files]
subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True, timeout=60)
sys.path.insert(0, str(stubs))

from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc  # noqa: E402

PROMPT = "def read_file(path):\n"
SERVICE = "outrider.v1.Generation"
TIMEOUT_S = 60
channel = grpc.insecure_channel(os.environ["OUTRIDER_GRPC"])
stub = generation_pb2_grpc.GenerationStub(channel)


def generated(**fields: object) -> list[generation_pb2.GenerationChunk]:
    return list(stub.Generate(generation_pb2.GenerationRequest(prompt=PROMPT, **fields), timeout=TIMEOUT_S))


def code_of(**fields: object) -> grpc.StatusCode:
    try:
        generated(**fields)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@check("health: Check and Watch")
def _() -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        equal(answer.status, health_pb2.HealthCheckResponse.SERVING)
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT_S)
    equal(next(watch).status, health_pb2.HealthCheckResponse.SERVING)
    watch.cancel()


@check("reflection: services and their methods")
def _() -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
    (service,) = database.FindFileContainingSymbol(SERVICE).service
    assert {"Generate", "ListModels"} <= {method.name for method in service.method}


@check("ListModels")
def _() -> None:
    models = stub.ListModels(generation_pb2.ListModelsRequest(), timeout=TIMEOUT_S).models
    assert models
    assert all(model.max_model_len > 0 for model in models)


@check("Generate: greedy output is streamed and repeated")
def _() -> None:
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=40)
    one, other = generated(sampling=sampling), generated(sampling=sampling)
    equal("".join(chunk.text for chunk in one), "".join(chunk.text for chunk in other))
    equal(one[-1].finished.num_output_tokens, 40)
    assert len(one) > 2


@check("Generate: unset fields have the defaults of the HTTP API")
def _() -> None:
    finished = generated(sampling=common_pb2.SamplingParams(top_k=5))[-1].finished
    equal(finished.decoding_mode, common_pb2.DECODING_MODE_COUPLED)


@check("Generate: the seed of an answer repeats it")
def _() -> None:
    one = generated(sampling=common_pb2.SamplingParams(max_tokens=20))
    seed = one[-1].finished.seed
    other = generated(sampling=common_pb2.SamplingParams(max_tokens=20, seed=seed))
    equal("".join(chunk.text for chunk in one), "".join(chunk.text for chunk in other))


@check("Generate: bad values are refused with the name of the field")
def _() -> None:
    equal(code_of(sampling=common_pb2.SamplingParams(top_p=1.5)), grpc.StatusCode.INVALID_ARGUMENT)
    equal(code_of(model="no-such-model"), grpc.StatusCode.NOT_FOUND)
    try:
        generated(sampling=common_pb2.SamplingParams(temperature=-1))
    except grpc.RpcError as error:
        assert "temperature" in error.details(), error.details()


@check("Generate: a client may leave")
def _() -> None:
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    call = stub.Generate(generation_pb2.GenerationRequest(prompt=PROMPT, sampling=sampling), timeout=TIMEOUT_S)
    next(call)
    call.cancel()
    equal(call.code(), grpc.StatusCode.CANCELLED)


channel.close()
finish()
