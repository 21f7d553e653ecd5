# hybridrl for machines with GPUs. Build: docker build -t hybridrl .
# Run: docker run --gpus all --ipc host --ulimit memlock=-1 -v "$PWD/outputs:/work/outputs" hybridrl \
#        torchrun --nproc-per-node 8 -m hybridrl.train recipe=grpo_qwen3_30b_a3b
ARG CUDA=13.0.1-cudnn-devel-ubuntu24.04
ARG RUNTIME=13.0.1-cudnn-runtime-ubuntu24.04

FROM nvidia/cuda:${CUDA} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes build-essential git ninja-build python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/hybridrl PATH=/opt/hybridrl/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3.12 -m venv /opt/hybridrl && pip install 'pip>=25,<27' 'torch==2.14.1'
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY hybridrl hybridrl
COPY hydra_plugins hydra_plugins
COPY conf conf
COPY recipes recipes
# Transformer Engine's extension is compiled against the torch that is installed, so nothing is built in isolation. What
# is installed, and in which ranges, is pyproject.toml's to say.
# hadolint ignore=DL3013
RUN pip install 'hatchling>=1.27,<2' 'pybind11>=2.13,<4' 'setuptools>=77,<83' 'wheel>=0.45,<1' \
    && pip install --no-build-isolation '.[sglang,gpu,ray]'

FROM nvidia/cuda:${RUNTIME}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# SGLang compiles kernels at run time, so a compiler and Python's headers stay.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes build-essential git libnuma1 ninja-build python3.12 python3.12-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 hybridrl \
    && mkdir /work && chown 10001 /work
COPY --from=build /opt/hybridrl /opt/hybridrl
COPY --chown=10001 tools /work/tools
ENV VIRTUAL_ENV=/opt/hybridrl PATH=/opt/hybridrl/bin:$PATH HF_HUB_DISABLE_TELEMETRY=1
USER 10001
WORKDIR /work
HEALTHCHECK --interval=5m --timeout=4m --start-period=1m CMD ["python", "tools/doctor.py"]
CMD ["python", "tools/doctor.py"]
