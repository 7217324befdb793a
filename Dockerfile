# One image for every role; what a container is, its command says (docker-compose.yml).
#
#     docker build -t rollout-service .
#     docker run --init --shm-size 1g -v runs:/home/rollout/runs rollout-service train --preset tmaze
#
# TORCH_INDEX: where torch comes from. The default is its CPU build; empty takes the default index, whose build has CUDA.
ARG PYTHON_VERSION=3.11

# The package, in a stage of its own because it has a part in C: the image needs no compiler.
FROM python:${PYTHON_VERSION}-slim AS wheel
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
WORKDIR /opt/rollout-service
COPY pyproject.toml setup.py README.md LICENSE ./
COPY rollout_service rollout_service
COPY workers workers
COPY learner learner
RUN pip wheel --no-deps --wheel-dir /tmp/wheel .

FROM python:${PYTHON_VERSION}-slim

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore

# Every role runs as this user: segments and sockets are closed to everybody else. The two directories are where volumes
# are mounted; an empty volume takes over their owner.
RUN useradd --uid 1000 --create-home --home-dir /home/rollout rollout \
    && install --directory --owner=rollout --group=rollout --mode=0700 /run/rollout /home/rollout/runs

WORKDIR /opt/rollout-service

# Torch first: it is most of the image and seldom changes. Without its dependencies, which the next step brings, so that
# this index is asked for nothing else.
COPY constraints.txt .
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-deps ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} --constraint constraints.txt torch

COPY --from=wheel /tmp/wheel /tmp/wheel
RUN pip install --constraint constraints.txt /tmp/wheel/*.whl

WORKDIR /home/rollout
COPY examples examples
USER rollout
ENV ROLLOUT_SERVICE_SOCKET_DIR=/run/rollout

# Healthy: a run answers that can be seen from this container, through its own /dev/shm and socket directory.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD rollout-service status --json | grep --quiet '"report": {'

STOPSIGNAL SIGTERM
ENTRYPOINT ["rollout-service"]
CMD ["--help"]
