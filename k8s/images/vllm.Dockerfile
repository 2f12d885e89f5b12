# Outrider's scheduler class for vLLM (docs/operations/draft-pools.md). From the root of the repository:
#
#   docker build --file k8s/images/vllm.Dockerfile --tag vllm-outrider .
#   docker build --file k8s/images/vllm.Dockerfile --build-arg VLLM=IMAGE@sha256:… --tag vllm-outrider .
#   docker build --file k8s/images/vllm.Dockerfile --target files --tag outrider-vllm .
#
# The first two are vLLM's image, or yours, with the class. The third has the class alone and copies it to /plugin, for an
# init container beside an image of vLLM that stays as it is; a folder on PYTHONPATH is all that vLLM needs.
ARG VLLM=vllm/vllm-openai:v0.32.0

FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS base

# All of it is pure Python, which does not depend on the version of Python in vLLM's image. vLLM brings everything that hints
# need but this one package; its version is that of the workers.
# --build-arg PIP_INDEX_URL=… names a mirror; its packages must have the lock's hashes.
FROM base AS packages
ARG PIP_INDEX_URL
COPY k8s/images/locks/worker-cpu.txt /locks/
RUN sed -n '/^grpcio-status==/,/^    #/p' /locks/worker-cpu.txt > /locks/vllm.txt \
    && pip install --no-cache-dir --no-compile --no-deps --require-hashes --only-binary :all: \
        --target /outrider --requirement /locks/vllm.txt
COPY outrider /outrider/outrider
COPY protos /outrider/protos
COPY pyproject.toml k8s/images/entry_points.py /made-of/
RUN python /made-of/entry_points.py /made-of/pyproject.toml /outrider

FROM base AS files
RUN groupadd --gid 10001 outrider \
    && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin outrider
COPY --from=packages /outrider /outrider
ENV HOME=/tmp
USER 10001:10001
CMD ["cp", "-R", "/outrider/.", "/plugin"]

# Which one it is, and its digest, are the builder's choice.
# hadolint ignore=DL3006
FROM ${VLLM}
COPY --from=packages /outrider /opt/outrider
ENV PYTHONPATH=/opt/outrider
