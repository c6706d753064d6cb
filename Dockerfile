# The images of all services, by target:
#
#   orchestrator        no torch: it never runs a model
#   worker-cpu          draft and target; torch's CPU build
#   worker-cuda         draft and target; torch's CUDA build, with its own CUDA libraries
#   orchestrator-demo   ... with the tokenizer of TARGET_MODEL in /models/target
#   worker-cpu-demo     ... with TARGET_MODEL and DRAFT_MODEL in /models
#
# `make images` builds those that the demo needs. Everything is installed in the versions of constraints.txt. The images have
# no compiler and run as user 10001; they write to /tmp alone, so that their root file system can be read-only. What is
# installed is listed in /opt/tandem/packages.txt, which the label tandem.packages names, and each package's licence is beside it; `make images`
# puts the list itself into the label tandem.pip-list.
#
#   PYTHON_IMAGE   give it with a digest to pin more than the tag
#   PIP_ARGS       passed on to pip; worker-cpu needs an index that has torch's CPU builds, as PyTorch's own
#   TARGET_MODEL, DRAFT_MODEL   folders for the demo images

ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

# What all have: the environment with the orchestrator's dependencies. Apart from the sources, so that they are kept when those
# change.
FROM ${PYTHON_IMAGE} AS dependencies
ARG PIP_ARGS=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/tandem
COPY pyproject.toml constraints.txt ./
RUN /build/bin/python -c 'import pathlib, tomllib; \
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]; \
pathlib.Path("core.txt").write_text("\n".join(project["dependencies"])); \
pathlib.Path("worker.txt").write_text("\n".join(project["optional-dependencies"]["worker"]))'
RUN /build/bin/pip install ${PIP_ARGS} -c constraints.txt grpcio-tools setuptools==84.2.1 \
 && /build/bin/pip --python /opt/tandem/bin/python install ${PIP_ARGS} -c constraints.txt -r core.txt

# The project, with its generated stubs.
FROM dependencies AS wheel
COPY LICENSE ./
COPY proto proto
COPY tandem tandem
COPY orchestrator orchestrator
COPY draft_service draft_service
COPY target_service target_service
RUN /build/bin/python -m grpc_tools.protoc -Iproto --python_out=. --grpc_python_out=. proto/tandem/v1/*.proto \
 && echo '"""Generated from proto/."""' > tandem/v1/__init__.py \
 && /build/bin/pip wheel ${PIP_ARGS} --no-deps --no-build-isolation --wheel-dir /wheel .

# Without what an orchestrator can't use: code of models, which needs torch, tests, and compiled code of modules that it never
# imports. Those it does import are compiled by doing once what a start does, since the image can't be written later.
FROM dependencies AS build-orchestrator
COPY models/tiny-target tokenizer
COPY --from=wheel /wheel /wheel
RUN /build/bin/pip --python /opt/tandem/bin/python install --no-deps --no-index /wheel/*.whl \
 && /build/bin/pip --python /opt/tandem/bin/python check \
 && /build/bin/pip --python /opt/tandem/bin/python freeze > /opt/tandem/packages.txt \
 && cd /opt/tandem/lib/python3*/site-packages \
 && find . -name __pycache__ -prune -exec rm -rf {} + \
 && find transformers/models -not -path '*/auto/*' \( -name 'modeling_*.py' -o -name 'modular_*.py' -o -name '*image_process*.py' \) -delete \
 && rm -rf numpy/tests numpy/*/tests numpy/*/*/tests \
 && cd /src && /opt/tandem/bin/python -m orchestrator --help > /dev/null \
 && /opt/tandem/bin/python -c 'import orchestrator.http.face, tandem.cli.generate, tandem.span_export; \
from orchestrator.vocabulary import Vocabulary; Vocabulary.load("tokenizer", "")'

# The version of torch is the one in constraints.txt; the local version says which build, so that no other can slip in.
FROM dependencies AS build-worker-cpu
RUN /build/bin/pip --python /opt/tandem/bin/python install ${PIP_ARGS} -c constraints.txt \
      -r worker.txt "$(grep '^torch==' constraints.txt)+cpu"
COPY --from=wheel /wheel /wheel
RUN /build/bin/pip --python /opt/tandem/bin/python install --no-deps --no-index /wheel/*.whl \
 && /build/bin/pip --python /opt/tandem/bin/python check \
 && /build/bin/pip --python /opt/tandem/bin/python freeze > /opt/tandem/packages.txt

FROM dependencies AS build-worker-cuda
RUN /build/bin/pip --python /opt/tandem/bin/python install ${PIP_ARGS} -c constraints.txt -r worker.txt \
 && /opt/tandem/bin/python -c 'import torch; assert torch.version.cuda, "this is not a CUDA build"'
COPY --from=wheel /wheel /wheel
RUN /build/bin/pip --python /opt/tandem/bin/python install --no-deps --no-index /wheel/*.whl \
 && /build/bin/pip --python /opt/tandem/bin/python check \
 && /build/bin/pip --python /opt/tandem/bin/python freeze > /opt/tandem/packages.txt

FROM dependencies AS models
ARG TARGET_MODEL=models/tiny-target
ARG DRAFT_MODEL=models/tiny-draft
COPY ${TARGET_MODEL} /models/target
COPY ${DRAFT_MODEL} /models/draft
RUN mkdir /tokenizer && cp -r /models/target /tokenizer && rm -f /tokenizer/target/*.safetensors

FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="Tandem" \
      org.opencontainers.image.description="Exact speculative decoding as three gRPC services" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      tandem.packages="/opt/tandem/packages.txt"
# The advice is about the torch that the orchestrator does well without.
ENV PATH=/opt/tandem/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TRANSFORMERS_NO_ADVISORY_WARNINGS=1 \
    HF_HUB_DISABLE_TELEMETRY=1
WORKDIR /tmp
USER 10001:10001

FROM runtime AS orchestrator
COPY --from=build-orchestrator /opt/tandem /opt/tandem
EXPOSE 50050 50051 8000 9090
CMD ["python", "-m", "orchestrator"]

FROM orchestrator AS orchestrator-demo
COPY --from=models /tokenizer /models

FROM runtime AS worker-cpu
COPY --from=build-worker-cpu /opt/tandem /opt/tandem
EXPOSE 50050 50052 50053 9090
CMD ["python", "-m", "target_service"]

FROM worker-cpu AS worker-cpu-demo
COPY --from=models /models /models

FROM runtime AS worker-cuda
COPY --from=build-worker-cuda /opt/tandem /opt/tandem
EXPOSE 50050 50052 50053 9090
# What NVIDIA's container runtime mounts into the container.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["python", "-m", "target_service"]
