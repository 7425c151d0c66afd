# The trainer of the kind lab: a Python with Everstep and the example, and *no torch*. torch's 5 GB
# cannot be loaded into every node of a kind cluster; the lab's device plugin mounts the host's Python
# packages at /opt/host-packages into each container that is given a GPU.
#
# It is also the proof that an image which has a torch of its own needs one line more.
ARG WHEEL_IMAGE=everstep/wheel:dev
ARG PYTHON_IMAGE=python:3.11-slim
FROM ${WHEEL_IMAGE} AS wheel
FROM ${PYTHON_IMAGE}
COPY --from=wheel /wheels /wheels
RUN python3 -m pip install --no-index --no-deps --no-cache-dir /wheels/*.whl
# USER: torch asks for the user's name.
ENV PYTHONPATH=/opt/host-packages PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 USER=everstep HOME=/tmp
USER 65532:65532
WORKDIR /workspace
COPY examples/byte-lm /workspace
CMD ["everstep", "--help"]
