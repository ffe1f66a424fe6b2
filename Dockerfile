# Three images, and the same paths, user, health check and entry point in all (docs/how_to/containers.md says how to run them):
#
#   docker build --target cpu .      every machine; the default, because it needs no device and no vendor's registry
#   docker build --target gaudi .    Intel Gaudi, lazy mode
#   docker build --target gaudi --build-arg GAUDI_INSTALLER=pytorch-upstream-installer --build-arg GAUDI_LAZY_MODE=0 .
#                                    Intel Gaudi on stock torch, compiled mode
#   docker build --target ascend .   Ascend NPU
#
# Each image has a stage that installs and one that runs, so that build tools and caches stay behind.

# ---- base images: declared first, because FROM sees nothing else --------------------------------

ARG CPU_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

# The older pair: GAUDI_VERSION=1.24.1, GAUDI_BUILD=482, PT_VERSION=2.11.0. The tag of 1.24.2 was not seen in the registry: its
# build is that of habana-pyhlml 1.24.2.481, and the rest is spelled as in 1.24.1.
ARG GAUDI_VERSION=1.24.2
ARG GAUDI_BUILD=481
ARG GAUDI_OS=ubuntu24.04
ARG PT_VERSION=2.13.0
# pytorch-installer has Habana's build of torch, with lazy mode; pytorch-upstream-installer has stock torch, where steps are
# compiled: it wants GAUDI_LAZY_MODE=0.
ARG GAUDI_INSTALLER=pytorch-installer
ARG GAUDI_LAZY_MODE=1
ARG GAUDI_IMAGE=vault.habana.ai/gaudi-docker/${GAUDI_VERSION}/${GAUDI_OS}/habanalabs/${GAUDI_INSTALLER}-${PT_VERSION}:${GAUDI_VERSION}-${GAUDI_BUILD}

ARG CANN_VERSION=9.1.0
# 910b: Atlas A2; a3: Atlas A3
ARG CANN_CHIP=910b
ARG CANN_OS=ubuntu22.04-py3.12
ARG ASCEND_IMAGE=quay.io/ascend/cann:${CANN_VERSION}-${CANN_CHIP}-${CANN_OS}

# ---- Gaudi: install -----------------------------------------------------------------------------

FROM ${GAUDI_IMAGE} AS gaudi-build
ARG PT_VERSION
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
WORKDIR /opt/vllm-gaudi-spec

# An environment on top of the image's packages: it sees torch and habana_frameworks, and pip cannot change them from
# here. Without pip of its own, because the image has one and may lack ensurepip.
RUN python3 -m venv --system-site-packages --without-pip /opt/venv
ENV PATH=/opt/venv/bin:${PATH}

# The package's folder is enough for an editable install; its code comes with the last stage. Then all that vLLM needs, vLLM
# without kernels, and this project; no torch is among them.
COPY requirements/card.txt requirements/card-build.txt requirements/card-source.txt requirements/install.py requirements/
COPY requirements/*.in requirements/
COPY pyproject.toml README.md LICENSE ./
COPY vllm_gaudi_spec/__init__.py vllm_gaudi_spec/
COPY card_emulator/pyproject.toml card_emulator/README.md card_emulator/LICENSE card_emulator/
COPY card_emulator/src/card_emulator/__init__.py card_emulator/src/card_emulator/
# The last line: torch must still be the image's, in the version that was asked for. Intel's calls itself 2.13.0a0+git...
RUN python requirements/install.py card \
    && python -c "from importlib.metadata import distribution as d; t = d('torch'); where = str(t.locate_file('')); \
assert t.version.startswith('${PT_VERSION}') and not where.startswith('/opt/venv'), (t.version, where)"

# ---- Gaudi: run ---------------------------------------------------------------------------------

FROM ${GAUDI_IMAGE} AS gaudi

# Group 0 and a home that the group may write to: the container also works under a user id that the platform chooses.
# Device nodes: the habana container runtime passes in /dev/accel/* and, for the network ports, /dev/infiniband/*. A
# user other than root needs them readable and writable; if the host's driver made them for root or a group only, run
# with `--group-add` and that group's number, or with `--user 0`. The runtime's logs have to be writable as well.
RUN useradd --create-home --uid 2000 --gid 0 vllm \
    && mkdir -p /home/vllm/.cache /var/log/habana_logs \
    && chown vllm:0 /home/vllm/.cache \
    && chmod -R g+rwX /home/vllm /var/log/habana_logs

WORKDIR /opt/vllm-gaudi-spec
COPY --from=gaudi-build /opt/venv /opt/venv
COPY . .

# VGS_DEVICE: without a card the server shall say so, rather than run on the CPU.
ENV VGS_DEVICE=hpu
# PT_HPU_LAZY_MODE: that of the base image's torch; the bridge reads it when torch is imported, and its default differs
# between releases.
ARG GAUDI_LAZY_MODE
ENV PT_HPU_LAZY_MODE=${GAUDI_LAZY_MODE}
# PT_HPU_ENABLE_LAZY_COLLECTIVES: the bridge's default is off, and tensor parallelism puts collectives into lazy graphs.
ENV PT_HPU_ENABLE_LAZY_COLLECTIVES=true
# PT_HPU_WEIGHT_SHARING: a weight stays one tensor that can be replaced, rather than a constant shared between graphs.
ENV PT_HPU_WEIGHT_SHARING=0
# VLLM_WORKER_MULTIPROC_METHOD: a process that is forked after the device was opened hangs at its end.
ENV VLLM_WORKER_MULTIPROC_METHOD=spawn
# HABANA_VISIBLE_DEVICES: which cards the container gets, where `docker run` does not say.
# OMPI_MCA_...: Open MPI's single-copy transfers need a right that containers lack.
ENV HABANA_VISIBLE_DEVICES=all OMPI_MCA_btl_vader_single_copy_mechanism=none
# Nothing is sent anywhere without being asked for.
ENV VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
ENV HOME=/home/vllm PATH=/opt/venv/bin:${PATH} HEALTH_URL=http://127.0.0.1:8000/health

USER 2000:0
EXPOSE 8000
# The warm-up compiles every shape before the server answers; a failed check counts only after the start period.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60m --retries=3 \
    CMD ["python", "/opt/vllm-gaudi-spec/docker/healthcheck.py"]
ENTRYPOINT ["vllm", "serve"]

# ---- Ascend: install ----------------------------------------------------------------------------

FROM ${ASCEND_IMAGE} AS ascend-build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# torch loads torch_npu by itself, and that the driver's libraries, which are the host's and not here yet.
ENV TORCH_DEVICE_BACKEND_AUTOLOAD=0
WORKDIR /opt/vllm-gaudi-spec

# The base image has CANN and a Python, and no torch: torch and torch_npu come first. It sees the image's Python packages.
RUN python3 -m venv --system-site-packages /opt/venv
ENV PATH=/opt/venv/bin:${PATH}
COPY requirements/torch.txt requirements/torch-npu.txt requirements/
COPY requirements/card.txt requirements/card-build.txt requirements/card-source.txt requirements/install.py requirements/
COPY requirements/*.in requirements/
COPY pyproject.toml README.md LICENSE ./
COPY vllm_gaudi_spec/__init__.py vllm_gaudi_spec/
COPY card_emulator/pyproject.toml card_emulator/README.md card_emulator/LICENSE card_emulator/
COPY card_emulator/src/card_emulator/__init__.py card_emulator/src/card_emulator/
RUN python requirements/install.py ascend

# ---- Ascend: run --------------------------------------------------------------------------------

FROM ${ASCEND_IMAGE} AS ascend

# The same user as in the Gaudi image. CANN keeps logs and compiled operators in its home.
RUN useradd --create-home --uid 2000 --gid 0 vllm \
    && mkdir -p /home/vllm/.cache \
    && chown vllm:0 /home/vllm/.cache \
    && chmod -R g+rwX /home/vllm

WORKDIR /opt/vllm-gaudi-spec
COPY --from=ascend-build /opt/venv /opt/venv
COPY . .

# The base image names CANN's libraries in its environment: no set_env.sh is needed in front of the entry point.
ENV VGS_DEVICE=ascend VLLM_WORKER_MULTIPROC_METHOD=spawn
ENV VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
ENV HOME=/home/vllm PATH=/opt/venv/bin:${PATH} HEALTH_URL=http://127.0.0.1:8000/health

USER 2000:0
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=60m --retries=3 \
    CMD ["python", "/opt/vllm-gaudi-spec/docker/healthcheck.py"]
ENTRYPOINT ["vllm", "serve"]

# ---- CPU: install -------------------------------------------------------------------------------

FROM ${CPU_IMAGE} AS cpu-build
ENV PIP_NO_CACHE_DIR=1
WORKDIR /opt/vllm-gaudi-spec

# As in the Gaudi build, code that changes does not install everything again.
COPY requirements/cpu.txt requirements/torch.txt requirements/install.py requirements/
COPY requirements/*.in requirements/
COPY requirements/vllm-name/pyproject.toml requirements/vllm-name/
COPY pyproject.toml README.md LICENSE ./
COPY vllm_gaudi_spec/__init__.py vllm_gaudi_spec/
COPY card_emulator/pyproject.toml card_emulator/README.md card_emulator/LICENSE card_emulator/
COPY card_emulator/src/card_emulator/__init__.py card_emulator/src/card_emulator/
RUN python -m venv /opt/venv \
    && /opt/venv/bin/python requirements/install.py cpu

# ---- CPU: run; the last stage is what a build without --target makes -----------------------------

FROM ${CPU_IMAGE} AS cpu

# libnuma: vLLM's kernels are linked with it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1=2.0.16-1 \
    && rm -rf /var/lib/apt/lists/*

# The same user as in the Gaudi image.
RUN useradd --create-home --uid 2000 --gid 0 vllm \
    && mkdir -p /home/vllm/.cache \
    && chown vllm:0 /home/vllm/.cache \
    && chmod -R g+rwX /home/vllm

WORKDIR /opt/vllm-gaudi-spec
COPY --from=cpu-build /opt/venv /opt/venv
COPY . .

ENV VGS_DEVICE=cpu
ENV VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
ENV HOME=/home/vllm PATH=/opt/venv/bin:${PATH} HEALTH_URL=http://127.0.0.1:8000/health

USER 2000:0
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m --retries=3 \
    CMD ["python", "/opt/vllm-gaudi-spec/docker/healthcheck.py"]
ENTRYPOINT ["vllm", "serve"]
