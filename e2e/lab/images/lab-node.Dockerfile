# Device plugin, dcgm-exporter and faults of one node of the kind lab (everstep_lab.kind.labnode).
ARG WHEEL_IMAGE=everstep/wheel:dev
ARG PYTHON_IMAGE=python:3.11-slim
FROM ${WHEEL_IMAGE} AS packages
RUN bash .ci/locked --group lab-node > lab-node.txt \
 && uv pip install --python python3 --target /packages --no-deps --require-hashes -r lab-node.txt
FROM ${PYTHON_IMAGE}
COPY --from=packages /packages /opt/packages
COPY runtime/everstep_contract /opt/everstep/everstep_contract
COPY e2e/lab/everstep_lab /opt/everstep/everstep_lab
ENV PYTHONPATH=/opt/everstep:/opt/packages PYTHONUNBUFFERED=1
ENTRYPOINT ["python3", "-m", "everstep_lab.kind.labnode"]
