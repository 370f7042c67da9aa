# The same for machines without a GPU, to try things:
#
#   docker build -t REGISTRY/batchinfer:0.1.0-cpu -f examples/docker/cpu.Dockerfile .
FROM python:3.11.14-slim-bookworm

# gcc and Python's headers: Triton compiles small modules when an engine starts.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/batchinfer
COPY pyproject.toml README.md LICENSE ./
COPY scripts ./scripts
COPY batchinfer ./batchinfer
RUN bash scripts/setup.sh --extras cpu --venv /opt/venv \
    && useradd --create-home --uid 1001 worker

USER 1001
WORKDIR /home/worker
ENV HF_HOME=/home/worker/.cache/huggingface PATH=/opt/venv/bin:$PATH

ENTRYPOINT ["batchinfer"]
CMD ["worker", "--help"]
