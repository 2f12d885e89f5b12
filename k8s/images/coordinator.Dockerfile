# Image of the coordinator, alone (`python -m coordinator`) or as nodes of a Ray cluster, which KubeRay starts with its own
# commands. It has no torch. From the root of the repository:
#
#   docker build --file k8s/images/coordinator.Dockerfile --tag outrider-coordinator .
#   docker build --file k8s/images/coordinator.Dockerfile --build-arg MODELS=demo --tag outrider-coordinator:demo .
#
# For linux/amd64, as the lock. `docker buildx imagetools inspect python:3.11-slim-bookworm` shows the digest of today's base.
ARG MODELS=none

FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS base

# --build-arg PIP_INDEX_URL=… names a mirror; its packages must have the lock's hashes.
# Bytecode is compiled without times, so that builds of one commit are equal. Some packages have files of other Pythons.
FROM base AS packages
ARG PIP_INDEX_URL
COPY k8s/images/locks/coordinator.txt /locks/
RUN python -m venv --without-pip /venv \
    && pip --python /venv/bin/python install --no-cache-dir --no-compile --require-hashes --only-binary :all: \
        --requirement /locks/coordinator.txt \
    && { python -m compileall -q --invalidation-mode unchecked-hash /venv/lib || :; }
COPY outrider /app/outrider
COPY protos /app/protos
COPY coordinator /app/coordinator
COPY command_line /app/command_line
RUN python -m compileall -q --invalidation-mode unchecked-hash /app

# The demo's pair of models, or none.
FROM base AS models-none
RUN mkdir /models

FROM base AS models-demo
COPY demo/target /models/target
COPY demo/draft /models/draft

# hadolint ignore=DL3006
FROM models-${MODELS} AS models

FROM base
RUN groupadd --gid 10001 outrider \
    && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin outrider
COPY --from=packages /venv /venv
COPY --from=packages /app /app
COPY --from=models /models /models
# The variable names tokenizers, not secret tokens.
# hadolint ignore=DL3064
ENV PATH=/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    TOKENIZERS_PARALLELISM=false \
    RAY_USAGE_STATS_ENABLED=0
WORKDIR /app
USER 10001:10001
EXPOSE 8000 9000
ENTRYPOINT ["python", "-m"]
CMD ["coordinator", "--help"]
