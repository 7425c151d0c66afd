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
COPY e2e/lab/everstep_lab e2e/lab/everstep_lab
RUN PATH=/opt/build/bin:$PATH uv build --quiet --offline --wheel --no-build-isolation --python /opt/build --out-dir /wheels .

FROM tools AS operator-packages
RUN bash .ci/locked --extra operator > operator.txt \
 && uv venv --quiet --python python3 /opt/everstep \
 && uv pip install --python /opt/everstep --no-deps --require-hashes -r operator.txt
COPY --from=wheel /wheels /wheels
RUN uv pip install --python /opt/everstep --offline --no-deps /wheels/*.whl

FROM ${PYTHON_IMAGE} AS operator
COPY --from=operator-packages /opt/everstep /opt/everstep
ENV PATH=/opt/everstep/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /
ENTRYPOINT ["everstep-operator"]

FROM tools AS trainer-packages
RUN bash .ci/locked --extra runtime > runtime.txt \
 && uv venv --quiet --python python3 /opt/everstep \
 && uv pip install --python /opt/everstep --no-deps --require-hashes -r runtime.txt
COPY --from=wheel /wheels /wheels
RUN uv pip install --python /opt/everstep --offline --no-deps /wheels/*.whl

FROM ${PYTHON_IMAGE} AS trainer
COPY --from=trainer-packages /opt/everstep /opt/everstep
# torch looks its user up by number: without a name its compiler's cache has no folder.
RUN echo 'everstep:x:65532:65532:everstep:/tmp:/usr/sbin/nologin' >> /etc/passwd
ENV PATH=/opt/everstep/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 HOME=/tmp
USER 65532:65532
WORKDIR /workspace
CMD ["everstep", "--help"]
