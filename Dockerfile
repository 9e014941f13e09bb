# An image for GPUs with CUDA 13 (NVIDIA's driver 580 or later, and its container toolkit):
#
#   docker build -t hanayo .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -v "$PWD":/work hanayo doctor
#   docker run --gpus all --ipc host --ulimit memlock=-1 -v "$PWD":/work hanayo fit --config wave.yaml
#
# torch's wheels bring CUDA and NCCL with them, so the base image needs neither. Not built by any check yet.
FROM python:3.11-slim-bookworm

ARG CUDA=cu130

# torch.compile compiles for the host, too
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/lightning_hanayo
COPY constraints.txt pyproject.toml hatch_build.py README.md LICENSE ./
COPY lightning_hanayo lightning_hanayo
COPY recipes recipes
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/${CUDA} .

WORKDIR /work
ENTRYPOINT ["hanayo"]
CMD ["doctor"]
