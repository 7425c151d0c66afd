# Everstep's images. Targets:
#   operator   what the Helm chart runs: no torch, any user, root may be read-only
#   trainer    a base for training images: torch and everstep[runtime]
#   wheel      Everstep's wheel, for images that already have a torch of their own
# Every version and hash comes from constraints.txt. Nothing here needs BuildKit.
#
#   docker build --target operator --tag everstep/operator:0.1.0 .
#
# Behind a mirror: --build-arg PIP_INDEX_URL=… (only intermediate stages see it).
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS tools
ARG PIP_INDEX_URL
ENV UV_DEFAULT_INDEX=$PIP_INDEX_URL UV_NO_CACHE=1 UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
WORKDIR /src
COPY constraints.txt pyproject.toml ./
COPY .ci/locked .ci/locked
RUN awk '/^[a-z]/{keep = /^uv==/} keep' constraints.txt > uv.txt \
 && python3 -m pip install --no-cache-dir --no-deps --require-hashes --target /opt/tools -r uv.txt \
 && ln -s /opt/tools/bin/uv /usr/local/bin/uv
RUN bash .ci/locked --group build > build.txt \
 && uv venv --quiet --python python3 /opt/build \
 && uv pip install --python /opt/build --no-deps --require-hashes -r build.txt

FROM tools AS wheel
COPY README.md LICENSE ./
COPY operator operator
COPY runtime runtime
RUN PATH=/opt/build/bin:$PATH uv build --quiet --offline --wheel --no-build-isolation --python /opt/build --out-dir /wheels .

FROM tools AS operator-dependencies
RUN bash .ci/locked --extra operator > operator.txt \
 && uv venv --quiet --python python3 /opt/everstep \
 && uv pip install --python /opt/everstep --no-deps --require-hashes -r operator.txt

FROM operator-dependencies AS operator-packages
COPY --from=wheel /wheels /wheels
COPY .ci/install-wheel .ci/install-wheel
RUN bash .ci/install-wheel /opt/everstep /added

FROM ${PYTHON_IMAGE} AS operator
COPY --from=operator-dependencies /opt/everstep /opt/everstep
COPY --from=operator-packages /added /opt/everstep
# USER: kopf and torch ask for the user's name, which a number chosen by a cluster does not have.
ENV PATH=/opt/everstep/bin:/usr/local/bin:/usr/bin:/bin USER=everstep PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /
ENTRYPOINT ["everstep-operator"]

FROM tools AS trainer-dependencies
RUN bash .ci/locked --extra runtime > runtime.txt \
 && uv venv --quiet --python python3 /opt/everstep \
 && uv pip install --python /opt/everstep --no-deps --require-hashes -r runtime.txt

FROM trainer-dependencies AS trainer-packages
COPY --from=wheel /wheels /wheels
COPY .ci/install-wheel .ci/install-wheel
RUN bash .ci/install-wheel /opt/everstep /added

FROM ${PYTHON_IMAGE} AS trainer
COPY --from=trainer-dependencies /opt/everstep /opt/everstep
COPY --from=trainer-packages /added /opt/everstep
ENV PATH=/opt/everstep/bin:/usr/local/bin:/usr/bin:/bin USER=everstep HOME=/tmp PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /workspace
CMD ["everstep", "--help"]
