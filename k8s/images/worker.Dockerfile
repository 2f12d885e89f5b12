# Both workers: target_worker and draft_worker. From the root of the repository:
#
#   docker build --file k8s/images/worker.Dockerfile --tag outrider-worker:cpu .
#   docker build --file k8s/images/worker.Dockerfile --build-arg VARIANT=cuda --tag outrider-worker:cuda .
#   docker build --file k8s/images/worker.Dockerfile --build-arg MODELS=demo --tag outrider-worker:demo .
#
# The variants differ in the lock file alone: torch brings the CUDA libraries that it was built with, the driver comes
# with the node. For linux/amd64, as the locks. The tag of a base image is the one it had when it was pinned;
# `docker buildx imagetools inspect python:3.11-slim-bookworm` shows the digest of today's.
ARG VARIANT=cpu
ARG MODELS=none

# The CPU kernels need a compiler, so this stage uses the large image; only /app is kept.
FROM python:3.11-bookworm@sha256:b99029c95d3d37fb1e4e76d287f7984373dca77c665885986e31b2c95260c13c AS build
WORKDIR /src
COPY k8s/images/locks/build.txt ./
RUN pip install --no-cache-dir --require-hashes --only-binary :all: --requirement build.txt
COPY pyproject.toml README.md ./
COPY outrider ./outrider
COPY protos ./protos
COPY draft_worker ./draft_worker
COPY target_worker ./target_worker
# Without a compiler the package installs without the kernels and is slower; here that is an error.
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel . \
    && python -m zipfile -e /wheel/outrider-*.whl /app \
    && test -f /app/outrider/engine/compiled/_kernels.*.so \
    && python -m compileall -q --invalidation-mode unchecked-hash /app

FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS base

FROM base AS packages-cpu
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

FROM base AS packages-cuda

# --build-arg PIP_INDEX_URL=… names a mirror; its packages must have the lock's hashes.
# Bytecode is compiled without times, so that builds of one commit are equal. Some packages have files of other Pythons.
# hadolint ignore=DL3006
FROM packages-${VARIANT} AS packages
ARG VARIANT
ARG PIP_INDEX_URL
COPY k8s/images/locks/worker-${VARIANT}.txt /locks/worker.txt
RUN python -m venv --without-pip /venv \
    && pip --python /venv/bin/python install --no-cache-dir --no-compile --require-hashes --only-binary :all: \
        --requirement /locks/worker.txt \
    && { python -m compileall -q --invalidation-mode unchecked-hash /venv/lib || :; }

# The demo's pair of models, or none.
FROM base AS models-none
RUN mkdir /models

FROM base AS models-demo
COPY demo/target /models/target
COPY demo/draft /models/draft

# hadolint ignore=DL3006
FROM models-${MODELS} AS models

# The image has no compiler and no pip, and only /tmp is writable.
FROM base
RUN groupadd --gid 10001 outrider \
    && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin outrider
COPY --from=packages /venv /venv
COPY --from=build /app /app
COPY --from=models /models /models
# The variable names tokenizers, not secret tokens.
# hadolint ignore=DL3064
ENV PATH=/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    HF_HUB_OFFLINE=1 \
    TOKENIZERS_PARALLELISM=false \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /app
USER 10001:10001
EXPOSE 50051 9100
# Which worker, and its flags, are the arguments. Several ranks: torchrun --standalone --nproc-per-node=4 -m
ENTRYPOINT ["python", "-m"]
CMD ["target_worker", "--help"]
