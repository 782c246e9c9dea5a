# Every package is the one of deploy/*.lock, checked by its hash: `make lock` writes these.
FROM python:3.12-slim-bookworm AS build
WORKDIR /source
COPY deploy/requirements.lock deploy/build.lock deploy/
RUN python -m venv /opt/popgate \
    && /opt/popgate/bin/pip install --no-cache-dir --require-hashes --only-binary :all: --requirement deploy/requirements.lock \
    && python -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes --only-binary :all: --requirement deploy/build.lock
COPY pyproject.toml LICENSE README.md ./
COPY proxy proxy
COPY clients/python clients/python
COPY clients/spark clients/spark
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/popgate/bin/pip install --no-cache-dir --no-deps --no-index /wheels/popgate-*.whl

# The jobs over the journal, and Spark's master and workers: `docker build --target pipeline`.
FROM build AS build-pipeline
COPY deploy/pipeline.lock deploy/
# pyspark has no wheel, so one is made here.
RUN /opt/build/bin/pip wheel --no-cache-dir --no-build-isolation --require-hashes --wheel-dir /wheels --requirement deploy/pipeline.lock \
    && python -m venv --clear /opt/popgate \
    && /opt/popgate/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl

FROM python:3.12-slim-bookworm AS pipeline
# Debian removes replaced versions, so a pinned one would soon not be found.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends default-jre-headless procps \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --user-group --create-home popgate \
    && install --directory --owner=popgate --group=popgate --mode=0700 /journal /reports
COPY --from=build-pipeline /opt/popgate /opt/popgate
ENV PATH="/opt/popgate/bin:$PATH" PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /reports
ENTRYPOINT []
CMD ["popgate-pipeline", "--help"]

# The proxy. It listens on every address of the container, so it does not start without keys and TLS (docs/security.md).
FROM python:3.12-slim-bookworm
RUN useradd --system --uid 10001 --user-group --no-create-home popgate \
    && install --directory --owner=popgate --group=popgate --mode=0700 /data /journal
COPY --from=build /opt/popgate /opt/popgate
COPY --chmod=0555 deploy/healthcheck.py /opt/popgate/healthcheck.py
ENV PATH="/opt/popgate/bin:$PATH" PYTHONUNBUFFERED=1 POPGATE_HOST=0.0.0.0 POPGATE_DATA_DIR=/data
USER 10001:10001
VOLUME /data
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s CMD ["python", "/opt/popgate/healthcheck.py"]
ENTRYPOINT ["popgate"]
CMD ["serve"]
